// SPDX-License-Identifier: Apache-2.0
// The one micro-kernel of linear layers and attention: rows of `a` times packed panels of sixteen outputs. A step is
// one k in fp32 and a pair of k in bf16. Every output is one accumulator that meets its steps in order, whatever the
// number of rows (MR) or panels (NV) that share the loop: that is what makes a row's result independent of its
// neighbours.
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// What the registers hold: kColumnRows by one panel, or fewer rows by up to kMaxPanels.
#if defined(FD_ISA_AVX512_BF16)
constexpr bool kFetchesStreams = false;  // to the processors of this path one stream comes in faster than several
#else
constexpr bool kFetchesStreams = true;
#endif
#if defined(FD_ISA_AVX512)
constexpr int kColumnRows = 24, kMaxPanels = 4;
#elif defined(FD_ISA_AVX2)
constexpr int kColumnRows = 4, kMaxPanels = 1;
#else
constexpr int kColumnRows = 2, kMaxPanels = 1;
#endif

FD_INLINE F16 dot_unit(F16 acc, float x, const F16& w) { return fma(splat(x), w, acc); }

// sums[r][v] += element r times units[v], for all rows and panels.
template <class Sum, class Element, class Unit, int MR, int NV>
FD_INLINE void dot_units(Sum (&sums)[MR][NV], const Element* x, const Unit (&units)[NV]) {
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[r][v] = dot_unit(sums[r][v], x[r], units[v]);
}

template <class T>
struct Step;

template <>
struct Step<float> {
  static constexpr int kSize = 1;  // k of one step
  using Element = float;           // what a row holds of one step
  using Panel = F16;
  FD_INLINE Element element(const float* x) { return *x; }
  FD_INLINE Element first_only(const float* x) { return *x; }
  FD_INLINE F16 load_panel(const float* p) { return load(p); }
  FD_INLINE F16 dot(F16 acc, Element x, const F16& w) { return dot_unit(acc, x, w); }
};

template <>
struct Step<uint16_t> {
  static constexpr int kSize = 2;
  using Element = PairElement;
  using Panel = PairUnit;
  FD_INLINE Element element(const uint16_t* x) { return pair_element(x[0], x[1]); }
  FD_INLINE Element first_only(const uint16_t* x) { return pair_element(*x, 0); }
  FD_INLINE PairUnit load_panel(const uint16_t* p) { return widen_unit(load_pairs(p)); }
  FD_INLINE F16 dot(F16 acc, const Element& x, const PairUnit& w) { return dot_unit(acc, x, w); }
};

template <class T>
using Element = typename Step<T>::Element;

// Elements of one step of one panel.
template <class T>
constexpr int64_t kStepSize = kLanes * Step<T>::kSize;

// Elements of a line of the cache, and steps of one panel that it holds.
template <class T>
constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
template <class T>
constexpr int64_t kLineSteps = kLine<T> / kStepSize<T>;

// acc[r][v] += a(r, k) * panels[v](k) over `num_steps` steps. Row r's element lies at a[r * a_row + step * a_step], a
// panel's at panels[v][step * panel_stride]. The L2 cache is asked for ahead[v], line by line at the same stride.
template <int MR, int NV, class T>
FD_INLINE void dot_block(F16 (&acc)[MR][NV], const Element<T>* a, int64_t a_row, int64_t a_step,
                         const T* const (&panels)[NV], int64_t panel_stride, int64_t num_steps,
                         const T* const (&ahead)[NV]) {
  for (int64_t step = 0; step < num_steps; ++step) {
    typename Step<T>::Panel panel[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      if (step % kLineSteps<T> == 0) __builtin_prefetch(ahead[v] + step * panel_stride, 0, 2);
      panel[v] = Step<T>::load_panel(panels[v] + step * panel_stride);
    }
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = Step<T>::dot(acc[r][v], a[r * a_row + step * a_step], panel[v]);
    }
  }
}

// Calls body(rows) with the count, 1..kColumnRows, as a constant: body is a generic callable that takes an
// integral_constant-like value.
template <int kRows>
struct Rows {
  static constexpr int value = kRows;
};

template <int kRows = 1, class Body>
FD_INLINE void with_rows(int64_t rows, Body&& body) {
  if (rows == kRows) return body(Rows<kRows>());
  if constexpr (kRows < kColumnRows) with_rows<kRows + 1>(rows, body);
}

}  // namespace FD_ISA
}  // namespace fd
