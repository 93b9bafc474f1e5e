// SPDX-License-Identifier: Apache-2.0
// Preparation of new rows for attention: norm and rotation of queries and keys, and writing keys and values to the
// cache.
#pragma once

#include "cpu_ops/attention_tile.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/rotary.h"

namespace fd {
namespace FD_ISA {

// A typed view of the arguments. T is the element type of the cache.
template <class T>
struct Problem {
  using Out = Activation<T>;
  const AttentionArgs& a;
  int64_t head_dim, padded_dim, block_size, heads_per_kv, row_size;

  explicit Problem(const AttentionArgs& args)
      : a(args),
        head_dim(args.cache.head_dim),
        padded_dim(args.cache.padded_head_dim()),
        block_size(args.cache.block_size),
        heads_per_kv(args.num_heads / args.cache.num_kv_heads),
        row_size((args.num_heads + 2 * args.cache.num_kv_heads) * args.cache.head_dim) {}

  // The KV tile that holds position `offset` of a block for one KV head.
  T* key_tile(int64_t block, int64_t kv_head, int64_t offset) const {
    const int64_t position = kv_head * block_size + offset / kLanes * kLanes;
    return static_cast<T*>(a.cache.key) + block * a.cache.key_block() + position * a.cache.key_width();
  }
  T* value_tile(int64_t block, int64_t kv_head, int64_t offset) const {
    const int64_t position = kv_head * block_size + offset / kLanes * kLanes;
    return static_cast<T*>(a.cache.value) + block * a.cache.value_block() + position * a.cache.value_width();
  }
  int64_t value_dim() const { return head_dim; }
  int64_t padded_value_dim() const { return padded_dim; }
  int64_t num_new(int64_t seq) const { return a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]; }

  // Query row i of a sequence and KV head: its row in qkv and out, and the last position that it attends to.
  int64_t row_of(int64_t seq, int64_t i) const { return a.cu_seqlens_q[seq] + i / heads_per_kv; }
  int64_t limit_of(int64_t seq, int64_t i) const { return a.kv_lens[seq] - num_new(seq) + i / heads_per_kv; }
  // The query, key, value and output of a row for a KV head; queries and outputs start at the first head of its group.
  Activation<T>* query_of(int64_t row, int64_t kv_head) const {
    return static_cast<Activation<T>*>(a.qkv) + row * row_size + kv_head * heads_per_kv * head_dim;
  }
  const Activation<T>* new_key(int64_t row, int64_t kv_head) const {
    return static_cast<const Activation<T>*>(a.qkv) + row * row_size + (a.num_heads + kv_head) * head_dim;
  }
  const Activation<T>* new_value(int64_t row, int64_t kv_head) const {
    return new_key(row, kv_head) + a.cache.num_kv_heads * head_dim;
  }
  Activation<T>* out_of(int64_t row, int64_t kv_head) const {
    return static_cast<Activation<T>*>(a.out) + (row * a.num_heads + kv_head * heads_per_kv) * head_dim;
  }
  Activation<T>* output_of(int64_t seq, int64_t i, int64_t kv_head) const {
    return out_of(row_of(seq, i), kv_head) + i % heads_per_kv * head_dim;
  }
};

// Prefetches one head of a row for reading or, with kWrite, for writing: rows are too far apart for the hardware
// prefetcher.
template <bool kWrite = false, class T>
FD_INLINE void prefetch_head(const T* row, int64_t head_dim) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t d = 0; d < head_dim; d += line) __builtin_prefetch(row + d, kWrite);
}

