// SPDX-License-Identifier: Apache-2.0
// The attention state of a row after some splits, and how the result of another split is merged into it.
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// Sum of weighted values, then the maximum of the scores and the sum of the weights relative to it.
struct AttentionState {
  float* data;
  int64_t size;  // number of values
  float* values() const { return data; }
  float& maximum() const { return data[size]; }
  float& sum() const { return data[size + 1]; }
};
constexpr int64_t state_size(int64_t padded_dim) { return padded_dim + kLanes; }

// Returns 2^x for finite x <= 0 with a relative error below 2e-7, NaN for NaN, and 0 where 2^x underflows.
FD_INLINE FP32Vec16 power_of_two(FP32Vec16 x) {
#if defined(FD_ISA_AVX512)
  const FP32Vec16 n = round_to_int(x), f = sub(x, n);  // scale_by_power accepts any n on this path
#else
  const FP32Vec16 limited = max(splat(-126.0f), x);  // max returns the second operand for NaN
  const FP32Vec16 n = round_to_int(limited), f = sub(limited, n);
#endif
  FP32Vec16 p = splat(1.32647273e-3f);
  p = fma(p, f, splat(9.67151299e-3f));
  p = fma(p, f, splat(5.55073358e-2f));
  p = fma(p, f, splat(2.40222424e-1f));
  p = fma(p, f, splat(6.93147004e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(FD_ISA_AVX512)
  return scale_by_power(p, n);
#else
  return zero_where_below(x, -126.0f, scale_by_power(p, n));
#endif
}

// Merges the maximum and sum of another split into those of previous splits, lane by lane. The values of the previous
// splits must then be multiplied by rescale_old, those of the split by rescale_new.
FD_INLINE void merge_sums(FP32Vec16& maximum, FP32Vec16& sum, FP32Vec16 next_maximum, FP32Vec16 next_sum,
                          FP32Vec16& rescale_old, FP32Vec16& rescale_new) {
  const FP32Vec16 largest = max(maximum, next_maximum);
  rescale_old = power_of_two(sub(maximum, largest));
  rescale_new = power_of_two(sub(next_maximum, largest));
  maximum = largest;
  const FP32Vec16 old_sum = mul(sum, rescale_old);
  sum = add(old_sum, mul(next_sum, rescale_new));
}

FD_INLINE FP32Vec16 merge_values(FP32Vec16 values, FP32Vec16 next, FP32Vec16 rescale_old, FP32Vec16 rescale_new) {
  return fma(next, rescale_new, mul(values, rescale_old));
}

FD_INLINE void merge_values(const AttentionState& total, const AttentionState& next, float rescale_old,
                            float rescale_new) {
  for (int64_t d = 0; d < total.size; d += kLanes)
    store(total.values() + d,
          merge_values(load(total.values() + d), load(next.values() + d), splat(rescale_old), splat(rescale_new)));
}

}  // namespace FD_ISA
}  // namespace fd
