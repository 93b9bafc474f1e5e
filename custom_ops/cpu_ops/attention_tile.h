// SPDX-License-Identifier: Apache-2.0
// The arithmetic of attention: up to kColumnRows rows over one split. Scores, their maximum, weights relative to it,
// their sum and the weighted values; then one merge into what the row has so far. Which rows share the registers never
// shows.
#pragma once

#include <cstring>
#include <type_traits>

#include "cpu_ops/attention_plan.h"
#include "cpu_ops/attention_record.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kPackets = kSplit / kLanes;  // of sixteen positions
constexpr int64_t kMaxHeadDim = 256;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLowest = -__FLT_MAX__;  // a score that weighs nothing

// A cache holds bf16 or fp32 as rows do, or int8: codes that are widened, the same pairs of k, and a scale per
// position.
template <>
struct Step<int8_t> : Step<uint16_t> {
  FD_INLINE PairUnit load_panel(const int8_t* p) { return cached_unit(reinterpret_cast<const uint8_t*>(p)); }
};
template <class T>
constexpr bool kHasScales = std::is_same_v<T, int8_t>;
template <class T>
using Row = std::conditional_t<kHasScales<T>, uint16_t, T>;

template <class T>
constexpr int64_t kAhead = kHasScales<T> ? 12 : 8;  // packets that are fetched ahead

// The scales of a packet's positions, which follow its codes.
FD_INLINE F16 load_scales(const int8_t* packet, int64_t width) {
  float scales[kLanes];
  std::memcpy(scales, packet + width * kLanes, sizeof(scales));
  return load(scales);
}

// A split of one sequence and KV head: its packets of keys, then its packets of values.
template <class T>
struct Split {
  int64_t start, visible, num_packets;  // visible: positions that some row of the task sees
  bool is_written_first;                // its last packets take new rows before any is read
  const T* stream[2 * kPackets];

  const T* const* keys() const { return stream; }
  const T* const* values() const { return stream + num_packets; }
  int64_t num_visible_packets() const { return (visible + kLanes - 1) / kLanes; }
  // The packets in the order in which they are needed, 0 <= i < 2 * num_packets.
  const T* needed(int64_t i) const {
    if (!is_written_first) return stream[i];
    if (i < 2) return stream[(i + 1) * num_packets - 1];
    return stream[i <= num_packets ? i - 2 : i - 1];
  }
  // Looks at the positions of the sequence before `end` only.
  void see(int64_t end) { visible = end - start < kSplit ? end - start : kSplit; }
};

// Elements from one query to the next: a constant is an offset that instructions hold.
template <class T>
constexpr int64_t kQuerySteps = kMaxHeadDim / Step<T>::kSize;

// Rows that share the registers.
template <class T>
struct Group {
  int64_t rows;
  int64_t hides_first;          // so many positions, the first ones, are seen by their own rows only
  const Element<T>* queries;    // kQuerySteps<T> each
  int64_t limits[kColumnRows];  // the last position that a row sees
  Record records[kColumnRows];
  const T* ahead[2 * kPackets];  // what is fetched while the packets of the stream are read
};

// Panels that MR rows take at a time: enough sums to hide the latency of an addition, few enough for the registers.
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

// Elements from the weights of one row to those of the next: they take the place of its scores.
template <class T>
constexpr int64_t kRowSteps = kSplit * sizeof(float) / sizeof(Element<T>);

// Vectors that hold a number for each row, lane by lane, and how many lanes of vector v that takes.
template <int MR>
constexpr int kRowVectors = (MR + kLanes - 1) / kLanes;
constexpr int lanes_of(int rows, int v) { return rows - v * kLanes < kLanes ? rows - v * kLanes : kLanes; }

// What a group makes of a split on the way.
template <int MR, class T>
struct Work {
  alignas(64) float scores[MR][kSplit];
  Element<T>* weights() { return reinterpret_cast<Element<T>*>(scores); }
  const Element<T>* weights() const { return reinterpret_cast<const Element<T>*>(scores); }
  bool touched[MR];  // whether the row sees anything of the split
  static constexpr int kSums = kRowVectors<MR> * kLanes;
  float maximum[kSums], sum[kSums], keep[kSums], take[kSums];
};

