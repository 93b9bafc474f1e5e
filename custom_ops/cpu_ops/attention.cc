// SPDX-License-Identifier: Apache-2.0
// Attention over a paged cache for any mix of rows. The arithmetic of one row is fixed by absolute positions: chunks of
// 64 positions inside splits of 1024, an online softmax over the chunks of a split, splits merged in order. Rows that
// share a task, threads and neighbours decide only who computes what.
#include <cstring>

#include "common/scratch.h"
#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/families.h"
#include "cpu_ops/rotary.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kChunk = 64;  // positions of one step of the online softmax
constexpr int64_t kChunkPanels = kChunk / kLanes;
constexpr int64_t kSplit = 1024;  // positions of one partial result
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMinParallelWork = 1 << 15;  // multiply-adds below which waking a thread costs more than it saves
constexpr float kMinusInfinity = -__builtin_inff();

// The softmax state of up to kMaxRows rows over some positions: maximum, sum and weighted values.
struct Partial {
  float maximum[kMaxRows];
  float sum[kMaxRows];
  alignas(64) float values[kMaxRows][kMaxHeadDim];
};

FD_INLINE float exp_one(float x) {
  float lanes[kLanes];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

// A typed view of the arguments.
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

  T* key_head(int64_t block, int64_t kv_head) const {
    return static_cast<T*>(a.cache.key) + block * a.cache.key_block() + kv_head * block_size * head_dim;
  }
  T* value_head(int64_t block, int64_t kv_head) const {
    return static_cast<T*>(a.cache.value) + block * a.cache.value_block() + kv_head * block_size * padded_dim;
  }
  int64_t num_new(int64_t seq) const { return a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]; }
  int64_t num_groups(int64_t seq) const { return (num_new(seq) * heads_per_kv + kMaxRows - 1) / kMaxRows; }
  int64_t num_splits(int64_t seq) const { return (a.kv_lens[seq] + kSplit - 1) / kSplit; }
};

// Up to kMaxRows (row, query head) pairs of one sequence and kv head; `limits` are the last positions that they see.
template <class T>
struct Group {
  int64_t seq, kv_head, rows;
  int64_t limits[kMaxRows];
  int64_t out_offsets[kMaxRows];
  alignas(64) T queries[kMaxRows * kMaxHeadDim];

  Group(const Problem<T>& p, int64_t seq_, int64_t kv_head_, int64_t group) : seq(seq_), kv_head(kv_head_) {
    const int64_t folded = p.num_new(seq) * p.heads_per_kv, first = group * kMaxRows;
    rows = folded - first < kMaxRows ? folded - first : kMaxRows;
    const T* qkv = static_cast<const T*>(p.a.qkv);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t new_row = (first + r) / p.heads_per_kv;
      const int64_t head = kv_head * p.heads_per_kv + (first + r) % p.heads_per_kv;
      const int64_t row = p.a.cu_seqlens_q[seq] + new_row;
      limits[r] = p.a.kv_lens[seq] - p.num_new(seq) + new_row;
      out_offsets[r] = (row * p.a.num_heads + head) * p.head_dim;
      std::memcpy(queries + r * p.head_dim, qkv + row * p.row_size + head * p.head_dim,
                  static_cast<size_t>(p.head_dim) * sizeof(T));
    }
  }
  int64_t last_limit() const { return limits[rows - 1]; }
  int64_t num_splits() const { return last_limit() / kSplit + 1; }
};

// One chunk: where its packets of 16 positions lie, and how many positions anybody in the group sees.
template <class T>
struct Chunk {
  int64_t start, visible, num_packets;
  const T* keys[kChunkPanels];
  const T* values[kChunkPanels];

  // Looks at the first `positions` positions of the chunk, as far as it has so many.
  void see(int64_t positions) {
    visible = positions < 0 ? 0 : positions < kChunk ? positions : kChunk;
    num_packets = (visible + kLanes - 1) / kLanes;
  }

