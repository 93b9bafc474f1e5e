// SPDX-License-Identifier: Apache-2.0
// How the partial results of attention tasks become the outputs of rows. If several tasks compute a query tile, the
// last one to end merges their results in the order of splits.
#pragma once

#include "common/scratch.h"
#include "cpu_ops/attention_plan.h"
#include "cpu_ops/attention_state.h"

namespace fd {
namespace FD_ISA {

constexpr float kMaskedScore = -__FLT_MAX__;  // its softmax weight is 0

// The states and outputs of the rows of a task for one KV head, at most kMaxRows.
template <class Out, int64_t kMaxRows>
struct TaskStates {
  int64_t count = 0;
  bool merges = true;         // splits are merged into the state of the splits before them at once
  float* states[kMaxRows];    // the state of split 0
  int64_t strides[kMaxRows];  // floats to the state of the next split; 0 if they are merged
  Out* outs[kMaxRows];
};

template <class Out>
void write_output(const AttentionState& state, float inverse_sum, int64_t size, Out* out) {
  const FP32Vec16 factor = splat(inverse_sum);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store_rounded(out + d, mul(load(state.values() + d), factor));
  if (d < size) store_first(out + d, mul(load(state.values() + d), factor), static_cast<int>(size - d));
}

// The results of all tasks of a call. `Problem` says where rows are: limit_of(seq, i) is the last position that query
// row i of a sequence attends to, output_of(seq, i, kv_head) its output of value_dim() elements, stored as `Out`.
template <class Problem>
class TaskResults {
 public:
  using Out = typename Problem::Out;

  TaskResults(const Problem& problem, const AttentionPlan& plan, int64_t kv_heads)
      : p_(problem), plan_(plan), kv_heads_(kv_heads), state_size_(state_size(problem.padded_value_dim())) {
    const size_t count = static_cast<size_t>(plan.num_query_tiles * kv_heads);
    const size_t counters = (2 * count * sizeof(int32_t) + 63) / 64 * 64;
    const size_t partials = static_cast<size_t>(plan.num_partials * state_size_) * sizeof(float);
    char* scratch = static_cast<char*>(thread_scratch(counters + partials));
    pending_ = reinterpret_cast<int32_t*>(scratch);
    merged_ = pending_ + count;
    partials_ = reinterpret_cast<float*>(scratch + counters);
    for (size_t i = 0; i < count; ++i) {
      pending_[i] = static_cast<int32_t>(plan.query_tiles[i / static_cast<size_t>(kv_heads)].num_tasks);
      merged_[i] = 0;
    }
  }

  int64_t state_floats() const { return state_size_; }
  const QueryTile& query_tile_at(int64_t index) const { return plan_.query_tiles[plan_.members[index]]; }

  // Returns whether the splits of a task that starts now can be merged into those before them at once.
  bool can_merge(const Task& task, int64_t kv_head) const {
    bool can = true;
    for (int64_t m = task.begin; m < task.end; ++m)
      can &= __atomic_load_n(merged(plan_.members[m], kv_head), __ATOMIC_ACQUIRE) == task.first_split;
    return can;
  }

  // Places the state of row i of a query tile, which is row `at` of the task. `own` is memory for the state of a row
  // that no other task computes.
  template <class States>
  void place(const QueryTile& query_tile, int64_t kv_head, int64_t i, float* own, int64_t at, States& rows) const {
    rows.states[at] = query_tile.num_tasks == 1 ? own : partial(query_tile, kv_head, 0, i);
    rows.strides[at] = rows.merges ? 0 : query_tile.count * state_size_;
  }

  // Writes the outputs of a task's rows, or leaves their states to the last task of their query tile.
  template <class States>
  void finish(const Task& task, int64_t kv_head, const States& rows) const {
    if (query_tile_at(task.begin).num_tasks == 1) {
      for (int64_t r = 0; r < rows.count; r += kLanes)
        write_rows(rows, r, r + kLanes < rows.count ? r + kLanes : rows.count);
      return;
    }
    for (int64_t m = task.begin; m < task.end; ++m) {
      const int64_t query_tile = plan_.members[m];
      if (rows.merges)
        __atomic_store_n(merged(query_tile, kv_head), static_cast<int32_t>(task.last_split), __ATOMIC_RELEASE);
      if (__atomic_sub_fetch(pending(query_tile, kv_head), 1, __ATOMIC_ACQ_REL) == 0) merge(query_tile, kv_head);
    }
  }

