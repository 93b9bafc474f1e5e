// SPDX-License-Identifier: Apache-2.0
// The rows of a quantized linear layer in the kernel's order, [elements of k][rows of the block], padded with zeros:
// bf16 as they are, or int8 with a scale per row.
#pragma once

#include <limits>
#include <type_traits>

#include "common/scratch.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr float kLeastScaled = 0x1p-119f;  // what stays below in magnitude becomes zero: its inverse would overflow

// Rounds to the nearest integer, ties to even, |x| < 2^21.
FD_INLINE int32_t nearest_int(float x) {
  const float shifted = x + 12582912.0f;
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
  for (int64_t i = 0; i < k; ++i) codes[i] = static_cast<int8_t>(nearest_int(bf16_to_float(x[i]) * inverse));
  return absmax / 127.0f;
}

template <class Element>
struct QuantizedRows;

template <>
struct QuantizedRows<PairElement> {
  const PairElement* elements = nullptr;
  FD_INLINE int32_t start(int64_t, int64_t) { return 0; }
  FD_INLINE F16 scaled(F16 total, int64_t) { return total; }
};

template <>
struct QuantizedRows<QuadElement> {
  const QuadElement* elements = nullptr;
  const int32_t* starts = nullptr;  // [rows][groups]: minus what was added to the weights, times the sum of the group
  const float* scales = nullptr;    // [rows]
  int64_t num_groups = 0;
  int32_t start(int64_t row, int64_t group) const { return starts[row * num_groups + group]; }
  F16 scaled(F16 total, int64_t row) const { return mul(total, splat(scales[row])); }
};

// Writes element(row, unit) to packed[unit][row] for units [0, count), in strips that stay in the L1 cache.
template <class Element, class Make>
FD_INLINE void interleave(int64_t rows, int64_t count, Element* packed, const Make& element) {
  constexpr int64_t strip = 128;
  for (int64_t first = 0; first < count; first += strip) {
    const int64_t end = first + strip < count ? first + strip : count;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t u = first; u < end; ++u) packed[u * rows + r] = element(r, u);
  }
}

static inline void pack_pairs(const uint16_t* x, int64_t rows, int64_t k, int64_t row_units, PairElement* packed) {
  interleave(rows, k / 2, packed, [=](int64_t r, int64_t u) {
    const uint16_t* pair = x + r * k + 2 * u;
    return pair_element(pair[0], pair[1]);
  });
  for (int64_t u = k / 2; u < row_units; ++u)
    for (int64_t r = 0; r < rows; ++r)
      packed[u * rows + r] = pair_element(2 * u < k ? x[r * k + 2 * u] : uint16_t{0}, 0);
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
      for (int64_t r = 0; r < rows; ++r) {
        int8_t* row = codes + (first + r) * padded_k;
        std::memset(row + a.k, 0, static_cast<size_t>(padded_k - a.k));
        scales[first + r] = quantize_row(input_rows<uint16_t>(a, first + r, 1), a.k, row);
        for (int64_t g = 0; g < num_groups; ++g) {
          int32_t sum = 0;
          const int64_t end = (g + 1) * group < padded_k ? (g + 1) * group : padded_k;
          for (int64_t i = g * group; i < end; ++i) sum += row[i];
          starts[(first + r) * num_groups + g] = static_cast<int32_t>(-offset * sum);
        }
      }
      const int8_t* block = codes + first * padded_k;
      interleave(rows, row_units, elements + first * row_units,
                 [=](int64_t r, int64_t u) { return quad_element(block + r * padded_k + 4 * u); });
    });
    result = {elements, starts, scales, num_groups};
  }
  return result;
}

}  // namespace FD_ISA
}  // namespace fd