// Loops over sums are unrolled everywhere, or the sums would live in memory.
template <int MR, int NV>
FD_INLINE void clear(F16 (&acc)[MR][NV]) {
#pragma GCC unroll 24
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  }
}

template <int MR, int NV, class T>
FD_INLINE void score_packets(const Group<T>& g, const Split<T>& s, int64_t packet, int64_t head_dim, float scale,
                             Work<MR, T>& work) {
  constexpr int64_t size = Step<T>::kSize;
  F16 acc[MR][NV];
  const T *panels[NV], *ahead[NV];
  for (int v = 0; v < NV; ++v) {
    panels[v] = s.keys()[packet + v];
    ahead[v] = g.ahead[packet + v];
  }
  clear(acc);
  dot_block<MR, NV>(acc, g.queries, kQuerySteps<T>, 1, panels, kStepSize<T>, head_dim / size, ahead);
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) {
    F16 factor = splat(scale);
    if constexpr (kHasScales<T>) factor = mul(factor, load_scales(panels[v], head_dim));
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) store(work.scores[r] + (packet + v) * kLanes, mul(acc[r][v], factor));
  }
}

// scores = queries . keys, times scale
template <int MR, class T>
void score(const Group<T>& g, const Split<T>& s, int64_t head_dim, float scale, Work<MR, T>& work) {
  const int64_t num_packets = s.num_visible_packets();
  int64_t packet = 0;
  for (; packet + kKeyPanels<MR> <= num_packets; packet += kKeyPanels<MR>)
    score_packets<MR, kKeyPanels<MR>>(g, s, packet, head_dim, scale, work);
  for (; packet < num_packets; ++packet) score_packets<MR, 1>(g, s, packet, head_dim, scale, work);
}

// The largest of a row's first `visible` scores, lane by lane.
FD_INLINE F16 largest(const float* scores, int64_t visible) {
  const int64_t whole = visible / kLanes;
  const int rest = static_cast<int>(visible % kLanes);
  F16 top = splat(kMinusInfinity);
  for (int64_t i = 0; i < whole; ++i) top = max(top, load(scores + i * kLanes));
  return rest > 0 ? max(top, keep_first(load(scores + whole * kLanes), rest, kMinusInfinity)) : top;
}