  Chunk(const Problem<T>& p, const Group<T>& g, int64_t start_) : start(start_) {
    see(g.last_limit() + 1 - start);
    const int32_t* table = p.a.block_tables + g.seq * p.a.max_blocks;
    for (int64_t i = 0; i < kChunkPanels; ++i) {
      if (i >= num_packets) {  // nobody looks at these: any readable address does
        keys[i] = keys[0];
        values[i] = values[0];
        continue;
      }
      const int64_t position = start + i * kLanes, block = table[position / p.block_size];
      const int64_t offset = position % p.block_size;
      keys[i] = p.key_head(block, g.kv_head) + offset * p.head_dim;
      values[i] = p.value_head(block, g.kv_head) + offset * p.padded_dim;
    }
  }
};

// scores[r] = queries[r] . keys, 64 per row; meanwhile the keys of the chunk after it are fetched.
template <int MR, class T>
void score_chunk(const Problem<T>& p, const Group<T>& g, const Chunk<T>& c, const Chunk<T>& after,
                 float (&scores)[MR][kChunk]) {
  constexpr int64_t size = Step<T>::kSize;
  for (int64_t first = 0; first < c.num_packets; first += kMaxPanels) {
    F16 acc[MR][kMaxPanels];
    const T *panels[kMaxPanels], *ahead[kMaxPanels];
    for (int v = 0; v < kMaxPanels; ++v) {
      panels[v] = c.keys[first + v];
      ahead[v] = after.keys[first + v];
    }
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kMaxPanels; ++v) acc[r][v] = zero();
    dot_block<MR, kMaxPanels, true>(acc, g.queries, p.head_dim, size, panels, kStepSize<T>, p.head_dim / size, ahead);
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kMaxPanels; ++v) store(scores[r] + (first + v) * kLanes, acc[r][v]);
  }
}

// Scales one row's scores, hides those from `visible` on and raises `maximum`; returns by how much it rose, negated.
FD_INLINE float mask_row(float* scores, int64_t visible, float scale, float& maximum) {
  F16 top = splat(kMinusInfinity);
  for (int v = 0; v < kChunkPanels; ++v) {
    const int64_t left = visible - v * kLanes;
    const int kept = static_cast<int>(left < 0 ? 0 : left < kLanes ? left : kLanes);
    const F16 s = keep_first(mul(load(scores + v * kLanes), splat(scale)), kept, kMinusInfinity);
    store(scores + v * kLanes, s);
    top = max(top, s);
  }
  const float chunk_maximum = max_lane(top), before = maximum;
  maximum = before > chunk_maximum ? before : chunk_maximum;
  return before - maximum;
}

// Turns masked scores into weights relative to the row's maximum and adds them to its sum.
template <class T>
FD_INLINE F16 weigh_row(const float* scores, float maximum, float factor, F16 sum, T* weights) {
  F16 w[kChunkPanels];
  for (int v = 0; v < kChunkPanels; ++v) {
    w[v] = exp(sub(load(scores + v * kLanes), splat(maximum)));
    store_rounded(weights + v * kLanes, w[v]);
  }
  return fma(sum, splat(factor), add(add(w[0], w[1]), add(w[2], w[3])));
}

// Weights of all rows of a chunk; factors[r] is what row r's earlier values are worth under its new maximum. A row that
// sees nothing of the chunk has weights of zero and is not `touched`.
template <int MR, class T>
FD_INLINE void weigh_chunk(const Group<T>& g, int64_t start, float scale, bool hides_first,
                           float (&scores)[MR][kChunk], Partial& state, F16 (&sums)[MR], T* weights,
                           float (&factors)[kLanes], bool (&touched)[MR]) {
  float rises[kLanes] = {};
  for (int r = 0; r < MR; ++r) {
    const int64_t visible = g.limits[r] + 1 - start;
    touched[r] = visible > 0;
    if (hides_first && start == 0 && visible > 1) scores[r][0] = kMinusInfinity;
    if (touched[r]) rises[r] = mask_row(scores[r], visible, scale, state.maximum[r]);
  }
  store(factors, exp(load(rises)));
  for (int r = 0; r < MR; ++r) {
    if (touched[r]) {
      sums[r] = weigh_row(scores[r], state.maximum[r], factors[r], sums[r], weights + r * kChunk);
    } else {
      std::memset(weights + r * kChunk, 0, kChunk * sizeof(T));
    }
  }
}

