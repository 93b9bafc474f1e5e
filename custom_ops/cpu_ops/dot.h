// SPDX-License-Identifier: Apache-2.0
// The micro-kernel of linear layers and attention: MR rows times NV packed panels of sixteen outputs.
//
// A k unit is what one product instruction consumes: one k in fp32, a pair of k in bf16. Each output has one
// accumulator that adds its k units in order, for any MR and NV. The result of a row is therefore independent of the
// other rows.
#pragma once

#include "common/vec.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace FD_ISA {

// Accumulators that fit the registers: kColumnRows rows by one panel, or fewer rows by up to kMaxPanels.
#if defined(FD_ISA_AVX512)
constexpr int kColumnRows = 24, kMaxPanels = 4;
#elif defined(FD_ISA_AVX2)
constexpr int kColumnRows = 4, kMaxPanels = 1;
#else
constexpr int kColumnRows = 2, kMaxPanels = 1;
#endif

FD_INLINE FP32Vec16 dot_accumulate(FP32Vec16 acc, float x, const FP32Vec16& w) { return fma(splat(x), w, acc); }

// sums[r][v] += x[r] * units[v] for all rows and panels.
template <class Sum, class Row, class Weight, int MR, int NV>
FD_INLINE void accumulate_products(Sum (&sums)[MR][NV], const Row* x, const Weight (&units)[NV]) {
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[r][v] = dot_accumulate(sums[r][v], x[r], units[v]);
}

template <class T>
struct KUnit;

template <>
struct KUnit<float> {
  static constexpr int kSize = 1;  // k per unit
  using RowUnit = float;           // the inputs of one row
  using WeightUnit = FP32Vec16;    // the weights of sixteen outputs
  FD_INLINE RowUnit row_unit(const float* x) { return *x; }
  FD_INLINE RowUnit row_unit_padded(const float* x) { return *x; }
  FD_INLINE FP32Vec16 load_weights(const float* p) { return load(p); }
  FD_INLINE FP32Vec16 dot(FP32Vec16 acc, RowUnit x, const FP32Vec16& w) { return dot_accumulate(acc, x, w); }
};

template <>
struct KUnit<uint16_t> {
  static constexpr int kSize = 2;
  using RowUnit = RowPair;
  using WeightUnit = WeightPair;
  FD_INLINE RowUnit row_unit(const uint16_t* x) { return row_pair(x[0], x[1]); }
  FD_INLINE RowUnit row_unit_padded(const uint16_t* x) { return row_pair(*x, 0); }
  FD_INLINE WeightPair load_weights(const uint16_t* p) { return widen_pairs(load_pairs(p)); }
  FD_INLINE FP32Vec16 dot(FP32Vec16 acc, const RowUnit& x, const WeightPair& w) { return dot_accumulate(acc, x, w); }
};

template <class T>
using RowUnit = typename KUnit<T>::RowUnit;

// Elements of one k unit of one panel.
template <class T>
constexpr int64_t kUnitSize = kLanes * KUnit<T>::kSize;

// Elements of a cache line, and k units of one panel in it.
template <class T>
constexpr int64_t kLineElements = 64 / static_cast<int64_t>(sizeof(T));
template <class T>
constexpr int64_t kUnitsPerLine = kLineElements<T> / kUnitSize<T>;

// acc[r][v] += row r * panel v over `num_units` k units. A unit of row r is at a[r * row_stride + unit * unit_stride],
// that of a panel at panels[v][unit * panel_stride]. Meanwhile the lines of prefetched[v] are prefetched into L2 at the
// same stride.
template <int MR, int NV, class T>
FD_INLINE void dot_block(FP32Vec16 (&acc)[MR][NV], const RowUnit<T>* a, int64_t row_stride, int64_t unit_stride,
                         const T* const (&panels)[NV], int64_t panel_stride, int64_t num_units,
                         const T* const (&prefetched)[NV]) {
  for (int64_t unit = 0; unit < num_units; ++unit) {
    typename KUnit<T>::WeightUnit weights[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      if (unit % kUnitsPerLine<T> == 0) __builtin_prefetch(prefetched[v] + unit * panel_stride, 0, 2);
      weights[v] = KUnit<T>::load_weights(panels[v] + unit * panel_stride);
    }
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
        acc[r][v] = KUnit<T>::dot(acc[r][v], a[r * row_stride + unit * unit_stride], weights[v]);
    }
  }
}

// Calls body(RowCount<rows>()) for a count of 1..kColumnRows, so that the count is a compile-time constant there.
template <int kRows>
struct RowCount {
  static constexpr int value = kRows;
};

template <int kRows = 1, class Body>
FD_INLINE void dispatch_rows(int64_t rows, Body&& body) {
  if (rows == kRows) return body(RowCount<kRows>());
  if constexpr (kRows < kColumnRows) dispatch_rows<kRows + 1>(rows, body);
}

}  // namespace FD_ISA
}  // namespace fd
