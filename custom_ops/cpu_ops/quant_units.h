// SPDX-License-Identifier: Apache-2.0
// Integer products of four consecutive k, for each path: a WeightQuad holds the codes of sixteen outputs, a RowQuad
// those of one row.
//
// pack_quantized writes blocks of 64 bytes:
//   8 bits  [16 outputs][4 k] bytes
//   4 bits  [16 outputs] 32-bit words of eight k: bit 8 * i starts k = i, bit 8 * i + 4 starts k = 4 + i
// A stored integer is a code plus QuantizedForm::code_offset().
//
// Row codes have 8 bits, or 16 bits in formats with has_16_bit_rows. Where instructions multiply bytes, a 16-bit code
// is split into two limbs of signed bytes, 256 * high + low.
#pragma once

#include "cpu_ops/dot.h"
#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {

#if defined(FD_ISA_AVX512)

using INT32Vec16 = __m512i;
using RowCode = int8_t;  // one limb of a code
constexpr int kLimbsOf16Bits = 2;

FD_INLINE INT32Vec16 splat_int32(int32_t x) { return _mm512_set1_epi32(x); }
FD_INLINE FP32Vec16 to_float(INT32Vec16 x) { return _mm512_cvtepi32_ps(x); }

struct RowQuad {
  uint32_t bits;  // four signed bytes
};
FD_INLINE RowQuad row_quad(const RowCode* x) {
  RowQuad element;
  std::memcpy(&element, x, 4);
  return element;
}
using WeightQuad = __m512i;  // four unsigned bytes per lane
// Inline assembly, because GCC 12 spills the sums to memory around the intrinsic.
FD_INLINE INT32Vec16 dot_accumulate(INT32Vec16 acc, const RowQuad& x, WeightQuad w) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(x.bits));
  return acc;
}
FD_INLINE INT32Vec16 dot_accumulate(INT32Vec16 acc, __m512i x, WeightQuad w) {  // x holds one RowQuad in every lane
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}

FD_INLINE FP32Vec16 widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
FD_INLINE WeightQuad load_byte_quad(const uint8_t* block) { return _mm512_loadu_si512(block); }
FD_INLINE WeightQuad load_nibble_quad(const uint8_t* block, int u) {
  return _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(block), 4 * u), _mm512_set1_epi8(15));
}

#else

using RowCode = int16_t;
constexpr int kLimbsOf16Bits = 1;

#if defined(FD_ISA_AVX2)

struct INT32Vec16 {
  __m256i low, high;
};

FD_INLINE INT32Vec16 splat_int32(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FD_INLINE FP32Vec16 to_float(INT32Vec16 x) { return {_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high)}; }

// Two pairs of int16: (first, third) and (second, fourth). The instruction that multiplies bytes cannot be used,
// because its sums saturate.
struct RowQuad {
  int32_t even, odd;
};
FD_INLINE int32_t int16_pair(RowCode low, RowCode high) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint16_t>(low)) |
                              static_cast<uint32_t>(static_cast<uint16_t>(high)) << 16);
}
FD_INLINE RowQuad row_quad(const RowCode* x) { return {int16_pair(x[0], x[2]), int16_pair(x[1], x[3])}; }
struct WeightQuad {
  INT32Vec16 even, odd;  // pairs of int16 in the same order
};
FD_INLINE __m256i dot_words(__m256i acc, int32_t x, __m256i w) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(w, _mm256_set1_epi32(x)));
}
FD_INLINE INT32Vec16 dot_accumulate(INT32Vec16 acc, RowQuad x, const WeightQuad& w) {
  return {dot_words(dot_words(acc.low, x.even, w.even.low), x.odd, w.odd.low),
          dot_words(dot_words(acc.high, x.even, w.even.high), x.odd, w.odd.high)};
}

