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

// Rotates pairs (x1[i], x2[i]), 0 <= i < half.
template <class T>
FD_INLINE void rotate_pairs(T* x1, T* x2, const float* cosine, const float* sine, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    F16 first = load_as_float(x1 + i), second = load_as_float(x2 + i);
    rotate(first, second, load(cosine + i), load(sine + i));
    store_rounded(x1 + i, first);
    store_rounded(x2 + i, second);
  }
  if (i == half) return;
  const int width = static_cast<int>(half - i);
  F16 first = load_first(x1 + i, width), second = load_first(x2 + i, width);
  rotate(first, second, load_first(cosine + i, width), load_first(sine + i, width));
  store_first(x1 + i, first, width);
  store_first(x2 + i, second, width);
}

template <class T>
static inline void rotate_interleaved(T* head, const float* cosine, const float* sine, int64_t half) {
  T even[kMaxRotaryDim / 2], odd[kMaxRotaryDim / 2];
  for (int64_t i = 0; i < half; ++i) {
    even[i] = head[2 * i];
    odd[i] = head[2 * i + 1];
  }
  rotate_pairs(even, odd, cosine, sine, half);
  for (int64_t i = 0; i < half; ++i) {
    head[2 * i] = even[i];
    head[2 * i + 1] = odd[i];
  }
}

// Normalises `count` heads of one row in place, rounding them, where there is a norm.
template <class T>
static inline void norm_heads(const RotaryView& a, const void* norm, T* head, int64_t count, int64_t head_dim) {
  if (norm == nullptr) return;
  for (int64_t h = 0; h < count; ++h, head += head_dim)
    norm_row(head, static_cast<const T*>(norm), head, head_dim, a.eps);
}

// Rotates `count` heads of one row in place and rounds them.
template <class T>
static inline void rotate_heads(const RotaryView& a, int64_t row, T* head, int64_t count, int64_t head_dim) {
  const int64_t half = a.rotary_dim / 2;
  const float* cosine = a.cos_sin + a.positions[row] * a.rotary_dim;
  for (int64_t h = 0; h < count; ++h, head += head_dim) {
    a.interleaved ? rotate_interleaved(head, cosine, cosine + half, half)
                  : rotate_pairs(head, head + half, cosine, cosine + half, half);
  }
}

}  // namespace FD_ISA
}  // namespace fd
