// SPDX-License-Identifier: Apache-2.0
// What the registers hold of quantized weights, once per path: pairs of k (PairUnit) or four k as integers (QuadUnit)
// of sixteen outputs. A row's element holds the same k.
//
// Blocks of 64 bytes, as pack_quantized writes them:
//   wint8  [4 k][16 outputs] signed bytes
//   w8a8   [16 outputs][4 k] bytes, 128 added
//   wint4  [16 outputs] 32 bits of eight k, 8 added: bits 4 j hold k = 2 j, bits 16 + 4 j hold k = 2 j + 1
//   w4a8   [16 outputs] 32 bits of eight k, 8 added: bits 8 i hold k = i, bits 8 i + 4 hold k = 4 + i
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512)

using I16 = __m512i;

FD_INLINE I16 splat_int(int32_t x) { return _mm512_set1_epi32(x); }
FD_INLINE F16 to_float(I16 x) { return _mm512_cvtepi32_ps(x); }

struct QuadElement {
  uint32_t bits;  // four signed bytes
};
FD_INLINE QuadElement quad_element(const int8_t* x) {
  QuadElement element;
  std::memcpy(&element, x, 4);
  return element;
}
using QuadUnit = __m512i;  // four unsigned bytes per lane
FD_INLINE I16 dot_unit(I16 acc, const QuadElement& x, QuadUnit w) {
  // GCC 12 moves sums to memory and back around the intrinsic.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(x.bits));
  return acc;
}

FD_INLINE F16 widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
#if defined(FD_ISA_AVX512_BF16)
// The integers in fp32 fit the upper halves.
FD_INLINE PairUnit wint8_unit(const uint8_t* block, int u) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(widen_bytes(block + 32 * u)), 16);
  return _mm512_or_si512(_mm512_castps_si512(widen_bytes(block + 32 * u + 16)), low);
}
// One look-up turns the low nibbles of 32 words into bf16; the table holds -8 .. 7 twice because the instruction reads
// five bits.
FD_INLINE PairUnit wint4_unit(const uint8_t* block, int u) {
  alignas(64) static const uint16_t table[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                                 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                                 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(_mm512_loadu_si512(block), 4 * u), _mm512_load_si512(table));
}
#else
FD_INLINE PairUnit wint8_unit(const uint8_t* block, int u) {
  return {widen_bytes(block + 32 * u), widen_bytes(block + 32 * u + 16)};
}
// One look-up turns the low nibbles of sixteen words into fp32: the instruction reads four bits.
FD_INLINE PairUnit wint4_unit(const uint8_t* block, int u) {
  const F16 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i codes = _mm512_loadu_si512(block);
  return {_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * u), values),
          _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * u + 16), values)};
}
#endif
FD_INLINE QuadUnit w8a8_unit(const uint8_t* block) { return _mm512_loadu_si512(block); }
FD_INLINE QuadUnit w4a8_unit(const uint8_t* block, int u) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(block), 4 * u), _mm512_set1_epi8(15));
}

#else

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
FD_INLINE int32_t int16_pair(int8_t low, int8_t high) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) |
                              static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}
FD_INLINE QuadElement quad_element(const int8_t* x) { return {int16_pair(x[0], x[2]), int16_pair(x[1], x[3])}; }
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
FD_INLINE QuadElement quad_element(const int8_t* x) { return {{x[0], x[1], x[2], x[3]}}; }
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

FD_INLINE PairUnit wint8_unit(const uint8_t* block, int u) {
  return {widen_bytes(block + 32 * u), widen_bytes(block + 32 * u + 16)};
}
FD_INLINE PairUnit wint4_unit(const uint8_t* block, int u) {
  const I16 codes = load_ints(block);
  const F16 zero_code = splat(8.0f);
  return {sub(to_float(mask_bits(shift_right(codes, 4 * u), 15)), zero_code),
          sub(to_float(mask_bits(shift_right(codes, 4 * u + 16), 15)), zero_code)};
}
FD_INLINE QuadUnit w8a8_unit(const uint8_t* block) { return quad_unit(load_ints(block)); }
FD_INLINE QuadUnit w4a8_unit(const uint8_t* block, int u) {
  return quad_unit(mask_bits(shift_right(load_ints(block), 4 * u), 0x0f0f0f0f));
}

#endif

}  // namespace FD_ISA
}  // namespace fd
