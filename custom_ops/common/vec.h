// SPDX-License-Identifier: Apache-2.0
// Sixteen fp32 lanes (F16), sixteen pairs of bf16 (Pairs) and what the kernels do with them, once per path. Each
// function is the same instruction sequence wherever it is inlined, so a lane's result depends on its operands alone.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(FD_ISA_AVX512) || defined(FD_ISA_AVX2)
#include <immintrin.h>
#endif

#define FD_INLINE static inline __attribute__((always_inline))

namespace fd {
namespace FD_ISA {

constexpr int kLanes = 16;
constexpr int kWorthCombining = 4;  // vectors whose lanes are rather combined one by one, at most

FD_INLINE float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

#if defined(FD_ISA_AVX512)

using F16 = __m512;
using Pairs = __m512i;

FD_INLINE F16 splat(float x) { return _mm512_set1_ps(x); }
FD_INLINE F16 load(const float* p) { return _mm512_loadu_ps(p); }
FD_INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
FD_INLINE F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
FD_INLINE F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
FD_INLINE F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
FD_INLINE F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
FD_INLINE F16 sqrt(F16 a) { return _mm512_sqrt_ps(a); }
FD_INLINE F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
FD_INLINE F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
// a * b + c, rounded once on the paths that have the instruction
FD_INLINE F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
FD_INLINE F16 round_to_int(F16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for an integral n with -126 <= n <= 127
FD_INLINE F16 scale_by_power(F16 x, F16 n) { return _mm512_scalef_ps(x, n); }
// value, but 0 where x < limit
FD_INLINE F16 zero_where_below(F16 x, float limit, F16 value) {
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x, splat(limit), _CMP_LT_OQ), _mm512_setzero_ps());
}
// the first n lanes of x (0 <= n <= 16), `other` in the rest
FD_INLINE F16 keep_first(F16 x, int n, float other) {
  return _mm512_mask_mov_ps(splat(other), static_cast<__mmask16>((1u << n) - 1), x);
}
FD_INLINE F16 load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
#if defined(FD_ISA_AVX512_BF16)
FD_INLINE void store_bf16(uint16_t* p, F16 x) {
  const __m256bh y = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &y, 32);
}
FD_INLINE F16 round_to_bf16(F16 x) {
  const __m512i wide = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
#else
// Rounds to nearest even; a NaN keeps its sign and becomes quiet.
FD_INLINE void store_bf16(uint16_t* p, F16 x) {
  const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i narrow = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow));
}
#endif
FD_INLINE Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
// pairs[2 * i + place] = x[i] for 16 i, place 0 or 1; the others are not written
FD_INLINE void store_in_pairs(uint16_t* pairs, const uint16_t* x, int place) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
  _mm512_mask_storeu_epi16(pairs, place == 0 ? 0x55555555u : 0xaaaaaaaau, both);
}

#elif defined(FD_ISA_AVX2)

struct F16 {
  __m256 low, high;
};
struct Pairs {
  __m256i low, high;
};

