// SPDX-License-Identifier: Apache-2.0
// Splits, widens and checks rows of any type.
#pragma once

#include "host/ggml_plain_types.h"
#include "host/ggml_types.h"

namespace fd::ggml {

constexpr int kGroup = 32;  // codes that share a scale after splitting
constexpr float kLargestCode = 127.0f;
constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// What a row becomes: codes, and for each 32 of them a scale, and a minimum if the type has them and its codes are
// kept.
struct SplitRow {
  int8_t* codes;
  uint16_t* scales;
  uint16_t* minimums;
};

// Writes the values of a block.
template <class Type>
void write_values(const uint8_t* block, float* values) {
  constexpr int kNumGroups = Type::kValues / Type::kGroup;
  int8_t codes[Type::kValues];
  float scales[kNumGroups], minimums[kNumGroups];
  Type::decode(block, codes, scales, minimums);
  for (int group = 0; group < kNumGroups; ++group)
    for (int i = group * Type::kGroup; i < (group + 1) * Type::kGroup; ++i) {
      const float product = static_cast<float>(codes[i]) * scales[group];
      values[i] = Type::kHasMinimum ? product + minimums[group] : product;
    }
}

// Makes codes -127..127 of 32 values. The scale is the smallest fp16 number that is not below absmax / 127, so that no
// code exceeds 127; a code is the integer nearest to value / scale, ties to even, both divisions rounded to fp32.
inline void quantize_group(const float* __restrict values, int8_t* __restrict codes, uint16_t* scale) {
  int32_t largest = 0;
  for (int i = 0; i < kGroup; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(values[i]) & ~kSignBit);
    largest = magnitude > largest ? magnitude : largest;
  }
  *scale = half_not_below(float_of(static_cast<uint32_t>(largest)) / kLargestCode);
  const float divisor = largest == 0 ? 1.0f : float_of_half(*scale);
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<int8_t>(bits_of(values[i] / divisor + kRoundingShift));
}

// Splits types whose groups have at least 32 values: codes are kept, scales and minimums rounded to fp16.
template <class Type>
void split_kept_block(const uint8_t* block, const SplitRow& to) {
  constexpr int kNumGroups = Type::kValues / Type::kGroup;
  float scales[kNumGroups], minimums[kNumGroups];
  Type::decode(block, to.codes, scales, minimums);
  for (int group = 0; group < Type::kValues / kGroup; ++group) {
    to.scales[group] = half_of_float(scales[group * kGroup / Type::kGroup]);
    if constexpr (Type::kHasMinimum) to.minimums[group] = half_of_float(minimums[group * kGroup / Type::kGroup]);
  }
}

// Splits types of smaller groups: makes eight-bit codes of the values.
template <class Type>
void split_converted_block(const uint8_t* block, const SplitRow& to) {
  float values[Type::kValues];
  write_values<Type>(block, values);
  for (int group = 0; group < Type::kValues / kGroup; ++group)
    quantize_group(values + group * kGroup, to.codes + group * kGroup, to.scales + group);
}

template <class Type>
void split_row(const uint8_t* row, int64_t num_blocks, SplitRow to) {
  constexpr int kNumGroups = Type::kValues / kGroup;
  for (int64_t b = 0; b < num_blocks; ++b, to.codes += Type::kValues, to.scales += kNumGroups) {
    if constexpr (Type::kGroup >= kGroup) {
      split_kept_block<Type>(row + b * Type::kBytes, to);
      if constexpr (Type::kHasMinimum) to.minimums += kNumGroups;
    } else {
      split_converted_block<Type>(row + b * Type::kBytes, to);
    }
  }
}

inline void store(float value, float* to) { *to = value; }
inline void store(float value, uint16_t* to) { *to = bfloat16_of_float(value); }

// Widens a row to fp32, or to bf16 with one rounding.
template <class Type, class Wide>
void widen_row(const uint8_t* row, int64_t num_blocks, Wide* to) {
  for (int64_t b = 0; b < num_blocks; ++b, to += Type::kValues) {
    float values[Type::kValues];
    write_values<Type>(row + b * Type::kBytes, values);
    for (int i = 0; i < Type::kValues; ++i) store(values[i], to + i);
  }
}

template <class Type, class Wide>
void widen_plain_row(const uint8_t* row, int64_t num_values, Wide* to) {
  for (int64_t i = 0; i < num_values; ++i) store(Type::value(row + i * Type::kBytes), to + i);
}

template <class Type>
bool has_bad_scale(const uint8_t* row, int64_t num_blocks) {
  bool is_bad = false;
  for (int64_t b = 0; b < num_blocks; ++b) is_bad |= Type::has_bad_scale(row + b * Type::kBytes);
  return is_bad;
}

template <class Type>
bool has_bad_value(const uint8_t* row, int64_t num_values) {
  int32_t largest = 0;
  for (int64_t i = 0; i < num_values; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(Type::value(row + i * Type::kBytes)) & ~kSignBit);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest >= static_cast<int32_t>(kInfinityBits);
}

}  // namespace fd::ggml
