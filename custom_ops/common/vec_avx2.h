// SPDX-License-Identifier: Apache-2.0
// Sixteen fp32 lanes and 32 bf16 lanes in two AVX2 registers each. Included by vec.h only.
#pragma once

#include <immintrin.h>

namespace fd {
namespace FD_ISA {

struct FP32Vec16 {
  __m256 low, high;
};
struct BF16Vec32 {
  __m256i low, high;
};

FD_INLINE FP32Vec16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FD_INLINE FP32Vec16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FD_INLINE void store(float* p, FP32Vec16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
FD_INLINE FP32Vec16 add(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 sub(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 mul(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 div(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 sqrt(FP32Vec16 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
FD_INLINE FP32Vec16 max(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 min(FP32Vec16 a, FP32Vec16 b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
FD_INLINE FP32Vec16 fma(FP32Vec16 a, FP32Vec16 b, FP32Vec16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
FD_INLINE FP32Vec16 round_to_int(FP32Vec16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}
FD_INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_add_ps(n, _mm256_set1_ps(127.0f))), 23));
}
FD_INLINE FP32Vec16 scale_by_power(FP32Vec16 x, FP32Vec16 n) {
  return mul(x, FP32Vec16{power_of_two(n.low), power_of_two(n.high)});
}
FD_INLINE FP32Vec16 zero_where_below(FP32Vec16 x, float limit, FP32Vec16 value) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, bound, _CMP_LT_OQ), value.low),
          _mm256_andnot_ps(_mm256_cmp_ps(x.high, bound, _CMP_LT_OQ), value.high)};
}
FD_INLINE FP32Vec16 replace_tail(FP32Vec16 x, int n, float other) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 kept_low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
  const __m256 kept_high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index));
  return {_mm256_blendv_ps(_mm256_set1_ps(other), x.low, kept_low),
          _mm256_blendv_ps(_mm256_set1_ps(other), x.high, kept_high)};
}
FD_INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
FD_INLINE FP32Vec16 load_bf16(const uint16_t* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
FD_INLINE FP32Vec16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Rounds to nearest even; a NaN keeps its sign and becomes quiet.
FD_INLINE __m256i narrow(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
FD_INLINE void store_bf16(uint16_t* p, FP32Vec16 x) {
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.low), narrow(x.high)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
FD_INLINE BF16Vec32 load_pairs(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}

}  // namespace FD_ISA
}  // namespace fd
