// SPDX-License-Identifier: Apache-2.0
// Norm and rotary position embedding of query and key heads.
#pragma once

#include "cpu_ops/kernels.h"
#include "cpu_ops/norm.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kMaxRotaryDim = 256;

// Consecutive elements of a row, widened to fp32: sixteen, or 32 where widening and rounding pairs of bf16 takes half
// of the instructions.
template <class T>
struct Widened {
  static constexpr int64_t kSize = kLanes;
  FP32Vec16 x;
  FD_INLINE Widened load(const T* p) { return {load_as_float(p)}; }
  FD_INLINE Widened from_floats(const float* p) { return {FD_ISA::load(p)}; }
  FD_INLINE Widened splat_all(float value) { return {splat(value)}; }
  template <class Operation>
  Widened combine(Widened other, Operation&& operation) const {
    return {operation(x, other.x)};
  }
  Widened rounded() const {
    if constexpr (sizeof(T) == 4) return *this;
    return {round_to_bf16(x)};
  }
  void store(T* p) const { store_rounded(p, x); }
};
#if defined(FD_ISA_AVX512) && !defined(FD_ISA_AVX512_BF16)
template <>
struct Widened<uint16_t> {
  static constexpr int64_t kSize = 2 * kLanes;
  WeightPair x;
  FD_INLINE Widened load(const uint16_t* p) { return {widen_pairs(load_pairs(p))}; }
  FD_INLINE Widened from_floats(const float* p) { return {deinterleave(p)}; }
  FD_INLINE Widened splat_all(float value) { return {{splat(value), splat(value)}}; }
  template <class Operation>
  Widened combine(const Widened& other, Operation&& operation) const {
    return {{operation(x.first, other.x.first), operation(x.second, other.x.second)}};
  }
  Widened rounded() const { return {round_pair_values(x)}; }
  void store(uint16_t* p) const {
    const BF16Vec32 pairs = round_pair(x);
    std::memcpy(p, &pairs, 64);
  }
};
#endif

template <class T>
FD_INLINE Widened<T> operator*(const Widened<T>& a, const Widened<T>& b) {
  return a.combine(b, [](FP32Vec16 x, FP32Vec16 y) { return mul(x, y); });
}
template <class T>
FD_INLINE Widened<T> operator+(const Widened<T>& a, const Widened<T>& b) {
  return a.combine(b, [](FP32Vec16 x, FP32Vec16 y) { return add(x, y); });
}
template <class T>
FD_INLINE Widened<T> operator-(const Widened<T>& a, const Widened<T>& b) {
  return a.combine(b, [](FP32Vec16 x, FP32Vec16 y) { return sub(x, y); });
}

// A head of a row, and the memory for its result, which may be the same.
template <class T>
struct Head {
  const T* from;
  T* to;
};

// Returns x * factor * norm, rounded, or x if there is no norm.
template <class T>
FD_INLINE Widened<T> normed(const T* head, bool has_norm, float factor, const Widened<T>& norm) {
  const auto x = Widened<T>::load(head);
  return has_norm ? (x * Widened<T>::splat_all(factor) * norm).rounded() : x;
}

// Normalises (if `norm` is not null) and rotates heads of one row, rounding after each.
template <class T>
FD_INLINE void rotate_heads(const RotaryView& a, int64_t row, const T* norm, int64_t head_dim, int64_t count,
                            const Head<T>* heads, const float* factors) {
  constexpr int64_t size = Widened<T>::kSize;
  const int64_t half = a.rotary_dim / 2;
  const float* angles = a.cos_sin + a.positions[row] * a.rotary_dim;
  const bool has_norm = norm != nullptr;
  const auto norm_at = [&](int64_t i) { return has_norm ? Widened<T>::load(norm + i) : Widened<T>::splat_all(1.0f); };
  for (int64_t i = 0; i < half; i += size) {
    const auto cosine = Widened<T>::from_floats(angles + i), sine = Widened<T>::from_floats(angles + half + i);
    const auto first_norm = norm_at(i), second_norm = norm_at(half + i);
    for (int64_t h = 0; h < count; ++h) {
      const T* from = heads[h].from;
      T* to = heads[h].to;
      const auto first = normed(from + i, has_norm, factors[h], first_norm);
      const auto second = normed(from + half + i, has_norm, factors[h], second_norm);
      (first * cosine - second * sine).store(to + i);
      (second * cosine + first * sine).store(to + half + i);
    }
  }
  for (int64_t i = a.rotary_dim; i < head_dim; i += size) {
    const auto rest_norm = norm_at(i);
    for (int64_t h = 0; h < count; ++h) {
      if (has_norm)
        normed(heads[h].from + i, true, factors[h], rest_norm).store(heads[h].to + i);
      else
        std::memmove(heads[h].to + i, heads[h].from + i, size * sizeof(T));
    }
  }
}

// Rotates pairs (x1, x2) by the angles of sixteen consecutive frequencies.
FD_INLINE void rotate(FP32Vec16& x1, FP32Vec16& x2, FP32Vec16 cosine, FP32Vec16 sine) {
  const FP32Vec16 first = sub(mul(x1, cosine), mul(x2, sine));
  x2 = add(mul(x2, cosine), mul(x1, sine));
  x1 = first;
}

// Rotates pairs (x1[i], x2[i]), 0 <= i < half.
template <class T>
FD_INLINE void rotate_pairs(T* x1, T* x2, const float* cosine, const float* sine, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    FP32Vec16 first = load_as_float(x1 + i), second = load_as_float(x2 + i);
    rotate(first, second, load(cosine + i), load(sine + i));
    store_rounded(x1 + i, first);
    store_rounded(x2 + i, second);
  }
  if (i == half) return;
  const int width = static_cast<int>(half - i);
  FP32Vec16 first = load_first(x1 + i, width), second = load_first(x2 + i, width);
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

// Does the same as rotate_heads for any head size and either order of pairs.
template <class T>
static inline void rotate_head_generic(const RotaryView& a, int64_t row, const T* norm, int64_t head_dim,
                                       const Head<T>& head, float factor) {
  const int64_t half = a.rotary_dim / 2;
  const float* cosine = a.cos_sin + a.positions[row] * a.rotary_dim;
  if (norm != nullptr)
    scale_row(head.from, factor, norm, head.to, head_dim);
  else
    std::memmove(head.to, head.from, static_cast<size_t>(head_dim) * sizeof(T));
  a.interleaved ? rotate_interleaved(head.to, cosine, cosine + half, half)
                : rotate_pairs(head.to, head.to + half, cosine, cosine + half, half);
}

}  // namespace FD_ISA
}  // namespace fd
