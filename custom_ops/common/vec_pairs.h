// SPDX-License-Identifier: Apache-2.0
// Products of pairs of consecutive k: a RowPair holds the two inputs of one row, a WeightPair those of sixteen outputs.
// Both are bf16 on the path whose instruction multiplies pairs of bf16, and fp32 elsewhere, so that a pair of weights
// is widened once for all rows. Included by vec.h only.
#pragma once

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512_BF16)

struct RowPair {
  uint32_t bits;  // the first k in the low half
};
FD_INLINE RowPair row_pair(uint16_t first, uint16_t second) {
  return {static_cast<uint32_t>(first) | static_cast<uint32_t>(second) << 16};
}

using WeightPair = BF16Vec32;
FD_INLINE WeightPair widen_pairs(BF16Vec32 w) { return w; }
// Returns acc + the product of the second k + the product of the first, in that order.
FD_INLINE FP32Vec16 dot_accumulate(FP32Vec16 acc, const RowPair& x, WeightPair w) {
  // Inline assembly, because GCC 12 spills the sums to memory around the intrinsic.
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(x.bits));
  return acc;
}

#else

struct RowPair {
  float first, second;
};
FD_INLINE RowPair row_pair(uint16_t first, uint16_t second) { return {bf16_to_float(first), bf16_to_float(second)}; }

struct WeightPair {
  FP32Vec16 first, second;
};
#if defined(FD_ISA_AVX512)
FD_INLINE WeightPair widen_pairs(BF16Vec32 w) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)), _mm512_castsi512_ps(_mm512_and_si512(w, high))};
}
// Returns the floats p[2 * i] and p[2 * i + 1].
FD_INLINE WeightPair deinterleave(const float* p) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_permutex2var_ps(load(p), even, load(p + kLanes)),
          _mm512_permutex2var_ps(load(p), odd, load(p + kLanes))};
}
// Rounds to bf16 as store_bf16 does; the result is in the upper halves, the lower halves are undefined. NaN needs no
// extra instruction: a NaN computed from bf16 inputs is quiet and its lower half is 0.
FD_INLINE __m512i round_to_high(FP32Vec16 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i down = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  return _mm512_mask_add_epi32(down, is_odd, bits, _mm512_set1_epi32(0x8000));
}
// Rounds both values to bf16 and interleaves them again.
FD_INLINE BF16Vec32 round_pair(const WeightPair& w) {
  const __m512i low = _mm512_srli_epi32(round_to_high(w.first), 16);
  return _mm512_mask_mov_epi16(low, 0xaaaaaaaau, round_to_high(w.second));
}
// Rounds both values to bf16; the result is fp32.
FD_INLINE WeightPair round_pair_values(const WeightPair& w) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return {_mm512_castsi512_ps(_mm512_and_si512(round_to_high(w.first), high)),
          _mm512_castsi512_ps(_mm512_and_si512(round_to_high(w.second), high))};
}
#elif defined(FD_ISA_AVX2)
FD_INLINE WeightPair widen_pairs(BF16Vec32 w) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(w.low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.high, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(w.low, high)), _mm256_castsi256_ps(_mm256_and_si256(w.high, high))}};
}
#else
FD_INLINE WeightPair widen_pairs(BF16Vec32 w) {
  WeightPair pair;
  for (int i = 0; i < 4; ++i) {
    pair.first.part[i] = (F4)(w.part[i] << 16);
    pair.second.part[i] = (F4)(w.part[i] & 0xffff0000u);
  }
  return pair;
}
#endif
FD_INLINE FP32Vec16 dot_accumulate(FP32Vec16 acc, const RowPair& x, const WeightPair& w) {
  return fma(splat(x.first), w.first, fma(splat(x.second), w.second, acc));
}

#endif

}  // namespace FD_ISA
}  // namespace fd