// Stores `count` contiguous keys in a KV tile, starting at position `lane` of the tile.
template <class T>
void store_keys(const T* keys, int64_t count, const Problem<T>& p, int64_t lane, T* tile) {
  constexpr int64_t size = KUnit<T>::kSize;
  const int64_t head_dim = p.head_dim, units = head_dim / size;  // local, because stores may alias `p`
  int64_t first = 0;
#if defined(FD_ISA_AVX512)
  constexpr int64_t min_transposed_keys = 3;  // fewer keys are faster one by one
  const auto mask = static_cast<__mmask16>(((1u << count) - 1) << lane);
  for (; count >= min_transposed_keys && first + kLanes <= units; first += kLanes) {
    __m512i lines[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int64_t at = i < lane ? 0 : i - lane < count ? i - lane : count - 1;
      lines[i] = load_pairs(keys + at * head_dim + first * size);
    }
    transpose16x16(lines);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_mask_storeu_epi32(tile + (first + i) * kLanes * size, mask, lines[i]);
  }
#endif
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 4
    for (int64_t i = first; i < units; ++i)
      std::memcpy(tile + (i * kLanes + lane + r) * size, keys + r * head_dim + i * size, size * sizeof(T));
}
// Stores a value at position `lane` of a KV tile.
static inline void store_value(const float* value, const Problem<float>& p, int64_t lane, float* tile) {
  std::memcpy(tile + lane * p.padded_dim, value, static_cast<size_t>(p.head_dim) * sizeof(float));
}
static inline void store_value(const uint16_t* value, const Problem<uint16_t>& p, int64_t lane, uint16_t* tile) {
  const int parity = static_cast<int>(lane % 2);
  uint16_t* values = tile + (lane - parity) * p.padded_dim;
  const int64_t head_dim = p.head_dim;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_interleaved(values + 2 * d, value + d, parity);
  for (; d < head_dim; ++d) values[2 * d + parity] = value[d];
}

static inline void store_scale(float scale, int64_t width, int64_t lane, int8_t* tile) {
  std::memcpy(tile + width * kLanes + lane * static_cast<int64_t>(sizeof(float)), &scale, sizeof(float));
}
static inline void store_keys(const uint16_t* keys, int64_t count, const Problem<int8_t>& p, int64_t lane,
                              int8_t* tile) {
  const int64_t head_dim = p.head_dim;
  for (int64_t r = 0; r < count; ++r, ++lane, keys += head_dim) {
    int8_t codes[kMaxHeadDim];
    store_scale(quantize_row(keys, head_dim, codes), head_dim, lane, tile);
#pragma GCC unroll 4
    for (int64_t d = 0; d < head_dim; ++d) tile[d * kLanes + lane] = codes[d];
  }
}
static inline void store_value(const uint16_t* value, const Problem<int8_t>& p, int64_t lane, int8_t* tile) {
  int8_t codes[kMaxHeadDim] = {};
  store_scale(quantize_row(value, p.head_dim, codes), p.padded_dim, lane, tile);
  int8_t* values = tile + lane / 2 * 2 * p.padded_dim + lane % 2 * kLanes;
  for (int64_t d = 0; d < p.padded_dim; d += kLanes) std::memcpy(values + 2 * d, codes + d, kLanes);
}

// Contiguous heads of rows that use the same norm: the queries or the key of one KV head.
template <class T>
struct HeadRows {
  const T* from;          // the first head of the first row
  T* to;                  // memory for its result, may be `from`
  int64_t stride, width;  // elements between rows of `from` and of `to`
  int64_t count;          // heads per row
  const T* norm;          // or null
};

// Writes the norm factors of up to kLanes heads. They are computed together, because each is a long chain of dependent
// operations.
template <class T>
FD_INLINE void norm_factors_of_heads(const Head<T>* heads, int64_t count, int64_t head_dim, float eps, float* factors) {
  FP32Vec16 squares[kLanes];
  for (FP32Vec16& sum : squares) sum = zero();
  for (int64_t i = 0; i < count; ++i) squares[i] = sum_squares(heads[i].from, head_dim);
  if (count <= kMaxScalarReductions) {  // scalar division and square root take half of the time
    for (int64_t i = 0; i < count; ++i) factors[i] = norm_factor(reduce_sum(squares[i]), head_dim, eps);
    return;
  }
  store(factors, norm_factors(reduce_sum_each(squares, static_cast<int>(count)), head_dim, eps));
}

