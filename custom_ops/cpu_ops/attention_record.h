// SPDX-License-Identifier: Apache-2.0
// What a row keeps of the splits that it has seen, and how one more joins them.
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// What is known of a row after some splits: weighted values, then maximum and sum.
struct Record {
  float* data;
  int64_t size;  // of the values
  float* values() const { return data; }
  float& maximum() const { return data[size]; }
  float& sum() const { return data[size + 1]; }
};
constexpr int64_t record_size(int64_t padded_dim) { return padded_dim + kLanes; }

// 2^x for finite x up to 0 with a relative error below 2e-7, NaN for NaN. Far below the least float it is 0.
FD_INLINE F16 power_of_two(F16 x) {
#if defined(FD_ISA_AVX512)
  const F16 n = round_to_int(x), f = sub(x, n);  // scale_by_power takes any n here
#else
  const F16 limited = max(splat(-126.0f), x);  // the second operand wins when it is NaN
  const F16 n = round_to_int(limited), f = sub(limited, n);
#endif
  F16 p = splat(1.32647273e-3f);
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

// Adds the maximum and sum of one more split to those of lanes that have some; keep and take are what the values so far
// and those of the split are worth afterwards.
FD_INLINE void merge_sums(F16& maximum, F16& sum, F16 next_maximum, F16 next_sum, F16& keep, F16& take) {
  const F16 top = max(maximum, next_maximum);
  keep = power_of_two(sub(maximum, top));
  take = power_of_two(sub(next_maximum, top));
  maximum = top;
  const F16 kept = mul(sum, keep);
  sum = add(kept, mul(next_sum, take));
}

FD_INLINE F16 merge_values(F16 values, F16 next, F16 keep, F16 take) { return fma(next, take, mul(values, keep)); }

FD_INLINE void merge_values(const Record& total, const Record& next, float keep, float take) {
  for (int64_t d = 0; d < total.size; d += kLanes)
    store(total.values() + d,
          merge_values(load(total.values() + d), load(next.values() + d), splat(keep), splat(take)));
}

}  // namespace FD_ISA
}  // namespace fd
