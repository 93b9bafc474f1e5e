// SPDX-License-Identifier: Apache-2.0
// The arithmetic of attention for up to kColumnRows rows over one split: scores, their maximum, softmax weights, their
// sum and the weighted values, which are then merged into the state of the row. Results do not depend on which rows
// share a group.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu_ops/attention_results.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kTilesPerSplit = kSplit / kLanes;  // a KV tile holds sixteen positions of one KV head
constexpr int64_t kMaxHeadDim = 256;
constexpr float kMinusInfinity = -__builtin_inff();

// A cache has the dtype of the rows, or int8 for bf16 rows: codes, which are widened to pairs, and a scale per
// position.
template <>
struct KUnit<int8_t> : KUnit<uint16_t> {
  FD_INLINE WeightPair load_weights(const int8_t* p) { return load_cached_pair(reinterpret_cast<const uint8_t*>(p)); }
};
template <class T>
constexpr bool kHasScales = std::is_same_v<T, int8_t>;
template <class T>
using Activation = std::conditional_t<kHasScales<T>, uint16_t, T>;

template <class T>
constexpr int64_t kPrefetchTiles = kHasScales<T> ? 12 : 8;  // prefetch distance in KV tiles

// Loads the scales of the positions of a KV tile, which follow its codes.
FD_INLINE FP32Vec16 load_scales(const int8_t* tile, int64_t width) {
  float scales[kLanes];
  std::memcpy(scales, tile + width * kLanes, sizeof(scales));
  return load(scales);
}

// A split of one sequence and KV head: its tiles of keys, then its tiles of values.
template <class T>
struct Split {
  int64_t start, visible, num_tiles;  // visible: positions that some row of the task attends to
  bool writes_last_tiles;             // new rows are written to its last tiles before any tile is read
  const T* stream[2 * kTilesPerSplit];

  const T* const* keys() const { return stream; }
  const T* const* values() const { return stream + num_tiles; }
  int64_t num_visible_tiles() const { return (visible + kLanes - 1) / kLanes; }
  // Returns the i-th tile in the order in which tiles are accessed, 0 <= i < 2 * num_tiles.
  const T* in_read_order(int64_t i) const {
    if (!writes_last_tiles) return stream[i];
    if (i < 2) return stream[(i + 1) * num_tiles - 1];
    return stream[i <= num_tiles ? i - 2 : i - 1];
  }
  // Limits the split to positions of the sequence before `end`.
  void limit_to(int64_t end) { visible = end - start < kSplit ? end - start : kSplit; }
};

// Row units from one query to the next: a constant, so that it becomes an immediate offset of instructions.
template <class T>
constexpr int64_t kQueryStride = kMaxHeadDim / KUnit<T>::kSize;

// Rows whose accumulators share the registers.
template <class T>
struct RowGroup {
  int64_t rows;
  int64_t num_masked_prefix;          // leading positions that are masked for every row but their own
  const RowUnit<T>* queries;          // kQueryStride<T> each
  int64_t last_visible[kColumnRows];  // the last position that a row attends to
  AttentionState states[kColumnRows];
  const T* prefetched[2 * kTilesPerSplit];  // tiles to prefetch while the tiles of the stream are read
};

// Panels that MR rows multiply at a time: enough sums to hide the latency of an addition, few enough for the registers.
#if defined(FD_ISA_AVX512)
constexpr int key_panels(int rows) {
  if (rows <= 6) return 4;
  return rows <= 12 ? 2 : 1;
}
template <int MR>
constexpr int kKeyPanels = key_panels(MR);
template <int MR>
constexpr int kValuePanels = MR <= 3 ? 8 : kKeyPanels<MR>;
#else
template <int MR>
constexpr int kKeyPanels = kColumnRows / MR;
template <int MR>
constexpr int kValuePanels = kColumnRows / MR;
#endif

// Row units from the softmax weights of one row to those of the next; weights overwrite the scores.
template <class T>
constexpr int64_t kWeightStride = kSplit * sizeof(float) / sizeof(RowUnit<T>);

// Vectors that hold one number per row in their lanes, and the used lanes of vector v.
template <int MR>
constexpr int kRowVectors = (MR + kLanes - 1) / kLanes;
constexpr int lanes_of(int rows, int v) { return rows - v * kLanes < kLanes ? rows - v * kLanes : kLanes; }

