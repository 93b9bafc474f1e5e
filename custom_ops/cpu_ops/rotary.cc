// SPDX-License-Identifier: Apache-2.0
#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/norm.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kElementsWorthAThread = 16384;
constexpr int64_t kMaxHeadDim = 256;

// Rotates pairs (x1, x2) by the angles of 16 consecutive frequencies.
FD_INLINE void rotate(F16& x1, F16& x2, F16 cosine, F16 sine) {
  const F16 first = sub(mul(x1, cosine), mul(x2, sine));
  x2 = add(mul(x2, cosine), mul(x1, sine));
  x1 = first;
}

template <class T>
void rotate_half_split(T* head, const float* cosine, const float* sine, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int width = static_cast<int>(half - i < kLanes ? half - i : kLanes);
    F16 x1 = load_first(head + i, width), x2 = load_first(head + half + i, width);
    rotate(x1, x2, load_first(cosine + i, width), load_first(sine + i, width));
    store_first(head + i, x1, width);
    store_first(head + half + i, x2, width);
  }
}

template <class T>
void rotate_interleaved(T* head, const float* cosine, const float* sine, int64_t half) {
  T even[kMaxHeadDim / 2], odd[kMaxHeadDim / 2];
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

template <class T>
void rotary_typed(const RotaryArgs& a) {
  const int64_t heads = a.num_heads + a.num_kv_heads, row_size = (heads + a.num_kv_heads) * a.head_dim;
  const int64_t half = a.rotary_dim / 2;
  parallel_for(a.rows, a.rows * row_size >= kElementsWorthAThread, [&](int64_t row) {
    const float* cosine = a.cos_sin + a.positions[row] * a.rotary_dim;
    T* head = static_cast<T*>(a.qkv) + row * row_size;
    for (int64_t h = 0; h < heads; ++h, head += a.head_dim) {
      const T* norm = static_cast<const T*>(h < a.num_heads ? a.q_norm : a.k_norm);
      if (norm != nullptr) norm_row(head, norm, head, a.head_dim, a.eps);
      a.interleaved ? rotate_interleaved(head, cosine, cosine + half, half)
                    : rotate_half_split(head, cosine, cosine + half, half);
    }
  });
}

}  // namespace

void rotary(const RotaryArgs& a) { a.dtype == DType::kBfloat16 ? rotary_typed<uint16_t>(a) : rotary_typed<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
