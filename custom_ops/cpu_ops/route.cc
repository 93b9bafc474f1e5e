// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts. Logits are fp32 sums over the inputs in order, one fused step each, for any
// number of rows; of equal scores the lower id is chosen.
#include <limits>
#include <utility>

#include "common/scratch.h"
#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/norm.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
#if defined(FD_ISA_AVX512)
constexpr int kGateRows = 8, kGatePanels = 2;  // whose sums fit the registers
#else
constexpr int kGateRows = 2, kGatePanels = 2;
#endif
constexpr int64_t kGatePrefetchInputs = 32;
constexpr int64_t kNormRows = 4;  // that norm_rows processes together

FD_INLINE float widen(float x) { return x; }
FD_INLINE float widen(uint16_t x) { return bf16_to_float(x); }

FD_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct Logits {
  float* data;
  int64_t stride;  // whole panels
};

// Multiplies MR rows, starting at `row`, by NV panels of the gate.
template <int MR, int NV, class T, class Weight>
void gate_block(const RouteArgs& a, int64_t row, int64_t panel, const Logits& logits) {
  const T* x = static_cast<const T*>(a.normed) + row * a.width;
  const Weight* gate = static_cast<const Weight*>(a.gate) + panel * a.width * kPanel;
  FP32Vec16 sums[MR][NV];
  for (auto& of_row : sums)
    for (FP32Vec16& sum : of_row) sum = zero();
  for (int64_t i = 0; i < a.width; ++i) {
    FP32Vec16 w[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const Weight* at = gate + (v * a.width + i) * kPanel;
      __builtin_prefetch(at + kGatePrefetchInputs * kPanel);
      w[v] = load_as_float(at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const FP32Vec16 value = splat(widen(x[r * a.width + i]));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = fma(value, w[v], sums[r][v]);
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store(logits.data + (row + r) * logits.stride + (panel + v) * kPanel, sums[r][v]);
}

template <class T, class Weight, int... kLess>
FD_INLINE void dispatch_gate_block(std::integer_sequence<int, kLess...>, int64_t height, int64_t width,
                                   const RouteArgs& a, int64_t row, int64_t panel, const Logits& logits) {
  using GateBlock = void (*)(const RouteArgs&, int64_t, int64_t, const Logits&);
  constexpr GateBlock blocks[][kGatePanels] = {
      {gate_block<kLess + 1, 1, T, Weight>, gate_block<kLess + 1, kGatePanels, T, Weight>}...};
  blocks[height - 1][width - 1](a, row, panel, logits);
}

// Replaces the logits of a row by scores; those of padding become the lowest value.
void compute_scores(const RouteArgs& a, float* row, int64_t stride) {
  for (int64_t e = a.num_experts; e < stride; ++e) row[e] = kLowest;
  if (a.rule.scoring == Scoring::kSigmoid) {
    for (int64_t e = 0; e < stride; e += kLanes)
      store(row + e, div(splat(1.0f), add(splat(1.0f), exp(sub(zero(), load(row + e))))));
    return;
  }
  FP32Vec16 largest = load(row);
  for (int64_t e = kLanes; e < stride; e += kLanes) largest = max(largest, load(row + e));
  const FP32Vec16 subtracted = splat(reduce_max(largest));
  FP32Vec16 total = zero();
  for (int64_t e = 0; e < stride; e += kLanes) {
    const FP32Vec16 power = exp(sub(load(row + e), subtracted));
    total = add(total, power);
    store(row + e, power);
  }
  const FP32Vec16 sum = splat(reduce_sum(total));
  for (int64_t e = 0; e < stride; e += kLanes) store(row + e, div(load(row + e), sum));
}

// Returns whether a value is chosen before one of lower index; NaN comes last.
FD_INLINE bool exceeds(float a, float b) { return a > b || (b != b && a == a); }

// Writes the `count` largest of `values`, by descending value and ascending index, to `chosen`.
void choose_largest(const float* values, int64_t size, int64_t count, int32_t* chosen) {
  for (int64_t i = 0; i < size; ++i) {
    int64_t place = smaller(i, count);
    if (place == count && !exceeds(values[i], values[chosen[--place]])) continue;
    for (; place > 0 && exceeds(values[i], values[chosen[place - 1]]); --place) chosen[place] = chosen[place - 1];
    chosen[place] = static_cast<int32_t>(i);
  }
}

float score_group(const float* choice, int64_t size, GroupScore score) {
  float first = kLowest, second = kLowest;
  for (int64_t e = 0; e < size; ++e) {
    if (choice[e] > first) {
      second = first;
      first = choice[e];
    } else if (choice[e] > second) {
      second = choice[e];
    }
  }
  return score == GroupScore::kLargest ? first : first + second;
}

// Gives the experts of all groups but the best ones the lowest value.
void keep_best_groups(const RouterRule& rule, int64_t num_experts, float* choice) {
  float scores[kMaxExperts];
  int32_t kept[kMaxExperts];
  bool is_kept[kMaxExperts] = {};
  const int64_t size = num_experts / rule.num_groups;
  for (int64_t g = 0; g < rule.num_groups; ++g) scores[g] = score_group(choice + g * size, size, rule.group_score);
  choose_largest(scores, rule.num_groups, rule.num_kept_groups, kept);
  for (int64_t i = 0; i < rule.num_kept_groups; ++i) is_kept[kept[i]] = true;
  for (int64_t e = 0; e < num_experts; ++e)
    if (!is_kept[e / size]) choice[e] = kLowest;
}

// Chooses the experts of one row by its scores; writes their ids in ascending order and their weights.
void choose_experts(const RouteArgs& a, const float* scores, int32_t* ids, float* weights) {
  const RouterRule& rule = a.rule;
  float choice[kMaxExperts];
  for (int64_t e = 0; e < a.num_experts; ++e)
    choice[e] = a.correction_bias == nullptr ? scores[e] : scores[e] + a.correction_bias[e];
  if (rule.num_groups > 1) keep_best_groups(rule, a.num_experts, choice);
  choose_largest(choice, a.num_experts, rule.num_chosen, ids);
  for (int64_t i = 1; i < rule.num_chosen; ++i)
    for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; --j) std::swap(ids[j], ids[j - 1]);
  float total = 0.0f;
  for (int64_t i = 0; i < rule.num_chosen; ++i) total = total + scores[ids[i]];
  const float divisor = rule.normalisation == Normalisation::kNone    ? 1.0f
                        : rule.normalisation == Normalisation::kClamp ? (total < rule.epsilon ? rule.epsilon : total)
                                                                      : total + rule.epsilon;
  for (int64_t i = 0; i < rule.num_chosen; ++i) weights[i] = scores[ids[i]] / divisor * rule.scale;
}

// Lists the entries of each expert.
void list_entries(const RouteArgs& a) {
  const int64_t num_entries = a.rows * a.rule.num_chosen;
  int32_t next[kMaxExperts] = {};
  for (int64_t i = 0; i < num_entries; ++i) ++next[a.ids[i]];
  a.load[0] = a.load[1] = 0;
  a.starts[0] = 0;
  for (int64_t e = 0; e < a.num_experts; ++e) {
    const int32_t count = next[e];
    a.load[0] += count > 0;
    a.load[1] = count > a.load[1] ? count : a.load[1];
    next[e] = a.starts[e];
    a.starts[e + 1] = a.starts[e] + count;
  }
  for (int64_t i = 0; i < num_entries; ++i) a.entries[next[a.ids[i]]++] = static_cast<int32_t>(i);
}

template <class T, class Weight>
void route_typed(const RouteArgs& a) {
  const int64_t panels = (a.num_experts + kPanel - 1) / kPanel, stride = panels * kPanel;
  const Logits logits{static_cast<float*>(thread_scratch(static_cast<size_t>(a.rows * stride) * 4)), stride};
  parallel_for((a.rows + kNormRows - 1) / kNormRows, a.rows * a.width >= kMinParallelNormElements, [&](int64_t block) {
    const int64_t row = block * kNormRows, at = row * a.width;
    norm_rows(static_cast<const T*>(a.hidden) + at, a.width, static_cast<const T*>(a.norm),
              static_cast<T*>(a.normed) + at, smaller(kNormRows, a.rows - row), a.width, a.eps);
  });
  const int64_t groups = (panels + kGatePanels - 1) / kGatePanels, row_blocks = (a.rows + kGateRows - 1) / kGateRows;
  const bool parallel = a.rows * stride * a.width >= kMinParallelProducts;
  parallel_for(groups * row_blocks, parallel, [&](int64_t index) {
    const int64_t row = index % row_blocks * kGateRows, panel = index / row_blocks * kGatePanels;
    dispatch_gate_block<T, Weight>(std::make_integer_sequence<int, kGateRows>(), smaller(kGateRows, a.rows - row),
                                   smaller(kGatePanels, panels - panel), a, row, panel, logits);
  });
  parallel_for(a.rows, a.rows * stride * a.rule.num_chosen >= kMinParallelIds, [&](int64_t row) {
    float* scores = logits.data + row * stride;
    compute_scores(a, scores, stride);
    choose_experts(a, scores, a.ids + row * a.rule.num_chosen, a.weights + row * a.rule.num_chosen);
  });
  list_entries(a);
}

template <class T>
void route_rows(const RouteArgs& a) {
  a.gate_dtype == DType::kBfloat16 ? route_typed<T, uint16_t>(a) : route_typed<T, float>(a);
}

}  // namespace

void route(const RouteArgs& a) { a.dtype == DType::kBfloat16 ? route_rows<uint16_t>(a) : route_rows<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