// Turns a row's first `visible` scores into weights relative to `maximum` and returns their sum, in lanes; the others
// up to those of the split weigh 0. Where values have scales, weights are stored times those. Meanwhile a piece of what
// is read next is fetched.
template <class T>
FD_INLINE F16 weigh_row(const float* scores, float maximum, int64_t visible, const Split<T>& s, int64_t padded_dim,
                        Element<T>* weights, const T* ahead) {
  constexpr int64_t packet = kLanes / Step<T>::kSize;
  const int64_t whole = visible / kLanes;
  const int rest = static_cast<int>(visible % kLanes);
  const F16 top = splat(maximum);
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  const auto weigh = [&](int64_t i, int lanes, F16& sum) {
    __builtin_prefetch(ahead + i * kLine<T>, 0, 2);
    F16 weight = power_of_two(sub(load(scores + i * kLanes), top)), scaled = weight;
    if constexpr (kHasScales<T>) scaled = mul(weight, load_scales(s.values()[i], padded_dim));
    if (lanes < kLanes) {
      weight = keep_first(weight, lanes, 0.0f);
      scaled = keep_first(scaled, lanes, 0.0f);
    }
    store_elements(weights + i * packet, scaled);
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
  for (i = whole + (rest > 0); i < s.num_visible_packets(); ++i) store_elements(weights + i * packet, zero());
  return add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

template <int MR, class T>
void weigh(const Group<T>& g, const Split<T>& s, Work<MR, T>& work) {
  int64_t visible[MR];
  F16 rows[kRowVectors<MR>][kLanes];
  for (auto& vector : rows)
    for (F16& row : vector) row = zero();
  for (int r = 0; r < MR; ++r) {
    const int64_t left = g.limits[r] + 1 - s.start;
    visible[r] = left < 0 ? 0 : left < kSplit ? left : kSplit;
    work.touched[r] = left > 0;
    if (left <= 0) continue;
    const int64_t hidden = (g.hides_first < g.limits[r] ? g.hides_first : g.limits[r]) - s.start;
    for (int64_t i = 0; i < hidden; ++i) work.scores[r][i] = kLowest;
    rows[r / kLanes][r % kLanes] = largest(work.scores[r], visible[r]);
  }
  for (int v = 0; v < kRowVectors<MR>; ++v)
    store(work.maximum + v * kLanes, max_lane_of_each(rows[v], lanes_of(MR, v)));
  for (int r = 0; r < MR; ++r) {
    const T* ahead = g.ahead[s.num_packets] + r % 4 * kPackets * kLine<T>;
    Element<T>* weights = work.weights() + r * kRowSteps<T>;
    rows[r / kLanes][r % kLanes] =
        weigh_row(work.scores[r], work.maximum[r], visible[r], s, g.records[0].size, weights, ahead);
  }
  for (int v = 0; v < kRowVectors<MR>; ++v) store(work.sum + v * kLanes, sum_lanes_of_each(rows[v], lanes_of(MR, v)));
}

// Sets the maxima and sums of fresh records, or merges into those of records that hold earlier splits.
template <int MR, class T>
void keep_sums(const Group<T>& g, bool fresh, Work<MR, T>& work) {
  if (!fresh) {
    float maximum[Work<MR, T>::kSums] = {}, sum[Work<MR, T>::kSums] = {};
    for (int r = 0; r < MR; ++r) {
      maximum[r] = g.records[r].maximum();
      sum[r] = g.records[r].sum();
    }
    for (int first = 0; first < MR; first += kLanes) {
      F16 top = load(maximum + first), total = load(sum + first), keep, take;
      merge_sums(top, total, load(work.maximum + first), load(work.sum + first), keep, take);
      store(work.maximum + first, top);
      store(work.sum + first, total);
      store(work.keep + first, keep);
      store(work.take + first, take);
    }
  }
  for (int r = 0; r < MR; ++r) {
    if (!work.touched[r]) continue;
    g.records[r].maximum() = work.maximum[r];
    g.records[r].sum() = work.sum[r];
  }
}

// acc[r][v] += weights[r] x values over `steps` steps of positions, for NV neighbouring panels of the head.
template <int MR, int NV, class T>
FD_INLINE void add_steps(const Element<T>* weights, const T* values, const T* ahead, int64_t row_size, int64_t steps,
                         F16 (&acc)[MR][NV]) {
  for (int64_t step = 0; step < steps; ++step, ++weights, values += row_size, ahead += row_size) {
    typename Step<T>::Panel panel[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      if (v % kLineSteps<T> == 0) __builtin_prefetch(ahead + v * kStepSize<T>, 0, 2);
      panel[v] = Step<T>::load_panel(values + v * kStepSize<T>);
    }
#pragma GCC unroll 24
    for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = Step<T>::dot(acc[r][v], weights[r * kRowSteps<T>], panel[v]);
    }
  }
}

// The same over all visible positions, for the panels from `column` on.
template <int MR, int NV, class T>
FD_INLINE void add_values(const Split<T>& s, const T* const* ahead, const Element<T>* weights, int64_t padded_dim,
                          int64_t column, F16 (&acc)[MR][NV]) {
  constexpr int64_t size = Step<T>::kSize;
  const int64_t row_size = padded_dim * size, first = column * size;
  for (int64_t i = 0; i * kLanes < s.visible; ++i) {
    const int64_t left = s.visible - i * kLanes, count = left < kLanes ? left : kLanes;
    const int64_t steps = (kHasScales<T> ? count + size - 1 : count) / size;  // codes are finite whatever they are
    const T* values = s.values()[i] + first;
    const Element<T>* packet = weights + i * kLanes / size;
    add_steps<MR, NV>(packet, values, ahead[i] + first, row_size, steps, acc);
    if (steps * size >= count) continue;
    alignas(64) T last[NV * kStepSize<T>];  // half a pair: the other half may hold anything and is replaced by zeros
    for (int64_t lane = 0; lane < NV * kLanes; ++lane) {
      last[lane * size] = values[steps * row_size + lane * size];
      last[lane * size + size - 1] = 0;
    }
    add_steps<MR, NV>(packet + steps, last, last, 0, 1, acc);
  }
}

// The weighted values of rows [first, first + MR) of the group go to their records.
template <int MR, int NV, int kRows, class T>
void value_columns(const Group<T>& g, const Split<T>& s, const Work<kRows, T>& work, int first, int64_t column,
                   bool fresh) {
  const int64_t padded_dim = g.records[0].size;
  F16 acc[MR][NV];
  clear(acc);
  add_values<MR, NV>(s, g.ahead + s.num_packets, work.weights() + first * kRowSteps<T>, padded_dim, column, acc);
#pragma GCC unroll 24
  for (int r = 0; r < MR; ++r) {
    if (!work.touched[first + r]) continue;
    float* values = g.records[first + r].values() + column;
    if (fresh) {
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) store(values + v * kLanes, acc[r][v]);
      continue;
    }
    const F16 keep = splat(work.keep[first + r]), take = splat(work.take[first + r]);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      store(values + v * kLanes, merge_values(load(values + v * kLanes), acc[r][v], keep, take));
  }
}

