// SPDX-License-Identifier: Apache-2.0
// What attention does to new rows: norms and rotation of queries and keys, and keys and values taken to the cache.
#pragma once

#include "cpu_ops/attention_tile.h"
#include "cpu_ops/interleave.h"
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

  // Row i of a sequence and KV head: its row in qkv and out, and the last position that it sees.
  int64_t row_of(int64_t seq, int64_t i) const { return a.cu_seqlens_q[seq] + i / heads_per_kv; }
  int64_t limit_of(int64_t seq, int64_t i) const { return a.kv_lens[seq] - num_new(seq) + i / heads_per_kv; }
  // The first head of a row that belongs to a KV head: queries, key, value, output.
  Row<T>* query_of(int64_t row, int64_t kv_head) const {
    return static_cast<Row<T>*>(a.qkv) + row * row_size + kv_head * heads_per_kv * head_dim;
  }
  const Row<T>* new_key(int64_t row, int64_t kv_head) const {
    return static_cast<const Row<T>*>(a.qkv) + row * row_size + (a.num_heads + kv_head) * head_dim;
  }
  const Row<T>* new_value(int64_t row, int64_t kv_head) const {
    return new_key(row, kv_head) + a.cache.num_kv_heads * head_dim;
  }
  Row<T>* out_of(int64_t row, int64_t kv_head) const {
    return static_cast<Row<T>*>(a.out) + (row * a.num_heads + kv_head * heads_per_kv) * head_dim;
  }
};

// Asks for a row of one head that is read or, with kWrite, written soon: rows lie too far apart for the processor to
// foresee them.
template <bool kWrite = false, class T>
FD_INLINE void fetch_head(const T* row, int64_t head_dim) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t d = 0; d < head_dim; d += line) __builtin_prefetch(row + d, kWrite);
}

// Puts `count` keys, one after the other in memory, into a packet of one kv head from position `lane` on.
template <class T>
void put_keys(const T* keys, int64_t count, const Problem<T>& p, int64_t lane, T* packet) {
  constexpr int64_t size = Step<T>::kSize;
  const int64_t head_dim = p.head_dim, steps = head_dim / size;  // stores might change what `p` refers to
  int64_t first = 0;
#if defined(FD_ISA_AVX512)
  constexpr int64_t worth_turning = 3;
  const auto kept = static_cast<__mmask16>(((1u << count) - 1) << lane);
  for (; count >= worth_turning && first + kLanes <= steps; first += kLanes) {
    __m512i lines[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      const int64_t at = i < lane ? 0 : i - lane < count ? i - lane : count - 1;
      lines[i] = load_pairs(keys + at * head_dim + first * size);
    }
    turn(lines);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) _mm512_mask_storeu_epi32(packet + (first + i) * kLanes * size, kept, lines[i]);
  }
#endif
  for (int64_t r = 0; r < count; ++r)
#pragma GCC unroll 4
    for (int64_t i = first; i < steps; ++i)
      std::memcpy(packet + (i * kLanes + lane + r) * size, keys + r * head_dim + i * size, size * sizeof(T));
}
// Puts a value of one kv head into its packet, at position `lane`.
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
static inline void put_keys(const uint16_t* keys, int64_t count, const Problem<int8_t>& p, int64_t lane,
                            int8_t* packet) {
  const int64_t head_dim = p.head_dim;
  for (int64_t r = 0; r < count; ++r, ++lane, keys += head_dim) {
    int8_t codes[kMaxHeadDim];
    put_scale(quantize_row(keys, head_dim, codes), head_dim, lane, packet);
#pragma GCC unroll 4
    for (int64_t d = 0; d < head_dim; ++d) packet[d * kLanes + lane] = codes[d];
  }
}
static inline void put_value(const uint16_t* value, const Problem<int8_t>& p, int64_t lane, int8_t* packet) {
  int8_t codes[kMaxHeadDim] = {};
  put_scale(quantize_row(value, p.head_dim, codes), p.padded_dim, lane, packet);
  int8_t* values = packet + lane / 2 * 2 * p.padded_dim + lane % 2 * kLanes;
  for (int64_t d = 0; d < p.padded_dim; d += kLanes) std::memcpy(values + 2 * d, codes + d, kLanes);
}

// Neighbouring heads of rows that go through the same norm: queries or keys of one kv head.
template <class T>
struct HeadRows {
  const T* from;          // the first row's first head
  T* to;                  // where its result goes, perhaps to the same place
  int64_t stride, width;  // elements from row to row of `from` and of `to`
  int64_t count;          // heads of a row
  const T* norm;          // or null
};

