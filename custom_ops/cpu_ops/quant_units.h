// SPDX-License-Identifier: Apache-2.0
// What the registers hold of quantized weights, once per path: four k of sixteen outputs as integers (QuadUnit). A
// row's element holds the same k.
//
// Blocks of 64 bytes, as pack_quantized writes them:
//   eight bits  [16 outputs][4 k] bytes, 128 added
//   four bits   [16 outputs] 32 bits of eight k, 8 added: bits 8 i hold k = i, bits 8 i + 4 hold k = 4 + i
//
// Rows are integers of eight bits, or of sixteen (has_wide_rows). Where the processor multiplies bytes, a row of
// sixteen bits is two of signed bytes, its limbs: 256 * high + low.
#pragma once

#include "cpu_ops/dot.h"
#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512)

using I16 = __m512i;
using Code = int8_t;  // of a row, or of one of its limbs
constexpr int kWideLimbs = 2;

FD_INLINE I16 splat_int(int32_t x) { return _mm512_set1_epi32(x); }
FD_INLINE F16 to_float(I16 x) { return _mm512_cvtepi32_ps(x); }

struct QuadElement {
  uint32_t bits;  // four signed bytes
};
FD_INLINE QuadElement quad_element(const Code* x) {
  QuadElement element;
  std::memcpy(&element, x, 4);
  return element;
}
using QuadUnit = __m512i;  // four unsigned bytes per lane
// GCC 12 moves sums to memory and back around the intrinsic.
FD_INLINE I16 dot_unit(I16 acc, const QuadElement& x, QuadUnit w) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(x.bits));
  return acc;
}
FD_INLINE I16 dot_unit(I16 acc, __m512i x, QuadUnit w) {  // x: an element in every lane
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}

FD_INLINE F16 widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
FD_INLINE QuadUnit byte_unit(const uint8_t* block) { return _mm512_loadu_si512(block); }
FD_INLINE QuadUnit nibble_unit(const uint8_t* block, int u) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(block), 4 * u), _mm512_set1_epi8(15));
}

#else

using Code = int16_t;  // of a row
constexpr int kWideLimbs = 1;

#if defined(FD_ISA_AVX2)

struct I16 {
  __m256i low, high;
};

FD_INLINE I16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FD_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// Two pairs of int16: (first, third) and (second, fourth). Products of bytes would saturate in the instruction that
// multiplies bytes.
struct QuadElement {
  int32_t even, odd;
};
FD_INLINE int32_t int16_pair(Code low, Code high) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) |
                              static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}
FD_INLINE QuadElement quad_element(const Code* x) { return {int16_pair(x[0], x[2]), int16_pair(x[1], x[3])}; }
struct QuadUnit {
  I16 even, odd;  // the same as words
};
FD_INLINE __m256i dot_words(__m256i acc, int32_t x, __m256i w) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(w, _mm256_set1_epi32(x)));
}
FD_INLINE I16 dot_unit(I16 acc, QuadElement x, const QuadUnit& w) {
  return {dot_words(dot_words(acc.low, x.even, w.even.low), x.odd, w.odd.low),
          dot_words(dot_words(acc.high, x.even, w.even.high), x.odd, w.odd.high)};
}

FD_INLINE I16 load_ints(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
FD_INLINE I16 shift_right(I16 x, int count) {
  return {_mm256_srli_epi32(x.low, count), _mm256_srli_epi32(x.high, count)};
}
FD_INLINE I16 mask_bits(I16 x, int32_t mask) {
  return {_mm256_and_si256(x.low, _mm256_set1_epi32(mask)), _mm256_and_si256(x.high, _mm256_set1_epi32(mask))};
}
FD_INLINE F16 widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float(I16{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
FD_INLINE QuadUnit quad_unit(I16 bytes) {
  return {mask_bits(bytes, 0x00ff00ff), mask_bits(shift_right(bytes, 8), 0x00ff00ff)};
}

#else

struct I16 {
  I4 part[4];
};

FD_INLINE I16 splat_int(int32_t x) {
  const I4 part = {x, x, x, x};
  return {{part, part, part, part}};
}
FD_INLINE F16 to_float(I16 x) {
  F16 result;
  for (int i = 0; i < 4; ++i) result.part[i] = __builtin_convertvector(x.part[i], F4);
  return result;
}

struct QuadElement {
  int32_t x[4];
};
FD_INLINE QuadElement quad_element(const Code* x) { return {{x[0], x[1], x[2], x[3]}}; }
using QuadUnit = I16;  // four unsigned bytes per lane
FD_INLINE I16 dot_unit(I16 acc, const QuadElement& x, const QuadUnit& w) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) acc.part[i] += ((w.part[i] >> (8 * j)) & 255) * x.x[j];
  return acc;
}

FD_INLINE I16 load_ints(const uint8_t* p) {
  I16 x;
  std::memcpy(&x, p, 64);
  return x;
}
FD_INLINE I16 shift_right(I16 x, int count) {  // into the upper bits go copies of the sign: callers mask them
  for (int i = 0; i < 4; ++i) x.part[i] = x.part[i] >> count;
  return x;
}
FD_INLINE I16 mask_bits(I16 x, int32_t mask) {
  for (int i = 0; i < 4; ++i) x.part[i] = x.part[i] & mask;
  return x;
}
FD_INLINE F16 widen_bytes(const uint8_t* p) {
  I16 x;
  for (int i = 0; i < kLanes; ++i) x.part[i / 4][i % 4] = static_cast<int8_t>(p[i]);
  return to_float(x);
}
FD_INLINE QuadUnit quad_unit(I16 bytes) { return bytes; }

#endif

FD_INLINE QuadUnit byte_unit(const uint8_t* block) { return quad_unit(load_ints(block)); }
FD_INLINE QuadUnit nibble_unit(const uint8_t* block, int u) {
  return quad_unit(mask_bits(shift_right(load_ints(block), 4 * u), 0x0f0f0f0f));
}

#endif

// Two k of sixteen outputs in the int8 cache of attention: [2 k][16 outputs] signed bytes.
#if defined(FD_ISA_AVX512_BF16)
// The integers in fp32 fit the upper halves.
FD_INLINE PairUnit cached_unit(const uint8_t* codes) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(widen_bytes(codes)), 16);
  return _mm512_or_si512(_mm512_castps_si512(widen_bytes(codes + 16)), low);
}
#else
FD_INLINE PairUnit cached_unit(const uint8_t* codes) { return {widen_bytes(codes), widen_bytes(codes + 16)}; }
#endif