// Normalises and rotates up to kLanes heads; heads[i] belongs to row row_indices[i] of the call.
template <class T>
void rotate_batch(const RotaryView& rotary, int64_t head_dim, const T* norm, const Head<T>* heads,
                  const int64_t* row_indices, int64_t count) {
  constexpr int64_t size = Widened<T>::kSize;
  const bool is_whole = !rotary.interleaved && rotary.rotary_dim % (2 * size) == 0 && head_dim % size == 0;
  float factors[kLanes];
  if (norm != nullptr) norm_factors_of_heads(heads, count, head_dim, rotary.eps, factors);
  for (int64_t i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count && row_indices[end] == row_indices[i]; ++end) {
    }
    if (is_whole)
      rotate_heads<T>(rotary, row_indices[i], norm, head_dim, end - i, heads + i, factors + i);
    else
      for (int64_t h = i; h < end; ++h)
        rotate_head_generic(rotary, row_indices[h], norm, head_dim, heads[h], factors[h]);
  }
}

// Normalises and rotates the heads of `num_rows` rows, starting at row `first_row` of the call.
template <class T>
void rotate_rows(const RotaryView& rotary, int64_t head_dim, int64_t first_row, int64_t num_rows,
                 const HeadRows<T>& rows) {
  Head<T> heads[kLanes];
  int64_t row_indices[kLanes], count = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t h = 0; h < rows.count; ++h) {
      heads[count] = {rows.from + row * rows.stride + h * head_dim, rows.to + row * rows.width + h * head_dim};
      row_indices[count++] = first_row + row;
      const bool is_last = row + 1 == num_rows && h + 1 == rows.count;
      if (count < kLanes && !is_last) continue;
      rotate_batch(rotary, head_dim, rows.norm, heads, row_indices, count);
      count = 0;
    }
  }
}

// Normalises and rotates the queries of rows [first, end) for one KV head, into `to` [rows][heads][head_dim] or, if
// that is null, in place.
template <class T>
void rotate_queries(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head, Activation<T>* to) {
  const RotaryView& rotary = p.a.rotary;
  Activation<T>* from = p.query_of(first, kv_head);
  const int64_t width = p.heads_per_kv * p.head_dim;
  rotate_rows<Activation<T>>(rotary, p.head_dim, first, end - first,
                             {from, to == nullptr ? from : to, p.row_size, to == nullptr ? p.row_size : width,
                              p.heads_per_kv, static_cast<const Activation<T>*>(rotary.q_norm)});
}

// Writes the keys and values of new rows [first, end), at most kLanes rows, to the cache of one KV head. With a
// rotation, keys are normalised and rotated first.
template <class T>
void write_kv_strip(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  const RotaryView& rotary = p.a.rotary;
  alignas(64) Activation<T> keys[kLanes * kMaxHeadDim];
  for (int64_t row = first; row < end; ++row) {
    prefetch_head(p.new_key(row, kv_head), p.head_dim);
    prefetch_head(p.new_value(row, kv_head), p.head_dim);
  }
  if (rotary.cos_sin != nullptr) {
    rotate_rows<Activation<T>>(
        rotary, p.head_dim, first, end - first,
        {p.new_key(first, kv_head), keys, p.row_size, p.head_dim, 1, static_cast<const Activation<T>*>(rotary.k_norm)});
  } else {
    for (int64_t row = first; row < end; ++row)
      std::memcpy(keys + (row - first) * p.head_dim, p.new_key(row, kv_head),
                  static_cast<size_t>(p.head_dim) * sizeof(Activation<T>));
  }
  for (int64_t row = first, next; row < end; row = next) {
    const int64_t slot = p.a.slot_mapping[row], block = slot / p.block_size, offset = slot % p.block_size;
    for (next = row + 1; next < end && p.a.slot_mapping[next] == slot + next - row; ++next)
      if ((slot + next - row) % kLanes == 0) break;
    store_keys(keys + (row - first) * p.head_dim, next - row, p, offset % kLanes, p.key_tile(block, kv_head, offset));
    T* values = p.value_tile(block, kv_head, offset);
    for (int64_t r = row; r < next; ++r) store_value(p.new_value(r, kv_head), p, offset % kLanes + r - row, values);
  }
}

// Does the same for any number of rows.
template <class T>
void write_kv(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  for (; first < end; first += kLanes) write_kv_strip(p, first, first + kLanes < end ? first + kLanes : end, kv_head);
}

}  // namespace FD_ISA
}  // namespace fd
