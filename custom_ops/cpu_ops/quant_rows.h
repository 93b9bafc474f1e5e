// SPDX-License-Identifier: Apache-2.0
// The rows of a quantized linear layer in the kernel's order, [elements of k][rows of the block], padded with zeros:
// bf16 as they are, or int8 with a scale per row.
#pragma once

#include <limits>
#include <type_traits>

#include "common/scratch.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr float kNearest = 12582912.0f;    // 1.5 * 2^23: the sum's last bits are the nearest integer, ties to even
constexpr float kLeastScaled = 0x1p-119f;  // what stays below in magnitude becomes zero: its inverse would overflow

// Rounds to the nearest integer, ties to even, |x| < 2^21.
FD_INLINE int32_t nearest_int(float x) {
  const float shifted = x + kNearest;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// Quantizes one row: codes[i] = nearest(x[i] * (127 / absmax)), and returns the scale absmax / 127. A row with NaN or
// infinity has the scale NaN, so that its outputs are NaN.
static inline float quantize_row(const uint16_t* x, int64_t k, int8_t* codes) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float absmax = bf16_to_float(largest);
  if (largest >= 0x7f80 || absmax < kLeastScaled) {
    std::memset(codes, 0, static_cast<size_t>(k));
    return largest >= 0x7f80 ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
  }
  const float inverse = 127.0f / absmax;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  for (; i + kLanes <= k; i += kLanes) {
    const __m512i shifted = _mm512_castps_si512(add(mul(load_bf16(x + i), splat(inverse)), splat(kNearest)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8(shifted));
  }
#endif
  for (; i < k; ++i) codes[i] = static_cast<int8_t>(nearest_int(bf16_to_float(x[i]) * inverse));
  return absmax / 127.0f;
}

static inline int64_t sum_codes(const int8_t* codes, int64_t count) {
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
static inline void interleave_codes(const int8_t* codes, int64_t rows, int64_t units, QuadElement* packed) {
  const auto at = [=](int64_t r, int64_t u) { return codes + 4 * (r * units + u); };
  interleave(
      rows, units, packed, [=](int64_t r, int64_t u) { return load_pairs(at(r, u)); },
      [=](int64_t r, int64_t u) { return quad_element(at(r, u)); });
}

template <class Element>
struct QuantizedRows;

template <>
struct QuantizedRows<PairElement> {
  const PairElement* elements = nullptr;
  struct NoStarts {
    int32_t operator[](int64_t) const { return 0; }
  };
  FD_INLINE NoStarts starts_of(int64_t, int64_t, int64_t) { return {}; }
  FD_INLINE F16 scaled(F16 total, int64_t) { return total; }
};

template <>
struct QuantizedRows<QuadElement> {
  const QuadElement* elements = nullptr;
  // [blocks of rows][groups][rows of the block]: minus what was added to the weights, times the sum of the group
  const int32_t* starts = nullptr;
  const float* scales = nullptr;  // [rows]
  int64_t num_groups = 0;
  // Of one group, for the block of `rows` rows that begins at `row`.
  const int32_t* starts_of(int64_t row, int64_t rows, int64_t group) const {
    return starts + row * num_groups + group * rows;
  }
  F16 scaled(F16 total, int64_t row) const { return mul(total, splat(scales[row])); }
};

static inline void pack_pairs(const uint16_t* x, int64_t rows, int64_t k, int64_t row_units, PairElement* packed) {
  interleave_rows(x, rows, k, packed);
  for (int64_t u = (k + 1) / 2; u < row_units; ++u)
    for (int64_t r = 0; r < rows; ++r) packed[u * rows + r] = pair_element(0, 0);
}

template <Quantization kQuantization, class Element>
QuantizedRows<Element> prepare_rows(const LinearArgs& a, const Blocks& blocks, int64_t row_units) {
  const bool parallel = a.rows * a.k >= kMinParallelPack;
  QuantizedRows<Element> result;
  if constexpr (std::is_same_v<Element, PairElement>) {
    auto* elements = static_cast<Element*>(thread_scratch(static_cast<size_t>(a.rows * row_units) * sizeof(Element)));
    parallel_for(blocks.count, parallel, [&](int64_t b) {
      const int64_t row = blocks.begin(b), rows = blocks.begin(b + 1) - row;
      pack_pairs(input_rows<uint16_t>(a, row, rows), rows, a.k, row_units, elements + row * row_units);
    });
    result.elements = elements;
  } else {
    constexpr int64_t offset = has_four_bits(kQuantization) ? 8 : 128;
    const int64_t padded_k = 4 * row_units, group = has_four_bits(kQuantization) ? kGroup : padded_k;
    const int64_t num_groups = (padded_k + group - 1) / group;
    const int64_t bytes = a.rows * (row_units * static_cast<int64_t>(sizeof(Element)) + padded_k + 4 * num_groups + 4);
    auto* elements = static_cast<Element*>(thread_scratch(static_cast<size_t>(bytes)));
    auto* starts = reinterpret_cast<int32_t*>(elements + a.rows * row_units);
    auto* scales = reinterpret_cast<float*>(starts + a.rows * num_groups);
    auto* codes = reinterpret_cast<int8_t*>(scales + a.rows);
    parallel_for(blocks.count, parallel, [&](int64_t b) {
      const int64_t first = blocks.begin(b), rows = blocks.begin(b + 1) - first;
      const uint16_t* x = input_rows<uint16_t>(a, first, rows);
      for (int64_t r = 0; r < rows; ++r) {
        int8_t* row = codes + (first + r) * padded_k;
        std::memset(row + a.k, 0, static_cast<size_t>(padded_k - a.k));
        scales[first + r] = quantize_row(x + r * a.k, a.k, row);
        for (int64_t g = 0; g < num_groups; ++g) {
          const int64_t end = (g + 1) * group < padded_k ? (g + 1) * group : padded_k;
          starts[first * num_groups + g * rows + r] =
              static_cast<int32_t>(-offset * sum_codes(row + g * group, end - g * group));
        }
      }
      interleave_codes(codes + first * padded_k, rows, row_units, elements + first * row_units);
    });
    result = {elements, starts, scales, num_groups};
  }
  return result;
}

}  // namespace FD_ISA
}  // namespace fd