// acc += weights x values for NV panels of the head from column `column`, over the chunk's visible positions.
template <int MR, int NV, class T>
FD_INLINE void value_block(const Problem<T>& p, const Chunk<T>& c, const Chunk<T>& after, const T* weights,
                           int64_t column, F16 (&acc)[MR][NV]) {
  constexpr int64_t size = Step<T>::kSize;
  for (int64_t i = 0; i < c.num_packets; ++i) {
    const int64_t left = c.visible - i * kLanes, count = left < kLanes ? left : kLanes, steps = count / size;
    const T *panels[NV], *ahead[NV];
    for (int v = 0; v < NV; ++v) {
      panels[v] = c.values[i] + (column + v * kLanes) * size;
      ahead[v] = after.values[i] + (column + v * kLanes) * size;
    }
    dot_block<MR, NV, true>(acc, weights + i * kLanes, kChunk, size, panels, p.padded_dim * size, steps, ahead);
    if (steps * size == count) continue;
    alignas(64) T last[NV][kLanes * size];  // half a pair: the other half may hold anything and is replaced by zeros
    for (int v = 0; v < NV; ++v) {
      const T* pairs = panels[v] + steps * p.padded_dim * size;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        last[v][lane * size] = pairs[lane * size];
        last[v][lane * size + size - 1] = 0;
      }
      panels[v] = last[v];
    }
    dot_block<MR, NV, false>(acc, weights + i * kLanes + steps * size, kChunk, size, panels, 0, 1, panels);
  }
}

template <int MR, int NV, class T>
void add_values(const Problem<T>& p, const Chunk<T>& c, const Chunk<T>& after, const T* weights, const float* factors,
                const bool* touched, int64_t column, int64_t first, Partial& state) {
  F16 acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  value_block<MR, NV>(p, c, after, weights, column, acc);
  for (int r = 0; r < MR; ++r) {
    if (!touched[first + r]) continue;
    for (int v = 0; v < NV; ++v) {
      float* values = state.values[first + r] + column + v * kLanes;
      store(values, fma(load(values), splat(factors[first + r]), acc[r][v]));
    }
  }
}

// Adds the chunk's weighted values to the state of rows [first, first + MR) of the group.
template <int MR, class T>
void add_chunk(const Problem<T>& p, const Chunk<T>& c, const Chunk<T>& after, const T* weights, const float* factors,
               const bool* touched, int64_t first, Partial& state) {
  weights += first * kChunk;
  int64_t column = 0;
  for (; column + kMaxPanels * kLanes <= p.padded_dim; column += kMaxPanels * kLanes)
    add_values<MR, kMaxPanels>(p, c, after, weights, factors, touched, column, first, state);
  for (; column < p.padded_dim; column += kLanes)
    add_values<MR, 1>(p, c, after, weights, factors, touched, column, first, state);
}

// Whether the values at some position that one row of the group sees and another does not are NaN or infinite: a weight
// of zero would not hide them from the row that must not see them.
template <class T>
bool hides_non_finite(const Problem<T>& p, const Group<T>& g, const Chunk<T>& c) {
  constexpr int64_t size = Step<T>::kSize;
  int64_t position = g.limits[0] + 1 - c.start;
  for (position = position < 0 ? 0 : position; position < c.visible; ++position) {
    const int64_t offset = position % kLanes;
    const T* values = c.values[position / kLanes] + offset / size * size * p.padded_dim + offset % size;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      const float value = to_float(values[d * size]);
      if (!(value - value == 0.0f)) return true;
    }
  }
  return false;
}

// The softmax state of a group over one split.
template <int MR, class T>
void attend_split(const Problem<T>& p, const Group<T>& g, int64_t split, Partial& state) {
  F16 sums[MR];
  for (int r = 0; r < MR; ++r) {
    state.maximum[r] = kMinusInfinity;
    sums[r] = zero();
    std::memset(state.values[r], 0, static_cast<size_t>(p.padded_dim) * sizeof(float));
  }
  const int64_t seen = g.last_limit() + 1, end = (split + 1) * kSplit < seen ? (split + 1) * kSplit : seen;
  Chunk<T> c(p, g, split * kSplit);
  for (int64_t start = split * kSplit; start < end; start += kChunk) {
    const Chunk<T> after = start + kChunk < seen ? Chunk<T>(p, g, start + kChunk) : c;
    alignas(64) float scores[MR][kChunk];
    alignas(64) T weights[MR * kChunk];
    float factors[kLanes];
    bool touched[MR];
    score_chunk<MR>(p, g, c, after, scores);
    weigh_chunk<MR>(g, start, p.a.scale, p.a.hides_first, scores, state, sums, weights, factors, touched);
    if (MR == 1 || !hides_non_finite(p, g, c)) {
      add_chunk<MR>(p, c, after, weights, factors, touched, 0, state);
    } else {
      for (int r = 0; r < MR; ++r) {  // each row by itself, up to its own limit
        Chunk<T> own = c;
        own.see(g.limits[r] + 1 - start);
        add_chunk<1>(p, own, after, weights, factors, touched, r, state);
      }
    }
    c = after;
  }
  for (int r = 0; r < MR; ++r) state.sum[r] = sum_lanes(sums[r]);
}

