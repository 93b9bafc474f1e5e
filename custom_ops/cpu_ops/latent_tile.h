// SPDX-License-Identifier: Apache-2.0
// The arithmetic of latent attention for panels of sixteen query rows over one split. Scores have query rows in their
// lanes, so that the cached rows are read as they lie and the softmax needs no sum over lanes; weighted values have
// dimensions in their lanes. Results do not depend on which rows share a panel.
#pragma once

#include "cpu_ops/attention_results.h"
#include "cpu_ops/latent_rows.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kTilePositions = 16;  // positions whose rows are prepared and scored together
constexpr int64_t kTilesPerSplit = kSplit / kTilePositions;
constexpr int kBlockRows = kColumnRows < kLanes ? kColumnRows : kLanes;  // rows of a product
static_assert(kLanes % kBlockRows == 0, "a panel or tile is whole blocks");

// Row units from one position of a prepared tile to the next: a constant, so that it becomes an immediate offset, and
// an odd number of cache lines, so that the positions do not evict each other.
template <class T>
constexpr int64_t kTileStride =
    (kMaxLatentDim + kMaxRopeDim) / KUnit<T>::kSize + 64 / static_cast<int64_t>(sizeof(RowUnit<T>));

// Elements from one panel of values to the next, with a cache line between them for the same reason.
template <class T>
constexpr int64_t kValueStride = (kSplit / KUnit<T>::kSize + 1) * kUnitSize<T>;

// Memory of a task.
template <class T>
struct LatentScratch {
  float* states;      // of rows that no other task computes
  T* queries;         // [panels][k units][kLanes]
  T* values;          // [panels of dimensions] of kValueStride
  RowUnit<T>* units;  // [kTilePositions] of kTileStride
  float* scores;      // [panels][kSplit][kLanes], then softmax weights [panels][k units of positions][kLanes]
};
static_assert(sizeof(RowUnit<uint16_t>) <= 2 * sizeof(float), "weights fit the memory of scores");

// A panel of query rows. Their last positions ascend, unless all attend to every position.
struct LatentPanel {
  int64_t count;
  const int64_t* last_visible;  // [count], the last position that a row attends to
  AttentionState states[kLanes];
};

// Stores the row units of one position.
FD_INLINE void store_units(const float* row, int64_t width, float* units) {
  std::memcpy(units, row, static_cast<size_t>(width) * sizeof(float));
}
FD_INLINE void store_units(const uint16_t* row, int64_t width, RowPair* units) {
#if defined(FD_ISA_AVX512_BF16)
  std::memcpy(units, row, static_cast<size_t>(width) * sizeof(uint16_t));
#else
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store_row_units(units + d / 2, load_bf16(row + d));
  for (; d < width; d += 2) units[d / 2] = row_pair(row[d], row[d + 1]);
#endif
}

// Writes (first[0], second[0], first[1], ...) for sixteen elements each.
FD_INLINE void interleave_pairs(const uint16_t* first, const uint16_t* second, uint16_t* pairs) {
#if defined(FD_ISA_AVX512)
  const auto wide = [](const uint16_t* x) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  };
  _mm512_storeu_si512(pairs, _mm512_or_si512(wide(first), _mm512_slli_epi32(wide(second), 16)));
#else
  for (int i = 0; i < kLanes; ++i) pairs[2 * i] = first[i], pairs[2 * i + 1] = second[i];
#endif
}

// Stores the values of the positions of one k unit, `rows`, in every panel of dimensions.
FD_INLINE void store_values(const float* const* rows, int64_t padded_dim, float* values) {
  for (int64_t d = 0; d < padded_dim; d += kLanes, values += kValueStride<float>) store(values, load(rows[0] + d));
}
FD_INLINE void store_values(const uint16_t* const* rows, int64_t padded_dim, uint16_t* values) {
  for (int64_t d = 0; d < padded_dim; d += kLanes, values += kValueStride<uint16_t>)
    interleave_pairs(rows[0] + d, rows[1] + d, values);
}

// Prepares the sixteen rows of a tile, contiguous at `rows`, for scores and for weighted values. Values of positions
// from `visible` on, and from `certain` on if they are NaN, become zeros: some rows of the task do not attend to them,
// and a weight of zero would not mask them. The scores of rows that do attend to them are NaN.
template <class T>
void load_tile(const LatentProblem<T>& p, const T* rows, int64_t first, int64_t visible, int64_t certain,
               const LatentScratch<T>& scratch) {
  constexpr int64_t size = KUnit<T>::kSize;
  alignas(64) static const T zeros[kMaxLatentDim] = {};
  const T* values[kTilePositions];
  for (int64_t i = 0; i < kTilePositions; ++i) {
    const T* row = rows + i * p.width;
    store_units(row, p.width, scratch.units + i * kTileStride<T>);
    const bool is_hidden = first + i >= visible || (first + i >= certain && is_nan(*row));
    values[i] = is_hidden ? zeros : row;
  }
  for (int64_t i = 0; i < kTilePositions; i += size)
    store_values(values + i, p.padded_value_dim(), scratch.values + (first + i) / size * kUnitSize<T>);
}

// Computes the scores [kTilePositions][kLanes] of a tile with a panel of queries. Meanwhile as many bytes as the tile
// has are prefetched.
template <class T>
void score_tile(const RowUnit<T>* units, const T* queries, int64_t num_units, float scale, float* scores,
                const T* prefetched) {
  for (int64_t first = 0; first < kTilePositions; first += kBlockRows) {
    FP32Vec16 acc[kBlockRows][1];
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) acc[r][0] = zero();
    const T* const panels[1] = {queries};
    const T* const lines[1] = {first == 0 ? prefetched : queries};
    dot_block<kBlockRows, 1, T>(acc, units + first * kTileStride<T>, kTileStride<T>, 1, panels, kUnitSize<T>, num_units,
                                lines);
#pragma GCC unroll 16
    for (int r = 0; r < kBlockRows; ++r) store(scores + (first + r) * kLanes, mul(acc[r][0], splat(scale)));
  }
}