// Intermediate results of a group for one split.
template <int MR, class T>
struct GroupScratch {
  alignas(64) float scores[MR][kSplit];
  RowUnit<T>* weights() { return reinterpret_cast<RowUnit<T>*>(scores); }
  const RowUnit<T>* weights() const { return reinterpret_cast<const RowUnit<T>*>(scores); }
  bool is_active[MR];  // whether the row attends to any position of the split
  static constexpr int kPaddedRows = kRowVectors<MR> * kLanes;
  float maximum[kPaddedRows], sum[kPaddedRows], rescale_old[kPaddedRows], rescale_new[kPaddedRows];
};

// All loops over accumulators are unrolled; otherwise the compiler would keep them in memory.
template <int MR, int NV>
FD_INLINE void clear(FP32Vec16 (&acc)[MR][NV]) {
#pragma GCC unroll 24
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  }
}

template <int MR, int NV, class T>
FD_INLINE void score_tiles(const RowGroup<T>& g, const Split<T>& s, int64_t tile, int64_t head_dim, float scale,
                           GroupScratch<MR, T>& work) {
  constexpr int64_t size = KUnit<T>::kSize;
  FP32Vec16 acc[MR][NV];
  const T *panels[NV], *prefetched[NV];
  for (int v = 0; v < NV; ++v) {
    panels[v] = s.keys()[tile + v];
    prefetched[v] = g.prefetched[tile + v];
  }
  clear(acc);
  dot_block<MR, NV>(acc, g.queries, kQueryStride<T>, 1, panels, kUnitSize<T>, head_dim / size, prefetched);
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    FP32Vec16 factor = splat(scale);
    if constexpr (kHasScales<T>) factor = mul(factor, load_scales(panels[v], head_dim));
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) store(work.scores[r] + (tile + v) * kLanes, mul(acc[r][v], factor));
  }
}

// Computes scores = scale * queries . keys.
template <int MR, class T>
void compute_scores(const RowGroup<T>& g, const Split<T>& s, int64_t head_dim, float scale, GroupScratch<MR, T>& work) {
  const int64_t num_tiles = s.num_visible_tiles();
  int64_t tile = 0;
  for (; tile + kKeyPanels<MR> <= num_tiles; tile += kKeyPanels<MR>)
    score_tiles<MR, kKeyPanels<MR>>(g, s, tile, head_dim, scale, work);
  for (; tile < num_tiles; ++tile) score_tiles<MR, 1>(g, s, tile, head_dim, scale, work);
}

// Returns the maximum of the first `visible` scores of a row, lane by lane.
FD_INLINE FP32Vec16 visible_max(const float* scores, int64_t visible) {
  const int64_t whole = visible / kLanes;
  const int rest = static_cast<int>(visible % kLanes);
  FP32Vec16 maximum = splat(kMinusInfinity);
  for (int64_t i = 0; i < whole; ++i) maximum = max(maximum, load(scores + i * kLanes));
  return rest > 0 ? max(maximum, replace_tail(load(scores + whole * kLanes), rest, kMinusInfinity)) : maximum;
}

// Converts the first `visible` scores of a row to softmax weights relative to `maximum` and returns their sum in lanes.
// The weights of the remaining positions of the split are 0. If values have scales, weights are stored times these
// scales. Meanwhile it prefetches the lines at `prefetched`.
template <class T>
FD_INLINE FP32Vec16 softmax_row(const float* scores, float maximum, int64_t visible, const Split<T>& s,
                                int64_t padded_dim, RowUnit<T>* weights, const T* prefetched) {
  constexpr int64_t tile = kLanes / KUnit<T>::kSize;
  const int64_t whole = visible / kLanes;
  const int rest = static_cast<int>(visible % kLanes);
  const FP32Vec16 row_maximum = splat(maximum);
  FP32Vec16 sums[4] = {zero(), zero(), zero(), zero()};
  const auto weigh = [&](int64_t i, int lanes, FP32Vec16& sum) {
    __builtin_prefetch(prefetched + i * kLineElements<T>, 0, 2);
    FP32Vec16 weight = power_of_two(sub(load(scores + i * kLanes), row_maximum)), scaled = weight;
    if constexpr (kHasScales<T>) scaled = mul(weight, load_scales(s.values()[i], padded_dim));
    if (lanes < kLanes) {
      weight = replace_tail(weight, lanes, 0.0f);
      scaled = replace_tail(scaled, lanes, 0.0f);
    }
    store_row_units(weights + i * tile, scaled);
    sum = add(sum, weight);
  };
  int64_t i = 0;
  for (; i + 4 <= whole; i += 4) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) weigh(i + j, kLanes, sums[j]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    if (i + j < whole) weigh(i + j, kLanes, sums[j]);
    if (i + j == whole && rest > 0) weigh(i + j, rest, sums[j]);
  }
  for (i = whole + (rest > 0); i < s.num_visible_tiles(); ++i) store_row_units(weights + i * tile, zero());
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

