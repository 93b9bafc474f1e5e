// SPDX-License-Identifier: Apache-2.0
// The lanes of one instruction-set path: the operations of ScalarLanes on a vector, and those of the row kernels.
// Included by sources that setup.py compiles once per path (FD_ISA).
#pragma once

#include "common/sampling.h"

#if defined(FD_ISA_AVX512) || defined(FD_ISA_AVX2)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC warns about its own _mm512_undefined_*
#endif

namespace fd {
namespace FD_ISA {
namespace {

#if defined(FD_ISA_AVX512)

struct Lanes {
  static constexpr int kWidth = 16;
  using F = __m512;
  using U = __m512i;
  using M = __mmask16;

  static FD_RULE F set(float x) { return _mm512_set1_ps(x); }
  static FD_RULE U set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static FD_RULE F load(const float* p) { return _mm512_loadu_ps(p); }
  static FD_RULE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static FD_RULE void store(uint32_t* p, U a) { _mm512_storeu_si512(p, a); }
  static FD_RULE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static FD_RULE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static FD_RULE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static FD_RULE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static FD_RULE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static FD_RULE U bits(F a) { return _mm512_castps_si512(a); }
  static FD_RULE F from_bits(U a) { return _mm512_castsi512_ps(a); }
  static FD_RULE F to_float(U a) { return _mm512_cvtepi32_ps(a); }
  static FD_RULE U truncate(F a) { return _mm512_cvttps_epi32(a); }
  static FD_RULE U add(U a, U b) { return _mm512_add_epi32(a, b); }
  static FD_RULE U sub(U a, U b) { return _mm512_sub_epi32(a, b); }
  static FD_RULE U bit_and(U a, U b) { return _mm512_and_si512(a, b); }
  static FD_RULE U bit_xor(U a, U b) { return _mm512_xor_si512(a, b); }
  template <int kCount>
  static FD_RULE U shift_left(U a) {
    return _mm512_slli_epi32(a, kCount);
  }
  template <int kCount>
  static FD_RULE U shift_right_signed(U a) {
    return _mm512_srai_epi32(a, kCount);
  }
  static FD_RULE M is_negative(U a) { return _mm512_movepi32_mask(a); }
  static FD_RULE M greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static FD_RULE M at_least(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static FD_RULE M equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static FD_RULE M equal(U a, U b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static FD_RULE M unordered(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  static FD_RULE M both(M a, M b) { return a & b; }
  static FD_RULE M either(M a, M b) { return a | b; }
  static FD_RULE uint32_t mask_bits(M m) { return m; }
  static FD_RULE M lanes_of(uint32_t bits) { return static_cast<M>(bits); }
  static FD_RULE F select(M m, F yes, F no) { return _mm512_mask_blend_ps(m, no, yes); }
  static FD_RULE U select(M m, U yes, U no) { return _mm512_mask_blend_epi32(m, no, yes); }
  static FD_RULE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  static FD_RULE U iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static FD_RULE void multiply_wide(U a, uint32_t b, U* high, U* low) {
    const U factor = set(b);
    const U even = _mm512_mul_epu32(a, factor);
    const U odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, _MM_PERM_CCAA);
    *high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_DDBB);
  }
  // Returns counters whose words, after interleave, belong to 64 consecutive ids.
  static FD_RULE U group_iota() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
  static FD_RULE void interleave(U w[4]) {
    const U low01 = _mm512_unpacklo_epi32(w[0], w[1]), high01 = _mm512_unpackhi_epi32(w[0], w[1]);
    const U low23 = _mm512_unpacklo_epi32(w[2], w[3]), high23 = _mm512_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm512_unpacklo_epi64(low01, low23);
    w[1] = _mm512_unpackhi_epi64(low01, low23);
    w[2] = _mm512_unpacklo_epi64(high01, high23);
    w[3] = _mm512_unpackhi_epi64(high01, high23);
  }
  struct Mass {
    U low, high;  // masses of the first eight lanes, and of the last eight
  };
  static FD_RULE Mass mass(F e) {
    const F scaled = mul(e, set(0x1p40f));
    static_assert(kMassBits == 40);
    return {_mm512_cvttps_epi64(_mm512_castps512_ps256(scaled)),
            _mm512_cvttps_epi64(_mm512_extractf32x8_ps(scaled, 1))};
  }
  static FD_RULE Mass add(Mass a, Mass b) { return {_mm512_add_epi64(a.low, b.low), _mm512_add_epi64(a.high, b.high)}; }
  static FD_RULE Mass add_where(M m, Mass a, Mass b) {
    return {_mm512_mask_add_epi64(a.low, static_cast<__mmask8>(m), a.low, b.low),
            _mm512_mask_add_epi64(a.high, static_cast<__mmask8>(m >> 8), a.high, b.high)};
  }
  static FD_RULE void store(uint64_t* p, Mass a) {
    _mm512_storeu_si512(p, a.low);
    _mm512_storeu_si512(p + 8, a.high);
  }
  static FD_RULE uint64_t sum(Mass a) {
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(a.low, a.high)));
  }
};

#elif defined(FD_ISA_AVX2)

struct Lanes {
  static constexpr int kWidth = 8;
  using F = __m256;
  using U = __m256i;
  using M = __m256;  // all ones or zeros per lane

