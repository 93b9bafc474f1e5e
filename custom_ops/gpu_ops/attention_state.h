// SPDX-License-Identifier: Apache-2.0
// The arithmetic of softmax over parts of a row's positions. Scores are multiplied by log2(e), so that weights are
// powers of two; a part is described by the maximum of its scores, the sum of its weights relative to it, and the sums
// of weighted values. A part without positions has maximum kMaskedScore and zeros; merging it changes nothing.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

constexpr float kMaskedScore = -3.4028234664e38f;  // the lowest finite number

// Returns 2^x for x <= 0 with a relative error below 2e-7, NaN for NaN, and 0 where x is below -126.
FD_DEVICE float power_of_two(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const float shifted = x + kShift;
  const float fraction = x - (shifted - kShift);
  float p = 1.32647273e-3f;
  p = fused_multiply_add(p, fraction, 9.67151299e-3f);
  p = fused_multiply_add(p, fraction, 5.55073358e-2f);
  p = fused_multiply_add(p, fraction, 2.40222424e-1f);
  p = fused_multiply_add(p, fraction, 6.93147004e-1f);
  p = fused_multiply_add(p, fraction, 1.0f);
  const uint32_t exponent = (bit_cast<uint32_t>(shifted) << 23) + (127u << 23);  // the bits of kShift are shifted out
  return x < -126.0f ? 0.0f : p * bit_cast<float>(exponent);
}

FD_DEVICE float larger(float a, float b) { return a > b ? a : b; }

// The maximum of the scores and the sum of the weights of a part.
struct PartSums {
  float maximum, sum;
};

// Factors of the values of two parts that are merged.
struct MergeFactors {
  float first, second;
};

// Merges the sums of a part into those of the parts before it.
FD_DEVICE MergeFactors merge_sums(PartSums& total, PartSums next) {
  const float maximum = larger(total.maximum, next.maximum);
  const MergeFactors factors{power_of_two(total.maximum - maximum), power_of_two(next.maximum - maximum)};
  total = {maximum, fused_multiply_add(next.sum, factors.second, total.sum * factors.first)};
  return factors;
}

FD_DEVICE float merge_values(float total, float next, MergeFactors factors) {
  return fused_multiply_add(next, factors.second, total * factors.first);
}

}  // namespace fd::gpu