// Masks the scores of a panel at the positions that its rows do not attend to, up to position `end` of the split.
static inline void mask_scores(const LatentPanel& panel, int64_t start, int64_t end, int64_t num_masked_prefix,
                               float* scores) {
  for (int64_t r = 0; r < panel.count; ++r) {
    const int64_t own = panel.last_visible[r] - start;
    for (int64_t i = own < 0 ? 0 : own + 1; i < end; ++i) scores[i * kLanes + r] = kMaskedScore;
    const int64_t hidden = own < num_masked_prefix - start ? own : num_masked_prefix - start;
    for (int64_t i = 0; i < hidden; ++i) scores[i * kLanes + r] = kMaskedScore;
  }
}

// Stores the weights of the positions of one k unit.
FD_INLINE void store_weights(float* units, FP32Vec16 weight, FP32Vec16) { store(units, weight); }
FD_INLINE void store_weights(RowPair* units, FP32Vec16 first, FP32Vec16 second) {
#if defined(FD_ISA_AVX512_BF16)
  uint16_t lanes[2][kLanes];
  store_bf16(lanes[0], first);
  store_bf16(lanes[1], second);
  interleave_pairs(lanes[0], lanes[1], reinterpret_cast<uint16_t*>(units));
#else
  float lanes[2][kLanes];
  store(lanes[0], first);
  store(lanes[1], second);
  for (int i = 0; i < kLanes; ++i) units[i] = {lanes[0][i], lanes[1][i]};
#endif
}

// Converts the scores of a panel at positions [0, end), a multiple of kTilePositions, to softmax weights. Writes the
// maximum of each row and the sum of its weights.
template <class T>
void weigh_scores(int64_t end, float* scores, FP32Vec16& maximum, FP32Vec16& sum) {
  constexpr int64_t size = KUnit<T>::kSize;
  maximum = load(scores);
  for (int64_t i = 1; i < end; ++i) maximum = max(maximum, load(scores + i * kLanes));
  FP32Vec16 sums[4] = {zero(), zero(), zero(), zero()};
  RowUnit<T>* weights = reinterpret_cast<RowUnit<T>*>(scores);
  for (int64_t i = 0; i < end; i += 4) {
    FP32Vec16 weight[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      weight[j] = power_of_two(sub(load(scores + (i + j) * kLanes), maximum));
      sums[j] = add(sums[j], weight[j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j += static_cast<int>(size))
      store_weights(weights + (i + j) / size * kLanes, weight[j], weight[j + size - 1]);
  }
  sum = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

// How a split changes the states of the rows of a panel.
struct PanelMerge {
  bool is_first;           // there is nothing to merge with
  bool is_active[kLanes];  // whether a row attends to any position of the split
  float rescale_old[kLanes] = {}, rescale_new[kLanes] = {};
};

// Writes the maxima and sums of a split to the states, merged with those of earlier splits unless it is the first.
static inline void merge_panel_sums(const LatentPanel& panel, int64_t start, FP32Vec16 maximum, FP32Vec16 sum,
                                    PanelMerge& merge) {
  float maxima[kLanes] = {}, sums[kLanes] = {};
  for (int64_t r = 0; r < kLanes; ++r) merge.is_active[r] = r < panel.count && panel.last_visible[r] >= start;
  if (!merge.is_first) {
    for (int64_t r = 0; r < panel.count; ++r) {
      maxima[r] = panel.states[r].maximum();
      sums[r] = panel.states[r].sum();
    }
    FP32Vec16 largest = load(maxima), total = load(sums), old_factors, new_factors;
    merge_sums(largest, total, maximum, sum, old_factors, new_factors);
    store(merge.rescale_old, old_factors);
    store(merge.rescale_new, new_factors);
    maximum = largest, sum = total;
  }
  store(maxima, maximum);
  store(sums, sum);
  for (int64_t r = 0; r < panel.count; ++r) {
    if (!merge.is_active[r]) continue;
    panel.states[r].maximum() = maxima[r];
    panel.states[r].sum() = sums[r];
  }
}

// Adds the weighted values of a split to rows [first, first + MR) of a panel, for NV panels of dimensions from `column`
// on.
template <int MR, int NV, class T>
void add_values(const LatentPanel& panel, const PanelMerge& merge, const RowUnit<T>* weights, int64_t num_units,
                int64_t first, const T* values, int64_t column, const T* prefetched) {
  FP32Vec16 acc[MR][NV];
  const T *panels[NV], *lines[NV];
#pragma GCC unroll 16
  for (int v = 0; v < NV; ++v) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r][v] = zero();
    panels[v] = values + v * kValueStride<T>;
    lines[v] = v == 0 && prefetched != nullptr ? prefetched : panels[v];
  }
  dot_block<MR, NV, T>(acc, weights + first, 1, kLanes, panels, kUnitSize<T>, num_units, lines);
#pragma GCC unroll 16
  for (int r = 0; r < MR; ++r) {
    if (!merge.is_active[first + r]) continue;
    float* to = panel.states[first + r].values() + column;
    const FP32Vec16 rescale_old = splat(merge.rescale_old[first + r]),
                    rescale_new = splat(merge.rescale_new[first + r]);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v)
      store(to + v * kLanes,
            merge.is_first ? acc[r][v] : merge_values(load(to + v * kLanes), acc[r][v], rescale_old, rescale_new));
  }
}

}  // namespace FD_ISA
}  // namespace fd
