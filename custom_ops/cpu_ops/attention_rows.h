// SPDX-License-Identifier: Apache-2.0
// What attention does to new rows first: norms and rotation of queries and keys, and keys and values taken to the
// cache.
#pragma once

#include "common/scratch.h"
#include "cpu_ops/attention_tile.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/rotary.h"

namespace fd {
namespace FD_ISA {

// A typed view of the arguments. T is the cache's type.
template <class T>
struct Problem {
  const AttentionArgs& a;
  int64_t head_dim, padded_dim, block_size, heads_per_kv, row_size;

  explicit Problem(const AttentionArgs& args)
      : a(args),
        head_dim(args.cache.head_dim),
        padded_dim(args.cache.padded_head_dim()),
        block_size(args.cache.block_size),
        heads_per_kv(args.num_heads / args.cache.num_kv_heads),
        row_size((args.num_heads + 2 * args.cache.num_kv_heads) * args.cache.head_dim) {}

  // The packet of a block and kv head that holds a position of the block.
  T* key_packet(int64_t block, int64_t kv_head, int64_t offset) const {
    const int64_t position = kv_head * block_size + offset / kLanes * kLanes;
    return static_cast<T*>(a.cache.key) + block * a.cache.key_block() + position * a.cache.key_width();
  }
  T* value_packet(int64_t block, int64_t kv_head, int64_t offset) const {
    const int64_t position = kv_head * block_size + offset / kLanes * kLanes;
    return static_cast<T*>(a.cache.value) + block * a.cache.value_block() + position * a.cache.value_width();
  }
  int64_t num_new(int64_t seq) const { return a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]; }

  // Row i of a sequence and KV head: its place in qkv and out, in heads, and the last position that it sees.
  int64_t row_of(int64_t seq, int64_t i) const { return a.cu_seqlens_q[seq] + i / heads_per_kv; }
  int64_t head_of(int64_t kv_head, int64_t i) const { return kv_head * heads_per_kv + i % heads_per_kv; }
  int64_t limit_of(int64_t seq, int64_t i) const { return a.kv_lens[seq] - num_new(seq) + i / heads_per_kv; }
  const Row<T>* query(int64_t seq, int64_t kv_head, int64_t i) const {
    return static_cast<const Row<T>*>(a.qkv) + row_of(seq, i) * row_size + head_of(kv_head, i) * head_dim;
  }
  const Row<T>* new_key(int64_t row, int64_t kv_head) const {
    return static_cast<const Row<T>*>(a.qkv) + row * row_size + (a.num_heads + kv_head) * head_dim;
  }
  const Row<T>* new_value(int64_t row, int64_t kv_head) const {
    return new_key(row, kv_head) + a.cache.num_kv_heads * head_dim;
  }
  Row<T>* out(int64_t seq, int64_t kv_head, int64_t i) const {
    return static_cast<Row<T>*>(a.out) + (row_of(seq, i) * a.num_heads + head_of(kv_head, i)) * head_dim;
  }
};

// Asks for a row of one head that is read or, with kWrite, written soon, or, where kNearness is 2, later: rows lie too
// far apart for the processor to foresee them.
template <bool kWrite = false, int kNearness = 3, class T>
FD_INLINE void fetch_head(const T* row, int64_t head_dim) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t d = 0; d < head_dim; d += line) __builtin_prefetch(row + d, kWrite, kNearness);
}

// Puts a key or a value of one kv head into its packet, at position `lane`.
template <class T>
void put_key(const T* key, const Problem<T>& p, int64_t lane, T* packet) {
  constexpr int64_t size = Step<T>::kSize;
  const int64_t steps = p.head_dim / size;  // stores might change what `p` refers to
#pragma GCC unroll 4
  for (int64_t i = 0; i < steps; ++i)
    std::memcpy(packet + (i * kLanes + lane) * size, key + i * size, size * sizeof(T));
}
static inline void put_value(const float* value, const Problem<float>& p, int64_t lane, float* packet) {
  std::memcpy(packet + lane * p.padded_dim, value, static_cast<size_t>(p.head_dim) * sizeof(float));
}
static inline void put_value(const uint16_t* value, const Problem<uint16_t>& p, int64_t lane, uint16_t* packet) {
  const int place = static_cast<int>(lane % 2);
  uint16_t* values = packet + (lane - place) * p.padded_dim;
  const int64_t head_dim = p.head_dim;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_in_pairs(values + 2 * d, value + d, place);
  for (; d < head_dim; ++d) values[2 * d + place] = value[d];
}

