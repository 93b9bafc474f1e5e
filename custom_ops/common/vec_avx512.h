// SPDX-License-Identifier: Apache-2.0
// Sixteen fp32 lanes and 32 bf16 lanes in one AVX-512 register each. Included by vec.h only.
#pragma once

#include <immintrin.h>

namespace fd {
namespace FD_ISA {

using FP32Vec16 = __m512;
using BF16Vec32 = __m512i;

FD_INLINE FP32Vec16 splat(float x) { return _mm512_set1_ps(x); }
FD_INLINE FP32Vec16 load(const float* p) { return _mm512_loadu_ps(p); }
FD_INLINE void store(float* p, FP32Vec16 x) { _mm512_storeu_ps(p, x); }
FD_INLINE FP32Vec16 add(FP32Vec16 a, FP32Vec16 b) { return _mm512_add_ps(a, b); }
FD_INLINE FP32Vec16 sub(FP32Vec16 a, FP32Vec16 b) { return _mm512_sub_ps(a, b); }
FD_INLINE FP32Vec16 mul(FP32Vec16 a, FP32Vec16 b) { return _mm512_mul_ps(a, b); }
FD_INLINE FP32Vec16 div(FP32Vec16 a, FP32Vec16 b) { return _mm512_div_ps(a, b); }
FD_INLINE FP32Vec16 sqrt(FP32Vec16 a) { return _mm512_sqrt_ps(a); }
FD_INLINE FP32Vec16 max(FP32Vec16 a, FP32Vec16 b) { return _mm512_max_ps(a, b); }
FD_INLINE FP32Vec16 min(FP32Vec16 a, FP32Vec16 b) { return _mm512_min_ps(a, b); }
// Returns a * b + c, rounded once on every path but the portable one.
FD_INLINE FP32Vec16 fma(FP32Vec16 a, FP32Vec16 b, FP32Vec16 c) { return _mm512_fmadd_ps(a, b, c); }
FD_INLINE FP32Vec16 round_to_int(FP32Vec16 x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Returns x * 2^n for an integral n, -126 <= n <= 127.
FD_INLINE FP32Vec16 scale_by_power(FP32Vec16 x, FP32Vec16 n) { return _mm512_scalef_ps(x, n); }
// Returns `value`, but 0 in lanes where x < limit.
FD_INLINE FP32Vec16 zero_where_below(FP32Vec16 x, float limit, FP32Vec16 value) {
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x, splat(limit), _CMP_LT_OQ), _mm512_setzero_ps());
}
// Returns the first n lanes of x (0 <= n <= 16) and `other` in the rest.
FD_INLINE FP32Vec16 replace_tail(FP32Vec16 x, int n, float other) {
  return _mm512_mask_mov_ps(splat(other), static_cast<__mmask16>((1u << n) - 1), x);
}
FD_INLINE FP32Vec16 load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
FD_INLINE FP32Vec16 load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#if defined(FD_ISA_AVX512_BF16)
FD_INLINE void store_bf16(uint16_t* p, FP32Vec16 x) {
  const __m256bh y = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &y, 32);
}
FD_INLINE FP32Vec16 round_to_bf16(FP32Vec16 x) {
  const __m512i wide = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#else
// Rounds to nearest even; a NaN keeps its sign and becomes quiet.
FD_INLINE void store_bf16(uint16_t* p, FP32Vec16 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i narrow = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow));
}
#endif
FD_INLINE BF16Vec32 load_pairs(const void* p) { return _mm512_loadu_si512(p); }
// Writes pairs[2 * i + parity] = x[i] for sixteen i; parity is 0 or 1. The other elements are not written.
FD_INLINE void store_interleaved(uint16_t* pairs, const uint16_t* x, int parity) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  _mm512_mask_storeu_epi16(pairs, parity == 0 ? 0x55555555u : 0xaaaaaaaau, both);
}

// Sums the lanes in a fixed order, pairwise by halves.
FD_INLINE float reduce_sum(FP32Vec16 x) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
FD_INLINE float reduce_max(FP32Vec16 x) { return _mm512_reduce_max_ps(x); }
// Returns `combine` over all lanes of vector r in lane r, in the order of reduce_sum.
template <class Combine>
FD_INLINE FP32Vec16 reduce_each(const FP32Vec16 (&x)[kLanes], Combine&& combine) {
  FP32Vec16 four[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const FP32Vec16 a = x[g], b = x[4 + g], c = x[8 + g], d = x[12 + g];
    const FP32Vec16 first = combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const FP32Vec16 last = combine(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    four[g] = combine(_mm512_shuffle_f32x4(first, last, 0x88), _mm512_shuffle_f32x4(first, last, 0xdd));
  }
  const auto halve = [&](FP32Vec16 a, FP32Vec16 b) {
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    return combine(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  };
  const FP32Vec16 even = halve(four[0], four[1]), odd = halve(four[2], four[3]);
  return combine(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
}

}  // namespace FD_ISA
}  // namespace fd
