// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu_ops/kernels.h"
#include "cpu_ops/norm.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kMaxRotaryDim = 256;

// Rotates pairs (x1, x2) by the angles of 16 consecutive frequencies.
FD_INLINE void rotate(F16& x1, F16& x2, F16 cosine, F16 sine) {
  const F16 first = sub(mul(x1, cosine), mul(x2, sine));
  x2 = add(mul(x2, cosine), mul(x1, sine));
  x1 = first;
}

template <class T>
static inline void rotate_half_split(T* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int width = static_cast<int>(half - i < kLanes ? half - i : kLanes);
    F16 x1 = load_first(head + i, width), x2 = load_first(head + half + i, width);
    rotate(x1, x2, load_first(cosine + i, width), load_first(sine + i, width));
    store_first(head + i, x1, width);
    store_first(head + half + i, x2, width);
  }
}

template <class T>
static inline void rotate_interleaved(T* head, const float* cosine, const float* sine, int64_t half) {
  T even[kMaxRotaryDim / 2], odd[kMaxRotaryDim / 2];
  for (int64_t i = 0; i < half; ++i) {
    even[i] = head[2 * i];
    odd[i] = head[2 * i + 1];
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    const int width = static_cast<int>(half - i < kLanes ? half - i : kLanes);
    F16 x1 = load_first(even + i, width), x2 = load_first(odd + i, width);
    rotate(x1, x2, load_first(cosine + i, width), load_first(sine + i, width));
    store_first(even + i, x1, width);
    store_first(odd + i, x2, width);
  }
  for (int64_t i = 0; i < half; ++i) {
    head[2 * i] = even[i];
    head[2 * i + 1] = odd[i];
  }
}

// Normalises, where there is a norm, and rotates `count` heads of one row in place, rounding after each.
template <class T>
static inline void rotate_heads(const RotaryView& a, int64_t row, const void* norm, T* head, int64_t count,
                                int64_t head_dim) {
  const int64_t half = a.rotary_dim / 2;
  const float* cosine = a.cos_sin + a.positions[row] * a.rotary_dim;
  for (int64_t h = 0; h < count; ++h, head += head_dim) {
    if (norm != nullptr) norm_row(head, static_cast<const T*>(norm), head, head_dim, a.eps);
    a.interleaved ? rotate_interleaved(head, cosine, cosine + half, half)
                  : rotate_half_split(head, cosine, cosine + half, half);
  }
}

}  // namespace FD_ISA
}  // namespace fd
