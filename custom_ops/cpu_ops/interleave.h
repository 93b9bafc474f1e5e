// SPDX-License-Identifier: Apache-2.0
// Rows side by side, as kernels read them: [units of k][rows], one stream instead of many that meet in the same sets of
// the cache.
#pragma once

#include "cpu_ops/dot.h"

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512)

// Turns the four 4 x 4 matrices of quarters of vectors i, 4 + i, 8 + i and 12 + i.
FD_INLINE void turn_quarters(__m512i (&v)[16]) {
  __m512i w[16];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88), b = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xdd);
    w[i] = _mm512_shuffle_i32x4(a, c, 0x88), w[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    w[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88), w[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = w[i];
}
// Element i of vector j becomes element j of vector i: sixteen by sixteen of four bytes, or eight by eight of eight.
FD_INLINE void turn(__m512i (&v)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    v[i] = _mm512_unpacklo_epi64(a, c), v[i + 1] = _mm512_unpackhi_epi64(a, c);
    v[i + 2] = _mm512_unpacklo_epi64(b, d), v[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  turn_quarters(v);
}
FD_INLINE void turn(__m512i (&v)[8]) {
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    const __m512i a = v[i], b = v[i + 1];
    v[i] = _mm512_unpacklo_epi64(a, b), v[i + 1] = _mm512_unpackhi_epi64(a, b);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512i a = _mm512_shuffle_i32x4(v[i], v[2 + i], 0x88), b = _mm512_shuffle_i32x4(v[i], v[2 + i], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(v[4 + i], v[6 + i], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(v[4 + i], v[6 + i], 0xdd);
    v[i] = _mm512_shuffle_i32x4(a, c, 0x88), v[4 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
    v[2 + i] = _mm512_shuffle_i32x4(b, d, 0x88), v[6 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
}

#endif

#if defined(FD_ISA_AVX512)
// A row's elements of a line.
FD_INLINE __m512i element_line(const float* x) { return load_pairs(x); }
FD_INLINE __m512i element_line(const uint16_t* x) {
  if constexpr (sizeof(PairElement) == 4) return load_pairs(x);
  return _mm512_castps_si512(load_bf16(x));
}
#endif

// Writes element(row, unit) to packed[unit][row] for units [0, count). Where registers hold lines of 64 bytes,
// line(row, unit) is a row's elements from `unit` on.
template <class Element, class Line, class One>
FD_INLINE void interleave(int64_t rows, int64_t count, Element* packed, const Line& line, const One& element) {
  int64_t first = 0;
#if defined(FD_ISA_AVX512)
  constexpr int width = 64 / sizeof(Element);
  constexpr int64_t kWorthTurning = 4;  // rows
  for (; rows >= kWorthTurning && first + width <= count; first += width)
    for (int64_t row = 0; row < rows; row += width) {
      __m512i lines[width];
#pragma GCC unroll 16
      for (int i = 0; i < width; ++i) lines[i] = line(row + i < rows ? row + i : rows - 1, first);
      turn(lines);
      const int64_t left = rows - row < width ? rows - row : width;
      const auto kept = static_cast<__mmask16>((1u << (left * sizeof(Element) / 4)) - 1);
#pragma GCC unroll 16
      for (int i = 0; i < width; ++i) _mm512_mask_storeu_epi32(packed + (first + i) * rows + row, kept, lines[i]);
    }
#else
  (void)line;
#endif
  constexpr int64_t strip = 128;  // its elements stay in the L1 cache
  for (; first < count; first += strip) {
    const int64_t end = first + strip < count ? first + strip : count;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t u = first; u < end; ++u) packed[u * rows + r] = element(r, u);
  }
}

// Rows [rows][k] as elements [steps][rows]. An odd k in bf16 gets a zero as partner, like its weight.
template <class T>
static inline void interleave_rows(const T* x, int64_t rows, int64_t k, Element<T>* packed) {
  constexpr int64_t size = Step<T>::kSize;
  const int64_t whole = k / size;
  const auto at = [=](int64_t r, int64_t step) { return x + r * k + step * size; };
#if defined(FD_ISA_AVX512)
  const auto line = [=](int64_t r, int64_t step) { return element_line(at(r, step)); };
#else
  const auto line = nullptr;
#endif
  interleave(rows, whole, packed, line, [=](int64_t r, int64_t step) { return Step<T>::element(at(r, step)); });
  if (whole * size == k) return;
  for (int64_t r = 0; r < rows; ++r) packed[whole * rows + r] = Step<T>::first_only(at(r, whole));
}

}  // namespace FD_ISA
}  // namespace fd