template <int MR, int kRows, class T>
void value_rows(const Group<T>& g, const Split<T>& s, const Work<kRows, T>& work, int first, bool fresh) {
  const int64_t padded_dim = g.records[0].size;
  int64_t column = 0;
  for (; column + kValuePanels<MR> * kLanes <= padded_dim; column += kValuePanels<MR> * kLanes)
    value_columns<MR, kValuePanels<MR>>(g, s, work, first, column, fresh);
  for (; column < padded_dim; column += kLanes) value_columns<MR, 1>(g, s, work, first, column, fresh);
}

// Whether values that one row of the group sees and another does not may be NaN or infinite: a weight of zero would not
// hide them from the row that must not see them.
template <class T>
bool may_hide_non_finite(const Group<T>& g, const Split<T>& s) {
  constexpr int64_t size = Step<T>::kSize;
  const int64_t padded_dim = g.records[0].size, hidden = g.limits[0] + 1 - s.start;
  const Element<T> none = {};
  F16 zeros = zero();
  for (int64_t step = (hidden < 0 ? 0 : hidden) / size; step * size < s.visible; ++step) {
    const T* values = s.values()[step * size / kLanes] + step * size % kLanes * padded_dim;
    F16 own = zero();  // of each step: sums that wait for one another would take most of the time
    for (int64_t at = 0; at < padded_dim * size; at += kStepSize<T>)
      own = Step<T>::dot(own, none, Step<T>::load_panel(values + at));
    zeros = add(zeros, own);
  }
  return !(sum_lanes(zeros) == 0.0f);
}

// Codes are finite, and scales of positions that a row does not see never reach its weights.
FD_INLINE bool may_hide_non_finite(const Group<int8_t>&, const Split<int8_t>&) { return false; }

// Adds one split to the records of a group, or begins them with it. Limits rise within a group, unless all of its rows
// see the whole split.
template <int MR, class T>
void attend_group(const Group<T>& g, const Split<T>& split, int64_t head_dim, float scale, bool fresh) {
  Split<T> s = split;
  s.see(g.limits[MR - 1] + 1);
  if (s.visible <= 0) return;
  Work<MR, T> work;
  score<MR>(g, s, head_dim, scale, work);
  weigh<MR>(g, s, work);
  keep_sums<MR>(g, fresh, work);
  if (MR == 1 || !may_hide_non_finite(g, s)) return value_rows<MR>(g, s, work, 0, fresh);
  for (int r = 0; r < MR; ++r) {  // each row by itself, up to its own limit
    s.see(g.limits[r] + 1);
    value_rows<1>(g, s, work, r, fresh);
  }
}

}  // namespace FD_ISA
}  // namespace fd