FD_INLINE INT32Vec16 load_ints(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
FD_INLINE INT32Vec16 shift_right(INT32Vec16 x, int count) {
  return {_mm256_srli_epi32(x.low, count), _mm256_srli_epi32(x.high, count)};
}
FD_INLINE INT32Vec16 mask_bits(INT32Vec16 x, int32_t mask) {
  return {_mm256_and_si256(x.low, _mm256_set1_epi32(mask)), _mm256_and_si256(x.high, _mm256_set1_epi32(mask))};
}
FD_INLINE FP32Vec16 widen_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float(INT32Vec16{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}
FD_INLINE WeightQuad weight_quad(INT32Vec16 bytes) {
  return {mask_bits(bytes, 0x00ff00ff), mask_bits(shift_right(bytes, 8), 0x00ff00ff)};
}

#else

struct INT32Vec16 {
  I4 part[4];
};

FD_INLINE INT32Vec16 splat_int32(int32_t x) {
  const I4 part = {x, x, x, x};
  return {{part, part, part, part}};
}
FD_INLINE FP32Vec16 to_float(INT32Vec16 x) {
  FP32Vec16 result;
  for (int i = 0; i < 4; ++i) result.part[i] = __builtin_convertvector(x.part[i], F4);
  return result;
}

struct RowQuad {
  int32_t x[4];
};
FD_INLINE RowQuad row_quad(const RowCode* x) { return {{x[0], x[1], x[2], x[3]}}; }
using WeightQuad = INT32Vec16;  // four unsigned bytes per lane
FD_INLINE INT32Vec16 dot_accumulate(INT32Vec16 acc, const RowQuad& x, const WeightQuad& w) {
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) acc.part[i] += ((w.part[i] >> (8 * j)) & 255) * x.x[j];
  return acc;
}

FD_INLINE INT32Vec16 load_ints(const uint8_t* p) {
  INT32Vec16 x;
  std::memcpy(&x, p, 64);
  return x;
}
FD_INLINE INT32Vec16 shift_right(INT32Vec16 x, int count) {  // shifts in copies of the sign bit, which callers mask
  for (int i = 0; i < 4; ++i) x.part[i] = x.part[i] >> count;
  return x;
}
FD_INLINE INT32Vec16 mask_bits(INT32Vec16 x, int32_t mask) {
  for (int i = 0; i < 4; ++i) x.part[i] = x.part[i] & mask;
  return x;
}
FD_INLINE FP32Vec16 widen_bytes(const uint8_t* p) {
  INT32Vec16 x;
  for (int i = 0; i < kLanes; ++i) x.part[i / 4][i % 4] = static_cast<int8_t>(p[i]);
  return to_float(x);
}
FD_INLINE WeightQuad weight_quad(INT32Vec16 bytes) { return bytes; }

#endif

FD_INLINE WeightQuad load_byte_quad(const uint8_t* block) { return weight_quad(load_ints(block)); }
FD_INLINE WeightQuad load_nibble_quad(const uint8_t* block, int u) {
  return weight_quad(mask_bits(shift_right(load_ints(block), 4 * u), 0x0f0f0f0f));
}

#endif

// Two k of sixteen outputs in an int8 KV cache: [2 k][16 outputs] signed bytes.
#if defined(FD_ISA_AVX512_BF16)
// The integers are exact in bf16.
FD_INLINE WeightPair load_cached_pair(const uint8_t* codes) {
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(widen_bytes(codes)), 16);
  return _mm512_or_si512(_mm512_castps_si512(widen_bytes(codes + 16)), low);
}
#else
FD_INLINE WeightPair load_cached_pair(const uint8_t* codes) { return {widen_bytes(codes), widen_bytes(codes + 16)}; }
#endif

// A cache line of weights (one block) as WeightQuads.
template <bool kFourBits>
struct WeightLines {
  using RowUnit = RowQuad;
  using WeightUnit = WeightQuad;
  using Sum = INT32Vec16;
  static constexpr int kUnits = kFourBits ? 2 : 1;
  FD_INLINE WeightUnit unit(const uint8_t* line, int u) {
    return kFourBits ? load_nibble_quad(line, u) : load_byte_quad(line);
  }
};