template <int MR, class T>
void softmax(const RowGroup<T>& g, const Split<T>& s, GroupScratch<MR, T>& work) {
  int64_t visible[MR];
  FP32Vec16 rows[kRowVectors<MR>][kLanes];
  for (auto& vector : rows)
    for (FP32Vec16& row : vector) row = zero();
  for (int r = 0; r < MR; ++r) {
    const int64_t left = g.last_visible[r] + 1 - s.start;
    visible[r] = left < 0 ? 0 : left < kSplit ? left : kSplit;
    work.is_active[r] = left > 0;
    if (left <= 0) continue;
    const int64_t hidden =
        (g.num_masked_prefix < g.last_visible[r] ? g.num_masked_prefix : g.last_visible[r]) - s.start;
    for (int64_t i = 0; i < hidden; ++i) work.scores[r][i] = kMaskedScore;
    rows[r / kLanes][r % kLanes] = visible_max(work.scores[r], visible[r]);
  }
  for (int v = 0; v < kRowVectors<MR>; ++v) store(work.maximum + v * kLanes, reduce_max_each(rows[v], lanes_of(MR, v)));
  for (int r = 0; r < MR; ++r) {
    const T* prefetched = g.prefetched[s.num_tiles] + r % 4 * kTilesPerSplit * kLineElements<T>;
    RowUnit<T>* weights = work.weights() + r * kWeightStride<T>;
    rows[r / kLanes][r % kLanes] =
        softmax_row(work.scores[r], work.maximum[r], visible[r], s, g.states[0].size, weights, prefetched);
  }
  for (int v = 0; v < kRowVectors<MR>; ++v) store(work.sum + v * kLanes, reduce_sum_each(rows[v], lanes_of(MR, v)));
}

// Writes the maxima and sums of a split to states; if it is not the first split, merges them into those of earlier
// splits.
template <int MR, class T>
void merge_row_sums(const RowGroup<T>& g, bool is_first, GroupScratch<MR, T>& work) {
  if (!is_first) {
    float maximum[GroupScratch<MR, T>::kPaddedRows] = {}, sum[GroupScratch<MR, T>::kPaddedRows] = {};
    for (int r = 0; r < MR; ++r) {
      maximum[r] = g.states[r].maximum();
      sum[r] = g.states[r].sum();
    }
    for (int first = 0; first < MR; first += kLanes) {
      FP32Vec16 largest = load(maximum + first), total = load(sum + first), rescale_old, rescale_new;
      merge_sums(largest, total, load(work.maximum + first), load(work.sum + first), rescale_old, rescale_new);
      store(work.maximum + first, largest);
      store(work.sum + first, total);
      store(work.rescale_old + first, rescale_old);
      store(work.rescale_new + first, rescale_new);
    }
  }
  for (int r = 0; r < MR; ++r) {
    if (!work.is_active[r]) continue;
    g.states[r].maximum() = work.maximum[r];
    g.states[r].sum() = work.sum[r];
  }
}

// acc[r][v] += weights[r] * values over `units` k units of positions, for NV neighbouring panels of the head.
template <int MR, int NV, class T>
FD_INLINE void accumulate_units(const RowUnit<T>* weights, const T* values, const T* prefetched, int64_t row_size,
                                int64_t units, FP32Vec16 (&acc)[MR][NV]) {
  for (int64_t unit = 0; unit < units; ++unit, ++weights, values += row_size, prefetched += row_size) {
    typename KUnit<T>::WeightUnit panel[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      if (v % kUnitsPerLine<T> == 0) __builtin_prefetch(prefetched + v * kUnitSize<T>, 0, 2);
      panel[v] = KUnit<T>::load_weights(values + v * kUnitSize<T>);
    }
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = KUnit<T>::dot(acc[r][v], weights[r * kWeightStride<T>], panel[v]);
    }
  }
}

// Does the same over all visible positions, for the panels from `column` on.
template <int MR, int NV, class T>
FD_INLINE void accumulate_tiles(const Split<T>& s, const T* const* prefetched, const RowUnit<T>* weights,
                                int64_t padded_dim, int64_t column, FP32Vec16 (&acc)[MR][NV]) {
  constexpr int64_t size = KUnit<T>::kSize;
  const int64_t row_size = padded_dim * size, first = column * size;
  for (int64_t i = 0; i * kLanes < s.visible; ++i) {
    const int64_t left = s.visible - i * kLanes, count = left < kLanes ? left : kLanes;
    const int64_t units = (kHasScales<T> ? count + size - 1 : count) / size;  // unused codes are finite
    const T* values = s.values()[i] + first;
    const RowUnit<T>* tile = weights + i * kLanes / size;
    accumulate_units<MR, NV>(tile, values, prefetched[i] + first, row_size, units, acc);
    if (units * size >= count) continue;
    alignas(64) T last[NV * kUnitSize<T>];  // the last position is half of a pair; zeros replace the other half
    for (int64_t lane = 0; lane < NV * kLanes; ++lane) {
      last[lane * size] = values[units * row_size + lane * size];
      last[lane * size + size - 1] = 0;
    }
    accumulate_units<MR, NV>(tile + units, last, last, 0, 1, acc);
  }
}