template <class T>
void attend_split(const Problem<T>& p, const Group<T>& g, int64_t split, Partial& state) {
  with_rows(g.rows, [&](auto count) { attend_split<decltype(count)::value>(p, g, split, state); });
}

// total += next, for the rows that see something of `next` (which begins at position `start`).
template <class T>
void merge(const Problem<T>& p, const Group<T>& g, int64_t start, Partial& total, const Partial& next) {
  for (int64_t r = 0; r < g.rows; ++r) {
    if (g.limits[r] < start) continue;
    const float before = total.maximum[r], other = next.maximum[r], top = before > other ? before : other;
    const float keep = exp_one(before - top), take = exp_one(other - top);
    total.maximum[r] = top;
    const float kept_sum = total.sum[r] * keep, taken_sum = next.sum[r] * take;
    total.sum[r] = kept_sum + taken_sum;
    for (int64_t d = 0; d < p.padded_dim; d += kLanes) {
      const F16 kept = mul(load(total.values[r] + d), splat(keep));
      store(total.values[r] + d, fma(load(next.values[r] + d), splat(take), kept));
    }
  }
}

template <class T>
void write_out(const Problem<T>& p, const Group<T>& g, const Partial& total) {
  for (int64_t r = 0; r < g.rows; ++r) {
    T* out = static_cast<T*>(p.a.out) + g.out_offsets[r];
    const F16 sum = splat(total.sum[r]);
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim; d += kLanes) store_rounded(out + d, div(load(total.values[r] + d), sum));
    if (d < p.head_dim) store_first(out + d, div(load(total.values[r] + d), sum), static_cast<int>(p.head_dim - d));
  }
}

// Copies one new row's key and value of one kv head to its slot.
template <class T>
void write_slot(const Problem<T>& p, int64_t row, int64_t kv_head) {
  const int64_t slot = p.a.slot_mapping[row], block = slot / p.block_size, offset = slot % p.block_size;
  const T* key = static_cast<const T*>(p.a.qkv) + row * p.row_size + (p.a.num_heads + kv_head) * p.head_dim;
  const T* value = key + p.a.cache.num_kv_heads * p.head_dim;
  constexpr int64_t size = Step<T>::kSize;
  T* keys = p.key_head(block, kv_head) + offset / kLanes * kLanes * p.head_dim + offset % kLanes * size;
  for (int64_t i = 0; i < p.head_dim / size; ++i)
    std::memcpy(keys + i * kLanes * size, key + i * size, size * sizeof(T));
  T* values = p.value_head(block, kv_head) + offset / size * size * p.padded_dim + offset % size;
  for (int64_t d = 0; d < p.head_dim; ++d) values[d * size] = value[d];
}

// Rotates one new row's key of one kv head and the queries that it meets.
template <class T>
void rotate_group(const Problem<T>& p, int64_t row, int64_t kv_head) {
  const RotaryView& rotary = p.a.rotary;
  T* heads = static_cast<T*>(p.a.qkv) + row * p.row_size;
  rotate_heads(rotary, row, rotary.q_norm, heads + kv_head * p.heads_per_kv * p.head_dim, p.heads_per_kv, p.head_dim);
  rotate_heads(rotary, row, rotary.k_norm, heads + (p.a.num_heads + kv_head) * p.head_dim, 1, p.head_dim);
}