#if defined(FD_ISA_AVX512)
// Multiplies four RowQuads by one WeightQuad with a single load of the rows; shuffles, which use other ports, broadcast
// them. It is one assembly block, because GCC 12 runs out of registers otherwise.
FD_INLINE void accumulate_four_rows(INT32Vec16 (&sums)[4], const RowQuad (&x)[4], WeightQuad w) {
  __m512i four, broadcast;
  asm("vbroadcasti32x4 %[x], %[four]\n\t"
      "vpshufd $0x00, %[four], %[broadcast]\n\t"
      "vpdpbusd %[broadcast], %[w], %[a]\n\t"
      "vpshufd $0x55, %[four], %[broadcast]\n\t"
      "vpdpbusd %[broadcast], %[w], %[b]\n\t"
      "vpshufd $0xaa, %[four], %[broadcast]\n\t"
      "vpdpbusd %[broadcast], %[w], %[c]\n\t"
      "vpshufd $0xff, %[four], %[broadcast]\n\t"
      "vpdpbusd %[broadcast], %[w], %[d]"
      : [a] "+v"(sums[0]), [b] "+v"(sums[1]), [c] "+v"(sums[2]), [d] "+v"(sums[3]), [four] "=&v"(four),
        [broadcast] "=&v"(broadcast)
      : [w] "v"(w), [x] "m"(x));
}
// Does the same as accumulate_products in dot.h. With Tuning::saves_loads, several panels share a row value in a
// register, and for a single panel with many rows four row values are loaded at once.
template <int MR, int NV>
FD_INLINE void accumulate_products(INT32Vec16 (&sums)[MR][NV], const RowQuad* x, const WeightQuad (&units)[NV]) {
  if constexpr (!kTuning.saves_loads)
    return accumulate_products<INT32Vec16, RowQuad, WeightQuad, MR, NV>(sums, x, units);
  constexpr int shuffled = NV == 1 && MR > 8 ? 4 : 0;
  if constexpr (shuffled > 0) {
    accumulate_four_rows(reinterpret_cast<INT32Vec16(&)[4]>(sums), reinterpret_cast<const RowQuad(&)[4]>(*x), units[0]);
  }
#pragma GCC unroll 32
  for (int r = shuffled; r < MR; ++r) {
    if constexpr (NV == 1) {
      sums[r][0] = dot_accumulate(sums[r][0], x[r], units[0]);
    } else {
      const __m512i broadcast = _mm512_set1_epi32(static_cast<int>(x[r].bits));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = dot_accumulate(sums[r][v], broadcast, units[v]);
    }
  }
}
#endif

template <Quantization kQuantization>
constexpr int kLimbs = has_16_bit_rows(kQuantization) ? kLimbsOf16Bits : 1;

// Whether sums of pieces are joined in fp32, part by part; wint8 without groups sums longer pieces.
constexpr bool joins_pieces(Quantization q) { return q != Quantization::kWint8; }

// Consecutive k whose products are added as integers before the sum is converted to fp32: a piece of common/quant.h,
// or, where the limbs of wint8 are summed apart, as many as cannot overflow int32.
template <Quantization kQuantization>
constexpr int64_t kSumLength = joins_pieces(kQuantization)  ? kPiece
                               : kLimbs<kQuantization> == 1 ? kWint8Piece
                                                            : 1 << 16;

// RowQuads of a row, which is padded to whole blocks of the weight.
constexpr int64_t quads_per_row(Quantization q, int64_t k) { return num_code_blocks(q, k) * block_k(q) / 4; }

// Calls body(Format<kernel of the form>()), so that it is a compile-time constant there.
template <Quantization kQuantization>
struct Format {
  static constexpr Quantization value = kQuantization;
};

template <class Body>
static inline auto dispatch_format(const QuantizedForm& form, Body&& body) {
  switch (form.kernel()) {
    case Quantization::kWint8:
      return body(Format<Quantization::kWint8>());
    case Quantization::kWint4:
      return body(Format<Quantization::kWint4>());
    case Quantization::kW8a8:
      return body(Format<Quantization::kW8a8>());
    case Quantization::kWint8Pieces:
      return body(Format<Quantization::kWint8Pieces>());
    default:
      return body(Format<Quantization::kW4a8>());
  }
}

}  // namespace FD_ISA
}  // namespace fd