// Writes the weighted values of rows [first, first + MR) of the group to their states, or merges them.
template <int MR, int NV, int kRows, class T>
void accumulate_panels(const RowGroup<T>& g, const Split<T>& s, const GroupScratch<kRows, T>& work, int first,
                       int64_t column, bool is_first) {
  const int64_t padded_dim = g.states[0].size;
  FP32Vec16 acc[MR][NV];
  clear(acc);
  accumulate_tiles<MR, NV>(s, g.prefetched + s.num_tiles, work.weights() + first * kWeightStride<T>, padded_dim, column,
                           acc);
#pragma GCC unroll 24
  for (int r = 0; r < MR; ++r) {
    if (!work.is_active[first + r]) continue;
    float* values = g.states[first + r].values() + column;
    if (is_first) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(values + v * kLanes, acc[r][v]);
      continue;
    }
    const FP32Vec16 rescale_old = splat(work.rescale_old[first + r]), rescale_new = splat(work.rescale_new[first + r]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      store(values + v * kLanes, merge_values(load(values + v * kLanes), acc[r][v], rescale_old, rescale_new));
  }
}

template <int MR, int kRows, class T>
void accumulate_values(const RowGroup<T>& g, const Split<T>& s, const GroupScratch<kRows, T>& work, int first,
                       bool is_first) {
  const int64_t padded_dim = g.states[0].size;
  int64_t column = 0;
  for (; column + kValuePanels<MR> * kLanes <= padded_dim; column += kValuePanels<MR> * kLanes)
    accumulate_panels<MR, kValuePanels<MR>>(g, s, work, first, column, is_first);
  for (; column < padded_dim; column += kLanes) accumulate_panels<MR, 1>(g, s, work, first, column, is_first);
}

// Returns whether values that are visible to some rows of the group only may be NaN or infinite: a weight of zero does
// not mask them.
template <class T>
bool masks_non_finite(const RowGroup<T>& g, const Split<T>& s) {
  constexpr int64_t size = KUnit<T>::kSize;
  const int64_t padded_dim = g.states[0].size, hidden = g.last_visible[0] + 1 - s.start;
  const RowUnit<T> none = {};
  FP32Vec16 zeros = zero();
  for (int64_t unit = (hidden < 0 ? 0 : hidden) / size; unit * size < s.visible; ++unit) {
    const T* values = s.values()[unit * size / kLanes] + unit * size % kLanes * padded_dim;
    FP32Vec16 own = zero();  // per k unit, because one chain of dependent sums would be slow
    for (int64_t at = 0; at < padded_dim * size; at += kUnitSize<T>)
      own = KUnit<T>::dot(own, none, KUnit<T>::load_weights(values + at));
    zeros = add(zeros, own);
  }
  return !(reduce_sum(zeros) == 0.0f);
}

// Codes are finite, and a row's weights do not use the scales of masked positions.
FD_INLINE bool masks_non_finite(const RowGroup<int8_t>&, const Split<int8_t>&) { return false; }

// Adds one split to the states of a group. last_visible is ascending within a group, unless all rows attend to the
// whole split.
template <int MR, class T>
void attend_group(const RowGroup<T>& g, const Split<T>& split, int64_t head_dim, float scale, bool is_first) {
  Split<T> s = split;
  s.limit_to(g.last_visible[MR - 1] + 1);
  if (s.visible <= 0) return;
  GroupScratch<MR, T> work;
  compute_scores<MR>(g, s, head_dim, scale, work);
  softmax<MR>(g, s, work);
  merge_row_sums<MR>(g, is_first, work);
  if (MR == 1 || !masks_non_finite(g, s)) return accumulate_values<MR>(g, s, work, 0, is_first);
  for (int r = 0; r < MR; ++r) {  // one row at a time, up to its own last position
    s.limit_to(g.last_visible[r] + 1);
    accumulate_values<1>(g, s, work, r, is_first);
  }
}

}  // namespace FD_ISA
}  // namespace fd
