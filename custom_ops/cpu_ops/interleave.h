// SPDX-License-Identifier: Apache-2.0
// Rows interleaved as kernels read them, [k units][rows]: one stream instead of one per row, because rows that are a
// power of two apart would evict each other from the caches.
#pragma once

#include "cpu_ops/dot.h"

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512)

// Transposes the four 4 x 4 matrices formed by the quarters of vectors i, 4 + i, 8 + i and 12 + i.
FD_INLINE void transpose_quarters(__m512i (&v)[16]) {
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
// Transposes sixteen vectors of sixteen elements of four bytes.
FD_INLINE void transpose16x16(__m512i (&v)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i a = _mm512_unpacklo_epi32(v[i], v[i + 1]), b = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    const __m512i c = _mm512_unpacklo_epi32(v[i + 2], v[i + 3]), d = _mm512_unpackhi_epi32(v[i + 2], v[i + 3]);
    v[i] = _mm512_unpacklo_epi64(a, c), v[i + 1] = _mm512_unpackhi_epi64(a, c);
    v[i + 2] = _mm512_unpacklo_epi64(b, d), v[i + 3] = _mm512_unpackhi_epi64(b, d);
  }
  transpose_quarters(v);
}
// Transposes eight vectors of eight elements of eight bytes.
FD_INLINE void transpose8x8(__m512i (&v)[8]) {
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

// Loads as many k units of a row as a register holds.
FD_INLINE __m512i load_row_units(const float* x) { return load_pairs(x); }
FD_INLINE __m512i load_row_units(const uint16_t* x) {
  if constexpr (sizeof(RowPair) == 4) return load_pairs(x);
  return _mm512_castps_si512(load_bf16(x));
}
#endif

// Writes row_unit(row, unit) to packed[unit][row] for units [0, count). On AVX-512, load(row, unit) returns a register
// of the row's units from `unit` on.
template <class Unit, class Load, class GetUnit>
FD_INLINE void interleave(int64_t rows, int64_t count, Unit* packed, const Load& load, const GetUnit& row_unit) {
  int64_t first = 0;
#if defined(FD_ISA_AVX512)
  constexpr int width = 64 / sizeof(Unit);
  constexpr int64_t kMinTransposedRows = 4;  // fewer rows are faster one by one
  for (; rows >= kMinTransposedRows && first + width <= count; first += width)
    for (int64_t row = 0; row < rows; row += width) {
      __m512i lines[width];
#pragma GCC unroll 16
      for (int i = 0; i < width; ++i) lines[i] = load(row + i < rows ? row + i : rows - 1, first);
      if constexpr (width == 16)
        transpose16x16(lines);
      else
        transpose8x8(lines);
      const int64_t left = rows - row < width ? rows - row : width;
      const auto mask = static_cast<__mmask16>((1u << (left * sizeof(Unit) / 4)) - 1);
#pragma GCC unroll 16
      for (int i = 0; i < width; ++i) _mm512_mask_storeu_epi32(packed + (first + i) * rows + row, mask, lines[i]);
    }
#else
  (void)load;
#endif
  for (; first < count; first += kInterleaveUnits) {
    const int64_t end = first + kInterleaveUnits < count ? first + kInterleaveUnits : count;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t u = first; u < end; ++u) packed[u * rows + r] = row_unit(r, u);
  }
}

// Interleaves rows of k elements, `stride` elements apart, as [k units][rows]. An odd k in bf16 is paired with zero, as
// in the packed weight.
template <class T>
static inline void interleave_rows(const T* x, int64_t stride, int64_t rows, int64_t k, RowUnit<T>* packed) {
  constexpr int64_t size = KUnit<T>::kSize;
  const int64_t whole = k / size;
  const auto at = [=](int64_t r, int64_t unit) { return x + r * stride + unit * size; };
#if defined(FD_ISA_AVX512)
  const auto load = [=](int64_t r, int64_t unit) { return load_row_units(at(r, unit)); };
#else
  const auto load = nullptr;
#endif
  interleave(rows, whole, packed, load, [=](int64_t r, int64_t unit) { return KUnit<T>::row_unit(at(r, unit)); });
  if (whole * size == k) return;
  for (int64_t r = 0; r < rows; ++r) packed[whole * rows + r] = KUnit<T>::row_unit_padded(at(r, whole));
}

}  // namespace FD_ISA
}  // namespace fd