// Writes the norms' factors of up to kLanes heads: side by side, since each is a long chain of operations.
template <class T>
FD_INLINE void find_factors(const Head<T>* heads, int64_t count, int64_t head_dim, float eps, float* factors) {
  F16 squares[kLanes];
  for (F16& sum : squares) sum = zero();
  for (int64_t i = 0; i < count; ++i) squares[i] = sum_squares(heads[i].from, head_dim);
  if (count <= kWorthCombining) {  // quotients and roots of single numbers take half the time
    for (int64_t i = 0; i < count; ++i) factors[i] = norm_factor(sum_lanes(squares[i]), head_dim, eps);
    return;
  }
  store(factors, norm_factors(sum_lanes_of_each(squares, static_cast<int>(count)), head_dim, eps));
}

// Normalises and rotates up to kLanes heads, of which heads[i] belongs to row places[i] of the call.
template <class T>
void rotate_some(const RotaryView& rotary, int64_t head_dim, const T* norm, const Head<T>* heads, const int64_t* places,
                 int64_t count) {
  constexpr int64_t size = Neighbours<T>::kSize;
  const bool is_whole = !rotary.interleaved && rotary.rotary_dim % (2 * size) == 0 && head_dim % size == 0;
  float factors[kLanes];
  if (norm != nullptr) find_factors(heads, count, head_dim, rotary.eps, factors);
  for (int64_t i = 0, end; i < count; i = end) {
    for (end = i + 1; end < count && places[end] == places[i]; ++end) {
    }
    if (is_whole)
      rotate_heads<T>(rotary, places[i], norm, head_dim, end - i, heads + i, factors + i);
    else
      for (int64_t h = i; h < end; ++h) rotate_any_head(rotary, places[h], norm, head_dim, heads[h], factors[h]);
  }
}

// Normalises and rotates heads of `num_rows` rows, of which the first is row `first_row` of the call.
template <class T>
void rotate_rows(const RotaryView& rotary, int64_t head_dim, int64_t first_row, int64_t num_rows,
                 const HeadRows<T>& rows) {
  Head<T> heads[kLanes];
  int64_t places[kLanes], count = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t h = 0; h < rows.count; ++h) {
      heads[count] = {rows.from + row * rows.stride + h * head_dim, rows.to + row * rows.width + h * head_dim};
      places[count++] = first_row + row;
      const bool is_last = row + 1 == num_rows && h + 1 == rows.count;
      if (count < kLanes && !is_last) continue;
      rotate_some(rotary, head_dim, rows.norm, heads, places, count);
      count = 0;
    }
  }
}

// Normalises and rotates the queries of rows [first, end) that meet one kv head, to `to` [rows][heads][head_dim] or,
// where that is null, in place.
template <class T>
void rotate_queries(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head, Row<T>* to) {
  const RotaryView& rotary = p.a.rotary;
  Row<T>* from = p.query_of(first, kv_head);
  const int64_t width = p.heads_per_kv * p.head_dim;
  rotate_rows<Row<T>>(rotary, p.head_dim, first, end - first,
                      {from, to == nullptr ? from : to, p.row_size, to == nullptr ? p.row_size : width, p.heads_per_kv,
                       static_cast<const Row<T>*>(rotary.q_norm)});
}

// Takes the keys and values of new rows [first, end), up to kLanes, of one kv head to the cache; keys are normalised
// and rotated first, where there is a rotation.
template <class T>
void take_strip(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  const RotaryView& rotary = p.a.rotary;
  alignas(64) Row<T> keys[kLanes * kMaxHeadDim];
  for (int64_t row = first; row < end; ++row) {
    fetch_head(p.new_key(row, kv_head), p.head_dim);
    fetch_head(p.new_value(row, kv_head), p.head_dim);
  }
  if (rotary.cos_sin != nullptr) {
    rotate_rows<Row<T>>(
        rotary, p.head_dim, first, end - first,
        {p.new_key(first, kv_head), keys, p.row_size, p.head_dim, 1, static_cast<const Row<T>*>(rotary.k_norm)});
  } else {
    for (int64_t row = first; row < end; ++row)
      std::memcpy(keys + (row - first) * p.head_dim, p.new_key(row, kv_head),
                  static_cast<size_t>(p.head_dim) * sizeof(Row<T>));
  }
  for (int64_t row = first, next; row < end; row = next) {
    const int64_t slot = p.a.slot_mapping[row], block = slot / p.block_size, offset = slot % p.block_size;
    for (next = row + 1; next < end && p.a.slot_mapping[next] == slot + next - row; ++next)
      if ((slot + next - row) % kLanes == 0) break;
    put_keys(keys + (row - first) * p.head_dim, next - row, p, offset % kLanes, p.key_packet(block, kv_head, offset));
    T* values = p.value_packet(block, kv_head, offset);
    for (int64_t r = row; r < next; ++r) put_value(p.new_value(r, kv_head), p, offset % kLanes + r - row, values);
  }
}

// The same for any number of rows.
template <class T>
void take_rows(const Problem<T>& p, int64_t first, int64_t end, int64_t kv_head) {
  for (; first < end; first += kLanes) take_strip(p, first, first + kLanes < end ? first + kLanes : end, kv_head);
}

}  // namespace FD_ISA
}  // namespace fd
