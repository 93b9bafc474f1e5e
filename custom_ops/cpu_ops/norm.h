// SPDX-License-Identifier: Apache-2.0
// RMSNorm of rows, for the operator and for layers that apply it to their inputs.
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// Returns the sum of the squares of a row in sixteen lanes.
template <class T>
FD_INLINE FP32Vec16 sum_squares(const T* x, int64_t size) {
  FP32Vec16 sum = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const FP32Vec16 v = load_as_float(x + i);
    sum = fma(v, v, sum);
  }
  if (i == size) return sum;
  const FP32Vec16 v = load_first(x + i, static_cast<int>(size - i));
  return fma(v, v, sum);
}

// Returns 1 / sqrt(mean + eps) for the sum of squares of one row, or for those of sixteen rows.
FD_INLINE float norm_factor(float sum, int64_t size, float eps) {
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + eps);
}
FD_INLINE FP32Vec16 norm_factors(FP32Vec16 sums, int64_t size, float eps) {
  const FP32Vec16 mean = div(sums, splat(static_cast<float>(size)));
  return div(splat(1.0f), sqrt(add(mean, splat(eps))));
}

// Writes 1 / sqrt(mean of squares + eps) of kRows rows, `stride` elements apart. Rows are processed together, because
// each sum is a chain of dependent additions.
template <int kRows, class T>
FD_INLINE void norm_factors(const T* x, int64_t stride, int64_t size, float eps, float (&factors)[kRows]) {
  FP32Vec16 squares[kRows];
  for (FP32Vec16& row : squares) row = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const FP32Vec16 v = load_as_float(x + r * stride + i);
      squares[r] = fma(v, v, squares[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (i < size) {
      const FP32Vec16 v = load_first(x + r * stride + i, static_cast<int>(size - i));
      squares[r] = fma(v, v, squares[r]);
    }
    factors[r] = norm_factor(reduce_sum(squares[r]), size, eps);
  }
}

// Writes out = round(x * factor * weight) for one row.
template <class T>
FD_INLINE void scale_row(const T* x, float row_factor, const T* weight, T* out, int64_t size) {
  const FP32Vec16 factor = splat(row_factor);
  int64_t i = 0;
#if defined(FD_ISA_AVX512) && !defined(FD_ISA_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {  // rounding pairs takes half of the instructions
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      const WeightPair v = widen_pairs(load_pairs(x + i)), w = widen_pairs(load_pairs(weight + i));
      const BF16Vec32 rounded = round_pair({mul(mul(v.first, factor), w.first), mul(mul(v.second, factor), w.second)});
      std::memcpy(out + i, &rounded, 64);
    }
  }
#endif
  for (; i + kLanes <= size; i += kLanes)
    store_rounded(out + i, mul(mul(load_as_float(x + i), factor), load_as_float(weight + i)));
  const int tail = static_cast<int>(size - i);
  if (tail > 0) store_first(out + i, mul(mul(load_first(x + i, tail), factor), load_first(weight + i, tail)), tail);
}

// Normalises rows of `size` elements: out = round(x * (1 / sqrt(mean + eps)) * weight). Rows of x are `stride` elements
// apart, those of out one after the other. If stride is size, `out` may be `x`.
template <class T>
static inline void norm_rows(const T* x, int64_t stride, const T* weight, T* out, int64_t rows, int64_t size,
                             float eps) {
  constexpr int together = 4;
  int64_t r = 0;
  for (; r + together <= rows; r += together) {
    float factors[together];
    norm_factors(x + r * stride, stride, size, eps, factors);
    for (int64_t i = 0; i < together; ++i)
      scale_row(x + (r + i) * stride, factors[i], weight, out + (r + i) * size, size);
  }
  for (; r < rows; ++r) {
    float factor[1];
    norm_factors(x + r * stride, stride, size, eps, factor);
    scale_row(x + r * stride, factor[0], weight, out + r * size, size);
  }
}

}  // namespace FD_ISA
}  // namespace fd