FD_INLINE F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FD_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FD_INLINE void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
FD_INLINE F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
FD_INLINE F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
FD_INLINE F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
FD_INLINE F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
FD_INLINE F16 sqrt(F16 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
FD_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
FD_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
FD_INLINE F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
FD_INLINE F16 round_to_int(F16 x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, mode), _mm256_round_ps(x.high, mode)};
}
FD_INLINE __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_add_ps(n, _mm256_set1_ps(127.0f))), 23));
}
FD_INLINE F16 scale_by_power(F16 x, F16 n) { return mul(x, F16{power_of_two(n.low), power_of_two(n.high)}); }
FD_INLINE F16 zero_where_below(F16 x, float limit, F16 value) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, bound, _CMP_LT_OQ), value.low),
          _mm256_andnot_ps(_mm256_cmp_ps(x.high, bound, _CMP_LT_OQ), value.high)};
}
FD_INLINE F16 keep_first(F16 x, int n, float other) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 kept_low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), index));
  const __m256 kept_high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), index));
  return {_mm256_blendv_ps(_mm256_set1_ps(other), x.low, kept_low),
          _mm256_blendv_ps(_mm256_set1_ps(other), x.high, kept_high)};
}
FD_INLINE __m256 widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
FD_INLINE F16 load_bf16(const uint16_t* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
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
FD_INLINE void store_bf16(uint16_t* p, F16 x) {
  const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(narrow(x.low), narrow(x.high)), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
FD_INLINE Pairs load_pairs(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}

#else

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
struct F16 {
  F4 part[4];
};
struct Pairs {
  U4 part[4];
};

#define FD_EACH(expression)      \
  F16 result;                    \
  for (int i = 0; i < 4; ++i) {  \
    result.part[i] = expression; \
  }                              \
  return result

FD_INLINE F16 splat(float x) { FD_EACH((F4{x, x, x, x})); }
FD_INLINE F16 load(const float* p) {
  F16 x;
  std::memcpy(&x, p, 64);
  return x;
}
FD_INLINE void store(float* p, F16 x) { std::memcpy(p, &x, 64); }
FD_INLINE F16 add(F16 a, F16 b) { FD_EACH(a.part[i] + b.part[i]); }
FD_INLINE F16 sub(F16 a, F16 b) { FD_EACH(a.part[i] - b.part[i]); }
FD_INLINE F16 mul(F16 a, F16 b) { FD_EACH(a.part[i] * b.part[i]); }
FD_INLINE F16 div(F16 a, F16 b) { FD_EACH(a.part[i] / b.part[i]); }
FD_INLINE F16 sqrt(F16 a) {
  float lanes[kLanes];
  std::memcpy(lanes, &a, 64);
  for (float& lane : lanes) lane = __builtin_sqrtf(lane);
  std::memcpy(&a, lanes, 64);
  return a;
}
FD_INLINE F16 max(F16 a, F16 b) { FD_EACH(a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
FD_INLINE F16 min(F16 a, F16 b) { FD_EACH(a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }
FD_INLINE F16 fma(F16 a, F16 b, F16 c) { FD_EACH(a.part[i] * b.part[i] + c.part[i]); }
// Exact for |x| < 2^22: adding and taking away 1.5 * 2^23 leaves the nearest integer.
FD_INLINE F16 round_to_int(F16 x) {
  const F4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  FD_EACH((x.part[i] + magic) - magic);
}
FD_INLINE F16 scale_by_power(F16 x, F16 n) {
  F16 result;
  for (int i = 0; i < 4; ++i) {
    const U4 bits = (U4)(__builtin_convertvector(n.part[i], I4) + 127) << 23;
    result.part[i] = x.part[i] * (F4)bits;
  }
  return result;
}
FD_INLINE F16 zero_where_below(F16 x, float limit, F16 value) {
  const F4 bound = {limit, limit, limit, limit};
  const F4 none = {0, 0, 0, 0};
  FD_EACH(x.part[i] < bound ? none : value.part[i]);
}
FD_INLINE F16 keep_first(F16 x, int n, float other) {
  const F4 rest = {other, other, other, other};
  FD_EACH((I4{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3} < n) ? x.part[i] : rest);
}
FD_INLINE F16 load_bf16(const uint16_t* p) {
  F16 result;
  for (int i = 0; i < 4; ++i) {
    const uint16_t* q = p + 4 * i;
    const U4 bits = {q[0], q[1], q[2], q[3]};
    result.part[i] = (F4)(bits << 16);
  }
  return result;
}
FD_INLINE void store_bf16(uint16_t* p, F16 x) {
  for (int i = 0; i < 4; ++i) {
    const U4 bits = (U4)x.part[i];
    const U4 rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    const U4 narrow = x.part[i] == x.part[i] ? rounded : (bits >> 16) | 0x40;
    for (int j = 0; j < 4; ++j) p[4 * i + j] = static_cast<uint16_t>(narrow[j]);
  }
}
FD_INLINE Pairs load_pairs(const void* p) {
  Pairs x;
  std::memcpy(&x, p, 64);
  return x;
}
#undef FD_EACH

#endif

#if !defined(FD_ISA_AVX512_BF16)
FD_INLINE F16 round_to_bf16(F16 x) {
  uint16_t lanes[kLanes];
  store_bf16(lanes, x);
  return load_bf16(lanes);
}
#endif
#if !defined(FD_ISA_AVX512)
FD_INLINE void store_in_pairs(uint16_t* pairs, const uint16_t* x, int place) {
  for (int i = 0; i < kLanes; ++i) pairs[2 * i + place] = x[i];
}
#endif

FD_INLINE F16 zero() { return splat(0.0f); }

// What products are made of: a unit is two consecutive k of sixteen outputs, an element the same k of one row. bf16
// where an instruction multiplies pairs of it, fp32 elsewhere, so that a pair is widened once for all its products.
#if defined(FD_ISA_AVX512_BF16)

struct PairElement {
  uint32_t bits;  // the first k low
};
FD_INLINE PairElement pair_element(uint16_t first, uint16_t second) {
  return {static_cast<uint32_t>(first) | static_cast<uint32_t>(second) << 16};
}

using PairUnit = Pairs;
FD_INLINE PairUnit widen_unit(Pairs w) { return w; }
// acc + product of the second k + product of the first, in that order
FD_INLINE F16 dot_unit(F16 acc, const PairElement& x, PairUnit w) {
  // GCC 12 moves sums to memory and back around the intrinsic.
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(x.bits));
  return acc;
}

#else

struct PairElement {
  float first, second;
};
FD_INLINE PairElement pair_element(uint16_t first, uint16_t second) {
  return {bf16_to_float(first), bf16_to_float(second)};
}

struct PairUnit {
  F16 first, second;
};
#if defined(FD_ISA_AVX512)
FD_INLINE PairUnit widen_unit(Pairs w) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_and_si512(w, high))};
}
// The floats p[2 i] and p[2 i + 1].
FD_INLINE PairUnit pair_floats(const float* p) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(load(p), even, load(p + kLanes)),
          _mm512_permutex2var_ps(load(p), odd, load(p + kLanes))};
}
// As store_bf16 rounds, in the upper halves, what arithmetic has made of bf16: its NaN are quiet, their lower halves 0,
// so that they need no care.
FD_INLINE __m512i round_to_high(F16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(down, is_odd, bits, _mm512_set1_epi32(0x8000));
}
FD_INLINE Pairs round_unit(const PairUnit& w) {
  const __m512i low = _mm512_srli_epi32(round_to_high(w.first), 16);
  return _mm512_mask_mov_epi16(low, 0xaaaaaaaau, round_to_high(w.second));
}
FD_INLINE PairUnit round_each(const PairUnit& w) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(round_to_high(w.first), high)),
          _mm512_castsi512_ps(_mm512_and_si512(round_to_high(w.second), high))};
}
#elif defined(FD_ISA_AVX2)
FD_INLINE PairUnit widen_unit(Pairs w) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(w.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.high, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(w.low, high)), _mm256_castsi256_ps(_mm256_and_si256(w.high, high))}};
}
#else
FD_INLINE PairUnit widen_unit(Pairs w) {
  PairUnit unit;
  for (int i = 0; i < 4; ++i) {
    unit.first.part[i] = (F4)(w.part[i] << 16);
    unit.second.part[i] = (F4)(w.part[i] & 0xffff0000u);
  }
  return unit;
}
#endif
FD_INLINE F16 dot_unit(F16 acc, const PairElement& x, const PairUnit& w) {
  return fma(splat(x.first), w.first, fma(splat(x.second), w.second, acc));
}