static inline void put_scale(float scale, int64_t width, int64_t lane, int8_t* packet) {
  std::memcpy(packet + width * kLanes + lane * static_cast<int64_t>(sizeof(float)), &scale, sizeof(float));
}
static inline void put_key(const uint16_t* key, const Problem<int8_t>& p, int64_t lane, int8_t* packet) {
  const int64_t head_dim = p.head_dim;
  int8_t codes[kMaxHeadDim];
  put_scale(quantize_row(key, head_dim, codes), head_dim, lane, packet);
#pragma GCC unroll 4
  for (int64_t d = 0; d < head_dim; ++d) packet[d * kLanes + lane] = codes[d];
}
static inline void put_value(const uint16_t* value, const Problem<int8_t>& p, int64_t lane, int8_t* packet) {
  int8_t codes[kMaxHeadDim] = {};
  put_scale(quantize_row(value, p.head_dim, codes), p.padded_dim, lane, packet);
  int8_t* values = packet + lane / 2 * 2 * p.padded_dim + lane % 2 * kLanes;
  for (int64_t d = 0; d < p.padded_dim; d += kLanes) std::memcpy(values + 2 * d, codes + d, kLanes);
}

// Takes one new row's key and value of one kv head to its slot.
template <class T>
void write_slot(const Problem<T>& p, int64_t row, int64_t kv_head) {
  const int64_t slot = p.a.slot_mapping[row], block = slot / p.block_size, offset = slot % p.block_size;
  put_key(p.new_key(row, kv_head), p, offset % kLanes, p.key_packet(block, kv_head, offset));
  put_value(p.new_value(row, kv_head), p, offset % kLanes, p.value_packet(block, kv_head, offset));
}

// The heads that rows from `first` on have to do with one kv head: for each row its queries, then its key. Norms have
// been taken before: `factors` [rows][heads].
template <class T>
struct GroupHeads {
  const Problem<T>& p;
  int64_t first, kv_head;
  const float* factors;

  int64_t count() const { return p.heads_per_kv + 1; }
  bool is_key(int64_t h) const { return h == p.heads_per_kv; }
  Row<T>* data(int64_t row, int64_t h) const {
    const int64_t head = is_key(h) ? p.a.num_heads + kv_head : kv_head * p.heads_per_kv + h;
    return static_cast<Row<T>*>(p.a.qkv) + row * p.row_size + head * p.head_dim;
  }
  Head<Row<T>> at(int64_t row, int64_t h) const {
    const auto* norm = static_cast<const Row<T>*>(is_key(h) ? p.a.rotary.k_norm : p.a.rotary.q_norm);
    return {data(row, h), norm, norm == nullptr ? 1 : factors[(row - first) * count() + h]};
  }
};

// Writes the norms' factors of `rows` rows: sixteen heads side by side, since each is a long chain of operations.
template <class T>
void find_factors(const GroupHeads<T>& heads, int64_t rows, float* factors) {
  const Problem<T>& p = heads.p;
  const int64_t count = rows * heads.count();
  for (int64_t i = 0; i < count; i += kLanes) {
    const int together = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    F16 squares[kLanes];
    for (F16& sum : squares) sum = zero();
    for (int j = 0; j < together; ++j)
      squares[j] = sum_squares(heads.data(heads.first + (i + j) / heads.count(), (i + j) % heads.count()), p.head_dim);
    store(factors + i, norm_factors(sum_lanes_of_each(squares, together), p.head_dim, p.a.rotary.eps));
  }
}

// Normalises and rotates the keys of rows [first, end) and one kv head, and the queries that they meet.
template <class T>
void rotate_rows(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  const RotaryView& rotary = p.a.rotary;
  const int64_t most = ((end - first) * (p.heads_per_kv + 1) + kLanes - 1) / kLanes * kLanes;
  float* factors = static_cast<float*>(thread_scratch(static_cast<size_t>(most) * sizeof(float), Scratch::kTile));
  const GroupHeads<T> heads{p, first, kv_head, factors};
  if (rotary.q_norm != nullptr || rotary.k_norm != nullptr) find_factors(heads, end - first, factors);
  constexpr int64_t size = Neighbours<Row<T>>::kSize;
  const bool is_whole = !rotary.interleaved && rotary.rotary_dim % (2 * size) == 0 && p.head_dim % size == 0;
  for (int64_t row = first; row < end; ++row) {
    if (is_whole) {
      rotate_heads<Row<T>>(rotary, row, p.head_dim, heads.count(), [&](int64_t h) { return heads.at(row, h); });
    } else {
      for (int64_t h = 0; h < heads.count(); ++h) rotate_any_head(rotary, row, heads.at(row, h), p.head_dim);
    }
  }
}

// Rotates new rows of one kv head, where there is a rotation, and takes their keys and values to the cache.
template <class T>
void take_rows(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  for (int64_t row = first; row < end; ++row) {
    fetch_head(p.new_key(row, kv_head), p.head_dim);
    fetch_head(p.new_value(row, kv_head), p.head_dim);
  }
  if (p.a.rotary.cos_sin != nullptr) rotate_rows(p, first, end, kv_head);
  for (int64_t row = first; row < end; ++row) write_slot(p, row, kv_head);
}

}  // namespace FD_ISA
}  // namespace fd
