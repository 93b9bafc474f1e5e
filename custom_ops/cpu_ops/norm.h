// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// Normalises one row of `size` elements: the squares are summed in 16 lanes, the lanes in one tree, then
// out = round(x * (1 / sqrt(mean + eps)) * weight). `out` may be `x`.
template <class T>
FD_INLINE void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
  F16 squares = zero();
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const F16 v = load_as_float(x + i);
    squares = fma(v, v, squares);
  }
  const int tail = static_cast<int>(size - i);
  if (tail > 0) {
    const F16 v = load_first(x + i, tail);
    squares = fma(v, v, squares);
  }
  const F16 factor = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(size) + eps));
  for (i = 0; i + kLanes <= size; i += kLanes)
    store_rounded(out + i, mul(mul(load_as_float(x + i), factor), load_as_float(weight + i)));
  if (tail > 0) store_first(out + i, mul(mul(load_first(x + i, tail), factor), load_first(weight + i, tail)), tail);
}

}  // namespace FD_ISA
}  // namespace fd