#endif

// Loads or stores the first n of 16 lanes; the others read as zero.
FD_INLINE F16 load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, 4 * static_cast<size_t>(n));
  return load(lanes);
}
FD_INLINE F16 load_first(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  std::memcpy(lanes, p, 2 * static_cast<size_t>(n));
  return load_bf16(lanes);
}
FD_INLINE void store_first(float* p, F16 x, int n) {
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, 4 * static_cast<size_t>(n));
}
FD_INLINE void store_first(uint16_t* p, F16 x, int n) {
  uint16_t lanes[kLanes];
  store_bf16(lanes, x);
  std::memcpy(p, lanes, 2 * static_cast<size_t>(n));
}
// The same for whole vectors, by element type: uint16_t holds bf16.
FD_INLINE F16 load_as_float(const float* p) { return load(p); }
FD_INLINE F16 load_as_float(const uint16_t* p) { return load_bf16(p); }
FD_INLINE void store_rounded(float* p, F16 x) { store(p, x); }
FD_INLINE void store_rounded(uint16_t* p, F16 x) { store_bf16(p, x); }

// Sixteen k of a row as elements of products.
FD_INLINE void store_elements(float* p, F16 x) { store(p, x); }
#if defined(FD_ISA_AVX512_BF16)
FD_INLINE void store_elements(PairElement* p, F16 x) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
#else
FD_INLINE void store_elements(PairElement* p, F16 x) { store(reinterpret_cast<float*>(p), x); }
#endif