// A line of weights, a block, as units.
template <bool kFourBits>
struct CodeLines {
  using Element = QuadElement;
  using Unit = QuadUnit;
  using Sum = I16;
  static constexpr int kUnits = kFourBits ? 2 : 1;
  FD_INLINE Unit unit(const uint8_t* line, int u) { return kFourBits ? nibble_unit(line, u) : byte_unit(line); }
};

#if defined(FD_ISA_AVX512_BF16)
// As dot_units in dot.h. The processors of this path load twice and multiply twice in a cycle. Elements that are loaded
// for each product leave no load for weights and for what is asked for meanwhile. So several panels share an element in
// a register; and of a single panel, where there are rows enough, four elements come in one load, spread by shuffles,
// which other ports do. In one piece: given the parts, GCC 12 finds no register for the four.
FD_INLINE void dot_four(I16 (&sums)[4], const QuadElement (&x)[4], QuadUnit w) {
  __m512i four, spread;
  asm("vbroadcasti32x4 %[x], %[four]\n\t"
      "vpshufd $0x00, %[four], %[spread]\n\t"
      "vpdpbusd %[spread], %[w], %[a]\n\t"
      "vpshufd $0x55, %[four], %[spread]\n\t"
      "vpdpbusd %[spread], %[w], %[b]\n\t"
      "vpshufd $0xaa, %[four], %[spread]\n\t"
      "vpdpbusd %[spread], %[w], %[c]\n\t"
      "vpshufd $0xff, %[four], %[spread]\n\t"
      "vpdpbusd %[spread], %[w], %[d]"
      : [a] "+v"(sums[0]), [b] "+v"(sums[1]), [c] "+v"(sums[2]), [d] "+v"(sums[3]), [four] "=&v"(four),
        [spread] "=&v"(spread)
      : [w] "v"(w), [x] "m"(x));
}
template <int MR, int NV>
FD_INLINE void dot_units(I16 (&sums)[MR][NV], const QuadElement* x, const QuadUnit (&units)[NV]) {
  constexpr int shuffled = NV == 1 && MR > 8 ? 4 : 0;
  if constexpr (shuffled > 0) {
    dot_four(reinterpret_cast<I16(&)[4]>(sums), reinterpret_cast<const QuadElement(&)[4]>(*x), units[0]);
  }
#pragma GCC unroll 32
  for (int r = shuffled; r < MR; ++r) {
    if constexpr (NV == 1) {
      sums[r][0] = dot_unit(sums[r][0], x[r], units[0]);
    } else {
      const __m512i spread = _mm512_set1_epi32(static_cast<int>(x[r].bits));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = dot_unit(sums[r][v], spread, units[v]);
    }
  }
}
#endif

template <Quantization kQuantization>
constexpr int kLimbs = has_wide_rows(kQuantization) ? kWideLimbs : 1;

// k whose products are added up as integers before their sum becomes fp32: a group where that has a scale of its own,
// else as many as int32 is sure to hold.
template <Quantization kQuantization>
constexpr int64_t kIntegerK = has_four_bits(kQuantization)                                 ? kGroup
                              : has_wide_rows(kQuantization) && kLimbs<kQuantization> == 1 ? 1 << 8
                                                                                           : 1 << 16;

}  // namespace FD_ISA
}  // namespace fd
