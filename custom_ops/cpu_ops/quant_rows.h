// SPDX-License-Identifier: Apache-2.0
// The rows of a quantized linear layer as integers with a scale per row, in the kernel's order: [four k][rows of the
// block, limb by limb], padded with zeros.
#pragma once

#include <limits>

#include "common/scratch.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr float kNearest = 12582912.0f;    // 1.5 * 2^23: the sum's last bits are the nearest integer, ties to even
constexpr float kLeastScaled = 0x1p-112f;  // what stays below in magnitude becomes zero: its inverse would overflow
constexpr float kMostWide = 32639.0f;      // of a code of sixteen bits: 32640 has no two signed bytes

// x + kNearest as bits: the last sixteen are those of the integer nearest to |x| < 2^15, ties to even.
FD_INLINE uint32_t nearest_bits(float x) {
  const float shifted = x + kNearest;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits;
}

// codes[i] = nearest(x[i] * factor), as limbs that lie `stride` apart, the high one first.
template <bool kIsWide, int kNumLimbs, class Out>
FD_INLINE void write_codes(const uint16_t* x, int64_t k, float factor, Out* codes, int64_t stride) {
  Out* low = codes + (kNumLimbs - 1) * stride;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const auto write = [](Out* to, __m512i bits) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bits));
  };
  for (; i + kLanes <= k; i += kLanes) {
    const F16 value = mul(load_bf16(x + i), splat(factor)), kept = kIsWide ? min(value, splat(kMostWide)) : value;
    const __m512i bits = _mm512_castps_si512(add(kept, splat(kNearest)));
    write(low + i, bits);
    if (kNumLimbs == 2) write(codes + i, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(128)), 8));
  }
#endif
  for (; i < k; ++i) {
    const float value = bf16_to_float(x[i]) * factor;
    const uint32_t bits = nearest_bits(kIsWide && value > kMostWide ? kMostWide : value);
    low[i] = static_cast<Out>(bits);
    if (kNumLimbs == 2) codes[i] = static_cast<Out>((bits + 128) >> 8);
  }
}

// Quantizes one row and returns its scale. Eight bits: absmax becomes 127. Sixteen: the scale is a power of two, so
// that absmax becomes 2^14 .. 2^15 and all bits of bf16 are kept down to absmax / 128. A row with NaN or infinity has
// the scale NaN, so that its outputs are NaN.
template <bool kIsWide = false, class Out>
float quantize_row(const uint16_t* x, int64_t k, Out* codes, int64_t stride = 0) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float absmax = bf16_to_float(largest), power = bf16_to_float(largest & 0x7f80);
  const bool is_finite = largest < 0x7f80, is_scaled = is_finite && absmax >= kLeastScaled;
  const float factor = kIsWide ? 0x1p14f / power : 127.0f / absmax,
              scale = kIsWide ? power * 0x1p-14f : absmax / 127.0f;
  write_codes<kIsWide, kIsWide ? kWideLimbs : 1>(x, k, is_scaled ? factor : 0.0f, codes, stride);
  return is_scaled ? scale : is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
}

static inline int32_t sum_codes(const Code* codes, int64_t count) {
  int32_t sum = 0;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  for (; i + 64 <= count; i += 64) sums = _mm512_dpbusd_epi32(sums, ones, _mm512_loadu_si512(codes + i));
  sum = _mm512_reduce_add_epi32(sums);
#endif
  for (; i < count; ++i) sum += codes[i];
  return sum;
}

// Codes [rows][4 * units] as elements [units][rows].
static inline void interleave_codes(const Code* codes, int64_t rows, int64_t units, QuadElement* packed) {
  const auto at = [=](int64_t r, int64_t u) { return codes + 4 * (r * units + u); };
  interleave(
      rows, units, packed, [=](int64_t r, int64_t u) { return load_pairs(at(r, u)); },
      [=](int64_t r, int64_t u) { return quad_element(at(r, u)); });
}

// Rows as the kernel reads them; a row of two limbs counts as two.
struct QuantizedRows {
  const QuadElement* elements = nullptr;
  // [blocks of rows][groups][limbs of the block's rows]: minus what was added to the weights, times the sum of the
  // group
  const int32_t* starts = nullptr;
  const float* scales = nullptr;  // [rows]
};

template <Quantization kQuantization>
QuantizedRows prepare_rows(const LinearArgs& a, const Blocks& blocks, int64_t row_units) {
  constexpr int32_t offset = has_four_bits(kQuantization) ? 8 : 128;
  constexpr int64_t limbs = kLimbs<kQuantization>, group = kIntegerK<kQuantization>;
  const int64_t padded_k = 4 * row_units, num_groups = (padded_k + group - 1) / group, codes_size = limbs * padded_k;
  const auto code_bytes = static_cast<int64_t>(sizeof(Code)), unit_bytes = static_cast<int64_t>(sizeof(QuadElement));
  const int64_t row_bytes = codes_size * code_bytes + limbs * (row_units * unit_bytes + 4 * num_groups) + 4;
  auto* elements = static_cast<QuadElement*>(thread_scratch(static_cast<size_t>(a.rows * row_bytes)));
  auto* starts = reinterpret_cast<int32_t*>(elements + a.rows * limbs * row_units);
  auto* scales = reinterpret_cast<float*>(starts + a.rows * limbs * num_groups);
  auto* codes = reinterpret_cast<Code*>(scales + a.rows);
  parallel_for(blocks.count, a.rows * a.k >= kMinParallelPack, [&](int64_t b) {
    const int64_t first = blocks.begin(b), rows = blocks.begin(b + 1) - first;
    const uint16_t* x = input_rows<uint16_t>(a, first, rows);
    Code* block_codes = codes + first * codes_size;
    for (int64_t r = 0; r < rows; ++r)
      scales[first + r] =
          quantize_row<has_wide_rows(kQuantization)>(x + r * a.k, a.k, block_codes + r * codes_size, padded_k);
    for (int64_t r = 0; r < limbs * rows; ++r) {
      Code* row = block_codes + r * padded_k;
      std::memset(row + a.k, 0, static_cast<size_t>(padded_k - a.k) * sizeof(Code));
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t begin = g * group, count = begin + group < padded_k ? group : padded_k - begin;
        starts[(first * num_groups + g * rows) * limbs + r] = -offset * sum_codes(row + begin, count);
      }
    }
    interleave_codes(block_codes, limbs * rows, row_units, elements + first * limbs * row_units);
  });
  return {elements, starts, scales};
}

}  // namespace FD_ISA
}  // namespace fd