  static FD_RULE F set(float x) { return _mm256_set1_ps(x); }
  static FD_RULE U set(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static FD_RULE F load(const float* p) { return _mm256_loadu_ps(p); }
  static FD_RULE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static FD_RULE void store(uint32_t* p, U a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static FD_RULE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static FD_RULE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static FD_RULE F div(F a, F b) { return _mm256_div_ps(a, b); }
  static FD_RULE F max(F a, F b) { return _mm256_max_ps(a, b); }
  static FD_RULE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static FD_RULE U bits(F a) { return _mm256_castps_si256(a); }
  static FD_RULE F from_bits(U a) { return _mm256_castsi256_ps(a); }
  static FD_RULE F to_float(U a) { return _mm256_cvtepi32_ps(a); }
  static FD_RULE U truncate(F a) { return _mm256_cvttps_epi32(a); }
  static FD_RULE U add(U a, U b) { return _mm256_add_epi32(a, b); }
  static FD_RULE U sub(U a, U b) { return _mm256_sub_epi32(a, b); }
  static FD_RULE U bit_and(U a, U b) { return _mm256_and_si256(a, b); }
  static FD_RULE U bit_xor(U a, U b) { return _mm256_xor_si256(a, b); }
  template <int kCount>
  static FD_RULE U shift_left(U a) {
    return _mm256_slli_epi32(a, kCount);
  }
  template <int kCount>
  static FD_RULE U shift_right_signed(U a) {
    return _mm256_srai_epi32(a, kCount);
  }
  static FD_RULE M is_negative(U a) { return from_bits(shift_right_signed<31>(a)); }
  static FD_RULE M greater(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static FD_RULE M at_least(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static FD_RULE M equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  static FD_RULE M equal(U a, U b) { return from_bits(_mm256_cmpeq_epi32(a, b)); }
  static FD_RULE M unordered(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  static FD_RULE M both(M a, M b) { return _mm256_and_ps(a, b); }
  static FD_RULE M either(M a, M b) { return _mm256_or_ps(a, b); }
  static FD_RULE uint32_t mask_bits(M m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
  static FD_RULE M lanes_of(uint32_t bits) {
    const U bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return equal(bit_and(set(bits), bit), bit);
  }
  static FD_RULE F select(M m, F yes, F no) { return _mm256_blendv_ps(no, yes, m); }
  static FD_RULE U select(M m, U yes, U no) { return bits(select(m, from_bits(yes), from_bits(no))); }
  static FD_RULE float reduce_max(F a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
  }
  static FD_RULE U iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static FD_RULE void multiply_wide(U a, uint32_t b, U* high, U* low) {
    const U factor = set(b);
    const U even = _mm256_mul_epu32(a, factor);
    const U odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }
  static FD_RULE U group_iota() { return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); }
  static FD_RULE void interleave(U w[4]) {
    const U low01 = _mm256_unpacklo_epi32(w[0], w[1]), high01 = _mm256_unpackhi_epi32(w[0], w[1]);
    const U low23 = _mm256_unpacklo_epi32(w[2], w[3]), high23 = _mm256_unpackhi_epi32(w[2], w[3]);
    w[0] = _mm256_unpacklo_epi64(low01, low23);
    w[1] = _mm256_unpackhi_epi64(low01, low23);
    w[2] = _mm256_unpacklo_epi64(high01, high23);
    w[3] = _mm256_unpackhi_epi64(high01, high23);
  }
  struct Mass {
    U low, high;  // masses of the first four lanes, and of the last four
  };
  static FD_RULE Mass mass(F e) {
    const U mantissa = _mm256_or_si256(bit_and(bits(e), set(0x7fffffu)), set(0x800000u));
    const U shift = sub(set(150u), _mm256_srli_epi32(bits(e), 23));
    const auto shifted = [](__m128i m, __m128i s) {
      return _mm256_srlv_epi64(_mm256_slli_epi64(_mm256_cvtepu32_epi64(m), kMassBits), _mm256_cvtepu32_epi64(s));
    };
    return {shifted(_mm256_castsi256_si128(mantissa), _mm256_castsi256_si128(shift)),
            shifted(_mm256_extracti128_si256(mantissa, 1), _mm256_extracti128_si256(shift, 1))};
  }
  static FD_RULE Mass add(Mass a, Mass b) { return {_mm256_add_epi64(a.low, b.low), _mm256_add_epi64(a.high, b.high)}; }
  static FD_RULE Mass add_where(M m, Mass a, Mass b) {
    const U low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(bits(m)));
    const U high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(bits(m), 1));
    return add(a, {bit_and(low, b.low), bit_and(high, b.high)});
  }
  static FD_RULE void store(uint64_t* p, Mass a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4), a.high);
  }
  static FD_RULE uint64_t sum(Mass a) {
    uint64_t lanes[kWidth], total = 0;
    store(lanes, a);
    for (uint64_t lane : lanes) total += lane;
    return total;
  }
};

#else

struct Lanes : ScalarLanes {
  static FD_RULE F load(const float* p) { return *p; }
  static FD_RULE void store(float* p, F a) { *p = a; }
  static FD_RULE void store(uint32_t* p, U a) { *p = a; }
  static FD_RULE F div(F a, F b) { return a / b; }
  static FD_RULE F max(F a, F b) { return a > b ? a : b; }
  static FD_RULE U truncate(F a) { return a < 0x1p31f ? static_cast<U>(static_cast<int32_t>(a)) : 0x80000000u; }
  using ScalarLanes::add;
  static FD_RULE M at_least(F a, F b) { return a >= b; }
  static FD_RULE M equal(F a, F b) { return a == b; }
  static FD_RULE M equal(U a, U b) { return a == b; }
  static FD_RULE M unordered(F a, F b) { return a != a || b != b; }
  static FD_RULE M both(M a, M b) { return a && b; }
  static FD_RULE M either(M a, M b) { return a || b; }
  static FD_RULE uint32_t mask_bits(M m) { return m ? 1u : 0u; }
  static FD_RULE M lanes_of(uint32_t bits) { return bits & 1; }
  using ScalarLanes::select;
  static FD_RULE U select(M m, U yes, U no) { return m ? yes : no; }
  static FD_RULE float reduce_max(F a) { return a; }
  static FD_RULE U iota() { return 0; }
  static FD_RULE U group_iota() { return 0; }
  static FD_RULE void interleave(U*) {}
  struct Mass {
    uint64_t value;
  };
  static FD_RULE Mass mass(F e) { return {mass_of(e)}; }
  static FD_RULE Mass add(Mass a, Mass b) { return {a.value + b.value}; }
  static FD_RULE Mass add_where(M m, Mass a, Mass b) { return {m ? a.value + b.value : a.value}; }
  static FD_RULE void store(uint64_t* p, Mass a) { *p = a.value; }
  static FD_RULE uint64_t sum(Mass a) { return a.value; }
};

#endif

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