FD_INLINE float to_float(float x) { return x; }
FD_INLINE float to_float(uint16_t x) { return bf16_to_float(x); }

// Sums the lanes in one fixed tree.
FD_INLINE float sum_lanes(F16 x) {
#if defined(FD_ISA_AVX512)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
#endif
}
// The largest lane; without a promise for NaN.
FD_INLINE float max_lane(F16 x) {
#if defined(FD_ISA_AVX512)
  return _mm512_reduce_max_ps(x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

#if defined(FD_ISA_AVX512)
// Lane r of the result is `combine` over all lanes of vector r, in the tree of sum_lanes.
template <class Combine>
FD_INLINE F16 combine_lanes(const F16 (&x)[kLanes], Combine&& combine) {
  F16 four[4];
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    const F16 a = x[g], b = x[4 + g], c = x[8 + g], d = x[12 + g];
    const F16 first = combine(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const F16 last = combine(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    four[g] = combine(_mm512_shuffle_f32x4(first, last, 0x88), _mm512_shuffle_f32x4(first, last, 0xdd));
  }
  const auto halve = [&](F16 a, F16 b) {
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    return combine(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  };
  const F16 even = halve(four[0], four[1]), odd = halve(four[2], four[3]);
  return combine(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xdd));
}
#endif
// The sums, or the largest lanes, of the first `count` vectors as lanes of one; the other vectors are zeros.
FD_INLINE F16 sum_lanes_of_each(const F16 (&x)[kLanes], int count) {
#if defined(FD_ISA_AVX512)
  if (count > kWorthCombining) return combine_lanes(x, [](F16 a, F16 b) { return add(a, b); });
#endif
  float lanes[kLanes] = {};
  for (int r = 0; r < count; ++r) lanes[r] = sum_lanes(x[r]);
  return load(lanes);
}
FD_INLINE F16 max_lane_of_each(const F16 (&x)[kLanes], int count) {
#if defined(FD_ISA_AVX512)
  if (count > kWorthCombining) return combine_lanes(x, [](F16 a, F16 b) { return max(a, b); });
#endif
  float lanes[kLanes] = {};
  for (int r = 0; r < count; ++r) lanes[r] = max_lane(x[r]);
  return load(lanes);
}

// e^x with a relative error below 2e-7; exactly 0 below -87.3, e^88.3 above 88.3, NaN for NaN.
FD_INLINE F16 exp(F16 x) {
  const F16 limited = max(splat(-87.3f), min(splat(88.3f), x));  // the second operand wins when one is NaN
  const F16 n = round_to_int(mul(limited, splat(1.44269504f)));
  F16 r = fma(n, splat(-0.693145752f), limited);
  r = fma(n, splat(-1.42860677e-6f), r);
  F16 p = splat(1.98412698e-4f);
  p = fma(p, r, splat(1.38888889e-3f));
  p = fma(p, r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_where_below(x, -87.3f, scale_by_power(p, n));
}

}  // namespace FD_ISA
}  // namespace fd