// Rotates the new rows, where there is a rotation, and writes their keys and values to the cache.
template <class T>
void take_rows(const Problem<T>& p) {
  const int64_t kv_heads = p.a.cache.num_kv_heads, strip = 64, strips = (p.a.rows + strip - 1) / strip;
  parallel_for(kv_heads * strips, p.a.rows * p.row_size >= 16384, [&](int64_t tile) {
    const int64_t first = tile / kv_heads * strip, end = first + strip < p.a.rows ? first + strip : p.a.rows;
    for (int64_t row = first; row < end; ++row) {
      if (p.a.rotary.cos_sin != nullptr) rotate_group(p, row, tile % kv_heads);
      write_slot(p, row, tile % kv_heads);
    }
  });
}

// Finds the sequence that a task belongs to: offsets[s] <= task < offsets[s + 1].
FD_INLINE int64_t sequence_of(const int64_t* offsets, int64_t num_seqs, int64_t task) {
  int64_t low = 0, high = num_seqs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (offsets[middle] <= task ? low : high) = middle;
  }
  return low;
}

// One task per group: its splits one after the other, merged on the way. Long groups come first.
template <class T>
void attend_groups(const Problem<T>& p, const int64_t* offsets, bool parallel) {
  const int64_t num_tasks = offsets[p.a.num_seqs];
  parallel_for(num_tasks, parallel, [&](int64_t tile) {
    const int64_t task = num_tasks - 1 - tile, seq = sequence_of(offsets, p.a.num_seqs, task);
    const int64_t local = task - offsets[seq], groups = p.num_groups(seq);
    const Group<T> g(p, seq, local / groups, local % groups);
    Partial total, next;
    attend_split(p, g, 0, total);
    for (int64_t split = 1; split < g.num_splits(); ++split) {
      attend_split(p, g, split, next);
      merge(p, g, split * kSplit, total, next);
    }
    write_out(p, g, total);
  });
}

// Few groups and a long context: one task per group and split, then the merges, in the same order as above.
template <class T>
void attend_splits(const Problem<T>& p, const int64_t* offsets, Partial* partials, int64_t max_splits) {
  const int64_t num_groups = offsets[p.a.num_seqs];
  auto group_of = [&](int64_t index) {
    const int64_t seq = sequence_of(offsets, p.a.num_seqs, index), local = index - offsets[seq];
    return Group<T>(p, seq, local / p.num_groups(seq), local % p.num_groups(seq));
  };
  parallel_for(num_groups * max_splits, true, [&](int64_t task) {
    const Group<T> g = group_of(task / max_splits);
    if (task % max_splits < g.num_splits()) attend_split(p, g, task % max_splits, partials[task]);
  });
  for (int64_t index = 0; index < num_groups; ++index) {
    const Group<T> g = group_of(index);
    Partial* parts = partials + index * max_splits;
    for (int64_t split = 1; split < g.num_splits(); ++split) merge(p, g, split * kSplit, parts[0], parts[split]);
    write_out(p, g, parts[0]);
  }
}

template <class T>
void append_attention_typed(const AttentionArgs& a) {
  const Problem<T> p(a);
  take_rows(p);
  int64_t num_groups = 0, max_splits = 1, work = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    num_groups += p.num_groups(seq) * a.cache.num_kv_heads;
    if (p.num_splits(seq) > max_splits) max_splits = p.num_splits(seq);
    work += p.num_new(seq) * a.kv_lens[seq] * a.num_heads * p.head_dim;
  }
  const bool by_split = max_splits > 1 && num_groups < 4 * num_threads();
  const size_t header = static_cast<size_t>(a.num_seqs + 8) / 8 * 64;
  char* scratch =
      static_cast<char*>(thread_scratch(header + (by_split ? num_groups * max_splits * sizeof(Partial) : 0)));
  int64_t* offsets = reinterpret_cast<int64_t*>(scratch);
  offsets[0] = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq)
    offsets[seq + 1] = offsets[seq] + p.num_groups(seq) * a.cache.num_kv_heads;
  by_split ? attend_splits(p, offsets, reinterpret_cast<Partial*>(scratch + header), max_splits)
           : attend_groups(p, offsets, work >= kMinParallelWork);
}

}  // namespace

void append_attention(const AttentionArgs& a) {
  a.cache.dtype == DType::kBfloat16 ? append_attention_typed<uint16_t>(a) : append_attention_typed<float>(a);
}

}  // namespace FD_ISA
}  // namespace fd
