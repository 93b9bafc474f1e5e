// SPDX-License-Identifier: Apache-2.0
// The definition of linear layers with quantized weights, in scalar steps. Every accelerator computes its bits, and so
// does every CPU path with a fused multiply-add (cpu_ops/linear_quant.cc), except wint8 on AVX-512.
//
//   row     codes of 8 bits with the scale absmax / 127 (w8a8, w4a8), or of 16 bits with a power of two as the scale
//           (wint8, wint4); a code of 16 bits is two limbs of signed bytes, 256 * high + low
//   total   0; for each group of inputs in order: total = fma(sum of the group, scale of the weights, total), where
//           the integer sum of code times code is exact and its conversion to fp32 is rounded once
//   output  round(total * scale of the row + bias + residual), each step in fp32
//
// Sums are exact, so they can be computed in any order, and limbs can be summed apart. A group is 128 inputs of weights
// of four bits, which have a scale for each; 256 inputs in wint8 and 65,536 in w8a8, so that a sum fits int32.
#pragma once

#include "common/scalar_lanes.h"

namespace fd {

// The order is that of QUANTIZATIONS in fastdeploy/ops/linear.py.
enum class Quantization { kWint8, kWint4, kW8a8, kW4a8 };

constexpr int64_t kGroup = 128;  // consecutive k that share a scale in 4-bit formats; in 8-bit formats all k share one

FD_RULE constexpr bool has_four_bits(Quantization q) { return q == Quantization::kWint4 || q == Quantization::kW4a8; }
FD_RULE constexpr bool has_16_bit_rows(Quantization q) {
  return q == Quantization::kWint8 || q == Quantization::kWint4;
}

// Consecutive k whose products are added as integers.
FD_RULE constexpr int64_t sum_length(Quantization q) {
  return has_four_bits(q) ? kGroup : has_16_bit_rows(q) ? 1 << 8 : 1 << 16;
}

constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr float kMinScaledAbsmax = 0x1p-112f;  // smaller rows become zero, because the inverse scale would overflow
constexpr float kMax16BitCode = 32639.0f;      // both of its limbs are 127

struct RowScale {
  float factor;  // codes are inputs times this
  float scale;   // inputs are codes times this
};

// Returns the scale of a row whose largest magnitude is the bf16 number with the bits `largest` (a NaN exceeds all
// others). With 8 bits, absmax becomes 127. With 16 bits, the scale is the power of two that brings absmax to 2^14 ..
// 2^15, so that all bits of bf16 are kept down to absmax / 128. The scale of a row with NaN or infinity is NaN.
template <bool kIs16Bit>
FD_RULE RowScale row_scale(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f80u;
  const float absmax = ScalarLanes::from_bits(largest << 16),
              power = ScalarLanes::from_bits((largest & kInfinity) << 16);
  if (largest >= kInfinity) return {0.0f, ScalarLanes::from_bits(0x7fc00000u)};
  if (absmax < kMinScaledAbsmax) return {0.0f, 0.0f};
  return {kIs16Bit ? 0x1p14f / power : 127.0f / absmax, kIs16Bit ? power * 0x1p-14f : absmax / 127.0f};
}

// Returns bits whose low sixteen are the code of an input: the nearest integer, ties to even. With a factor of 0 and an
// infinite input they are arbitrary.
template <bool kIs16Bit>
FD_RULE uint32_t code_bits(float x, float factor) {
  const float value = ScalarLanes::mul(x, factor);
  return ScalarLanes::bits(ScalarLanes::add(kIs16Bit && value > kMax16BitCode ? kMax16BitCode : value, kRoundingShift));
}

// Return the limbs of a 16-bit code, given its bits, as bytes.
FD_RULE uint32_t high_limb(uint32_t bits) { return (bits + 128) >> 8 & 255u; }
FD_RULE uint32_t low_limb(uint32_t bits) { return bits & 255u; }

// Adds the sum of a group to a total.
FD_RULE float add_group(int32_t sum, float scale, float total) {
  return ScalarLanes::fma(static_cast<float>(sum), scale, total);
}

}  // namespace fd