 private:
  // Number of tasks of a query tile that have not ended.
  int32_t* pending(int64_t query_tile, int64_t kv_head) const { return pending_ + query_tile * kv_heads_ + kv_head; }
  // Number of splits of a query tile that are merged into its first state. Only the task that starts with split 0
  // merges.
  int32_t* merged(int64_t query_tile, int64_t kv_head) const { return merged_ + query_tile * kv_heads_ + kv_head; }
  float* partial(const QueryTile& query_tile, int64_t kv_head, int64_t split, int64_t row) const {
    return partials_ +
           (query_tile.partials + (kv_head * query_tile.num_splits + split) * query_tile.count + row) * state_size_;
  }

  // Writes the outputs of rows [first, end), at most kLanes rows.
  template <class States>
  void write_rows(const States& rows, int64_t first, int64_t end) const {
    const auto state = [&](int64_t r) { return AttentionState{rows.states[r], p_.padded_value_dim()}; };
    float inverse_sums[kLanes];
    for (float& sum : inverse_sums) sum = 1;
    for (int64_t r = first; r < end; ++r) inverse_sums[r - first] = state(r).sum();
    store(inverse_sums, div(splat(1.0f), load(inverse_sums)));
    for (int64_t r = first; r < end; ++r) write_output(state(r), inverse_sums[r - first], p_.value_dim(), rows.outs[r]);
  }

  // Merges the remaining splits of a query tile into its first states and writes the outputs.
  void merge(int64_t index, int64_t kv_head) const {
    const QueryTile& query_tile = plan_.query_tiles[index];
    const int64_t split = *merged(index, kv_head);
    for (int64_t first = 0; first < query_tile.count; first += kLanes)
      merge_rows(query_tile, kv_head, split, first,
                 first + kLanes < query_tile.count ? first + kLanes : query_tile.count);
  }

  void merge_rows(const QueryTile& query_tile, int64_t kv_head, int64_t next_split, int64_t first, int64_t end) const {
    const auto state = [&](int64_t split, int64_t r) {
      return AttentionState{partial(query_tile, kv_head, split, first + r), p_.padded_value_dim()};
    };
    const int64_t count = end - first;
    int64_t last[kLanes];
    float maxima[kLanes] = {}, sums[kLanes] = {}, rescale_old[kLanes], rescale_new[kLanes];
    for (int64_t r = 0; r < count; ++r) {
      last[r] = p_.limit_of(query_tile.seq, query_tile.first + first + r) / kSplit;
      maxima[r] = state(0, r).maximum();
      sums[r] = state(0, r).sum();
    }
    FP32Vec16 maximum = load(maxima), total = load(sums), old_factors, new_factors;
    for (int64_t split = next_split; split <= last[count - 1]; ++split) {
      for (int64_t r = 0; r < count; ++r) {
        maxima[r] = split <= last[r] ? state(split, r).maximum() : kMaskedScore;
        sums[r] = split <= last[r] ? state(split, r).sum() : 0.0f;
      }
      merge_sums(maximum, total, load(maxima), load(sums), old_factors, new_factors);
      store(rescale_old, old_factors);
      store(rescale_new, new_factors);
      for (int64_t r = 0; r < count; ++r)
        if (split <= last[r]) merge_values(state(0, r), state(split, r), rescale_old[r], rescale_new[r]);
    }
    store(sums, div(splat(1.0f), total));
    for (int64_t r = 0; r < count; ++r)
      write_output(state(0, r), sums[r], p_.value_dim(),
                   p_.output_of(query_tile.seq, query_tile.first + first + r, kv_head));
  }

  const Problem& p_;
  const AttentionPlan& plan_;
  int64_t kv_heads_, state_size_;
  int32_t *pending_, *merged_;
  float* partials_;
};

}  // namespace FD_ISA
}  // namespace fd
