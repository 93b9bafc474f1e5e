// SPDX-License-Identifier: Apache-2.0
// Preparation of the rows of latent attention: new rows of the cache, and panels of queries.
#pragma once

#include <cstring>

#include "cpu_ops/interleave.h"
#include "cpu_ops/latent_attention.h"
#include "cpu_ops/rotary.h"

namespace fd {
namespace FD_ISA {

// A typed view of the arguments. T is the element type of rows and cache.
template <class T>
struct LatentProblem {
  using Out = T;
  const LatentAttentionArgs& a;
  int64_t latent_dim, rope_dim, width;

  explicit LatentProblem(const LatentAttentionArgs& args)
      : a(args), latent_dim(args.cache.latent_dim), rope_dim(args.cache.rope_dim), width(args.cache.width()) {}

  int64_t value_dim() const { return latent_dim; }
  int64_t padded_value_dim() const { return (latent_dim + kLanes - 1) / kLanes * kLanes; }
  int64_t num_units() const { return width / KUnit<T>::kSize; }  // k units of a row of the cache
  T* cached(int64_t slot) const { return static_cast<T*>(a.cache.rows) + slot * width; }

  // Query row i of a sequence is head i % num_heads of its new position i / num_heads.
  int64_t num_new(int64_t seq) const { return a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]; }
  int64_t row_of(int64_t seq, int64_t i) const { return a.cu_seqlens_q[seq] + i / a.num_heads; }
  int64_t limit_of(int64_t seq, int64_t i) const { return a.kv_lens[seq] - num_new(seq) + i / a.num_heads; }
  T* output_of(int64_t seq, int64_t i, int64_t = 0) const {
    return static_cast<T*>(a.out) + (row_of(seq, i) * a.num_heads + i % a.num_heads) * latent_dim;
  }
  const T* absorbed_of(int64_t seq, int64_t i) const {
    return static_cast<const T*>(a.absorbed) + (row_of(seq, i) * a.num_heads + i % a.num_heads) * latent_dim;
  }
  const T* rope_query_of(int64_t seq, int64_t i) const {
    const int64_t head = i % a.num_heads * (a.nope_dim + rope_dim) + a.nope_dim;
    return static_cast<const T*>(a.query) + row_of(seq, i) * a.query_stride + head;
  }

  // Writes the rotated part of row `row` of the call to `to`.
  void rotate(const T* from, int64_t row, T* to) const {
    rotate_head_generic<T>(a.rotary, row, nullptr, rope_dim, {from, to}, 1.0f);
  }
};

template <class T>
bool is_finite(const T* x, int64_t size) {
  FP32Vec16 zeros = zero();  // 0 * x is NaN unless x is finite
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) zeros = fma(load_as_float(x + i), zero(), zeros);
  if (i < size) zeros = fma(load_first(x + i, static_cast<int>(size - i)), zero(), zeros);
  return reduce_sum(zeros) == 0.0f;
}

FD_INLINE void set_nan(float& x) { x = __builtin_nanf(""); }
FD_INLINE void set_nan(uint16_t& x) { x = 0x7fc0; }
FD_INLINE bool is_nan(float x) { return x != x; }
FD_INLINE bool is_nan(uint16_t x) { return (x & 0x7fff) > 0x7f80; }

// Writes a new row to its slot: its latent part normalised, its other part rotated. If any of its values is not finite,
// all of them become NaN, so that every score with this row is NaN and a look at one value tells.
template <class T>
void write_latent(const LatentProblem<T>& p, int64_t row) {
  const T* from = static_cast<const T*>(p.a.latent) + row * p.a.latent_stride;
  T* to = p.cached(p.a.slot_mapping[row]);
  norm_rows(from, p.latent_dim, static_cast<const T*>(p.a.norm), to, 1, p.latent_dim, p.a.eps);
  p.rotate(from + p.latent_dim, row, to + p.latent_dim);
  if (is_finite(to, p.width)) return;
  for (int64_t d = 0; d < p.width; ++d) set_nan(to[d]);
}

// Interleaves up to kLanes queries [kLanes][width] as a panel [k units][kLanes], which scores read like the weights of
// sixteen outputs. A k unit has four bytes in either dtype.
template <class T>
void pack_queries(const T* queries, int64_t width, T* panel) {
  static_assert(sizeof(T) * KUnit<T>::kSize == sizeof(uint32_t), "a k unit has four bytes");
  const int64_t units = width / KUnit<T>::kSize;
  const auto at = [=](int64_t r, int64_t unit) { return queries + r * width + unit * KUnit<T>::kSize; };
#if defined(FD_ISA_AVX512)
  const auto load = [=](int64_t r, int64_t unit) { return load_pairs(at(r, unit)); };
#else
  const auto load = nullptr;
#endif
  const auto get_unit = [=](int64_t r, int64_t unit) {
    uint32_t bits;
    std::memcpy(&bits, at(r, unit), sizeof(bits));
    return bits;
  };
  interleave(kLanes, units, reinterpret_cast<uint32_t*>(panel), load, get_unit);
}

}  // namespace FD_ISA
}  // namespace fd
