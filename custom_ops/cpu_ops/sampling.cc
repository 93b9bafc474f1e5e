// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/threads.h"
#include "cpu_ops/sampling_filters.h"
#include "cpu_ops/sampling_kernels.h"
#include "cpu_ops/sampling_parallel.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace {

constexpr int64_t kRandomRowCost = 8;     // time per id of a row with noise, relative to a greedy row
constexpr float kMinCheckedTopP = 0.25f;  // above it, sampling first and checking top_p is faster than the exact cutoff

struct Change {
  int32_t id;
  float before;
};

// Scratch memory of one thread, reused from call to call.
struct Scratch {
  std::vector<float> block_max, group_max;  // maxima of blocks, and of blocks of block maxima
  FilterScratch filters;
  std::vector<int32_t> counts;  // per id: 2 * occurrences in the output + (1 if in the history); zero between rows
  std::vector<int32_t> seen;
  std::vector<Change> changes;
  std::vector<float> masked;     // copy of a row with its mask applied; edits of single logits are undone instead
  std::vector<uint8_t> rejects;  // per row of a call: 1 if the token of the row is not its draft

  void fit(int64_t vocab_size) {
    if (static_cast<int64_t>(counts.size()) >= vocab_size) return;
    block_max.resize(num_blocks(vocab_size));
    group_max.resize(num_blocks(num_blocks(vocab_size)));
    filters.fit(vocab_size);
    counts.resize(vocab_size);
  }
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

// Edits single logits of a row and can undo the edits.
class RowEditor {
 public:
  RowEditor(float* logits, int64_t vocab_size, Scratch& s) : logits_(logits), vocab_size_(vocab_size), s_(s) {
    s_.changes.clear();
  }

  void apply(const RowParams& row, const SamplingInputs& in) {
    for (int64_t k = row.i[kBiasBegin]; k < row.i[kBiasEnd]; ++k) {
      const int32_t id = in.bias_ids[k];
      if (is_token_id(id, vocab_size_)) set(id, logits_[id] + in.bias_values[k]);
    }
    if (row.penalised()) penalise(row, in.history);
    for (int64_t k = row.i[kBannedBegin]; k < row.i[kBannedEnd]; ++k) {
      if (is_token_id(in.banned_ids[k], vocab_size_)) set(in.banned_ids[k], kMinusInfinity);
    }
  }

  void undo() {
    for (size_t k = s_.changes.size(); k-- > 0;) logits_[s_.changes[k].id] = s_.changes[k].before;
  }

 private:
  void set(int32_t id, float value) {
    s_.changes.push_back({id, logits_[id]});
    logits_[id] = value;
  }

  void penalise(const RowParams& row, const int32_t* history) {
    s_.seen.clear();
    for (int64_t k = row.i[kHistoryBegin]; k < row.i[kHistoryEnd]; ++k) {
      const int32_t id = history[k];
      if (!is_token_id(id, vocab_size_)) continue;
      if (s_.counts[id] == 0) s_.seen.push_back(id);
      s_.counts[id] = (s_.counts[id] | 1) + (k >= row.i[kOutputBegin] ? 2 : 0);
    }
    for (int32_t id : s_.seen) {
      const int32_t occurrences = s_.counts[id] >> 1;
      s_.counts[id] = 0;
      set(id, penalised_logit(logits_[id], row, occurrences));
    }
  }

  float* logits_;
  int64_t vocab_size_;
  Scratch& s_;
};

// Returns the lowest id that has the largest logit of the row.
int32_t first_id_of(const float* logits, int32_t num_ids, const float* block_max, float largest) {
  int32_t block = 0;
  while (block_max[block] != largest) ++block;
  for (int32_t id = block * kBlock;; ++id) {
    if (id >= num_ids || logits[id] == largest) return id;
  }
}

Cutoff apply_top_k(const RowParams& params, const Row& row, Scratch& s) {
  return params.has_top_k(row.num_ids) ? top_k_cutoff(params.i[kTopK], row, s.filters) : kAllFinite;
}

Cutoff apply_min_p(const RowParams& params, const Row& row, Cutoff cutoff) {
  return params.has_min_p() ? min_p_cutoff(params.f[kMinP], row, cutoff) : cutoff;
}

struct SampledToken {
  int32_t token_id;
  int32_t status;
  bool draft_is_allowed;
};

SampledToken sample_greedy(const RowParams& params, const Row& row) {
  const int32_t id = first_id_of(row.logits, row.num_ids, row.block_max, row.largest);
  return {id, kRowOk, params.i[kDraftId] == id};
}

// Returns whether the draft of the row is in the set allowed by the cutoff.
bool draft_is_allowed(const RowParams& params, const Row& row, Cutoff cutoff) {
  const int64_t draft = params.i[kDraftId];
  const float logit = draft >= 0 && draft < row.num_ids ? row.logits[draft] : kMinusInfinity;
  return draft_survives(params, row.num_ids, cutoff, logit / row.temperature);
}

// If the best of all ids is within top_p, it is the best of the ids within top_p. If not, the best id before it is
// tried.
SampledToken sample_then_check_top_p(const RowParams& params, const Row& row, Cutoff cutoff) {
  TopPPrefix prefix(params.f[kTopP], row, cutoff);
  cutoff = apply_min_p(params, row, cutoff);
  const bool draft_passes_cutoff = draft_is_allowed(params, row, cutoff);
  const auto best_of = [&](Cutoff allowed) {
    return parallel_gumbel_argmax(row, allowed, params.seed(), params.position());
  };
  int32_t id = best_of(cutoff);
  while (!prefix.contains(id)) id = best_of(cutoff_before(row.logits[id] / row.temperature, id));
  return {id, kRowOk, draft_passes_cutoff && prefix.contains(static_cast<int32_t>(params.i[kDraftId]))};
}

SampledToken sample_random(const RowParams& params, Row row, float* processed, Scratch& s) {
  row.temperature = params.f[kTemperature];
  row.largest /= row.temperature;
  if (status_of(row.largest) != kRowOk) return {-1, status_of(row.largest), false};
  for (int32_t b = 0; b < num_blocks(row.num_ids); ++b) s.block_max[b] /= row.temperature;
  Cutoff cutoff = apply_top_k(params, row, s);
  const float top_p = params.f[kTopP];
  if (params.has_top_p() && top_p >= kMinCheckedTopP && processed == nullptr)
    return sample_then_check_top_p(params, row, cutoff);
  if (params.has_top_p()) cutoff = top_p_cutoff(top_p, row, cutoff, s.filters);
  cutoff = apply_min_p(params, row, cutoff);
  const int32_t id = parallel_gumbel_argmax(row, cutoff, params.seed(), params.position());
  const SampledToken sampled = {id, kRowOk, draft_is_allowed(params, row, cutoff)};
  if (processed != nullptr) sampling_kernels().write_processed(row, cutoff, processed);
  return sampled;
}

// Does the same as parallel_block_maxima with precomputed maxima: it reads only the ids of a last, partial block.
float precomputed_block_maxima(const float* precomputed, const float* logits, int32_t num_ids, Scratch& s) {
  const int32_t whole = num_ids / kBlock, rest = num_ids % kBlock;
  std::copy_n(precomputed, whole, s.block_max.begin());
  if (rest > 0) {
    float& last = s.block_max[whole];
    last = sampling_kernels().block_maxima(logits + num_ids - rest, rest, s.group_max.data());
  }
  return sampling_kernels().block_maxima(s.block_max.data(), num_blocks(num_ids), s.group_max.data());
}

SampledToken sample_token(float* logits, int64_t vocab_size, const RowParams& params, const float* precomputed,
                          bool keep_processed, Scratch& s) {
  const int32_t num_ids = params.num_ids(vocab_size);
  const float largest = precomputed != nullptr ? precomputed_block_maxima(precomputed, logits, num_ids, s)
                                               : parallel_block_maxima(logits, num_ids, s.block_max.data());
  if (keep_processed) std::fill(logits + num_ids, logits + vocab_size, kMinusInfinity);
  if (status_of(largest) != kRowOk) return {-1, status_of(largest), false};
  const Row row = {logits, num_ids, s.block_max.data(), largest, 1.0f};
  return params.greedy() ? sample_greedy(params, row)
                         : sample_random(params, row, keep_processed ? logits : nullptr, s);
}

// Returns the logits that the filters read. If the row has a mask, they are masked in place or in the scratch memory.
float* masked_row(float* logits, int64_t vocab_size, const RowParams& params, const SamplingInputs& in, bool in_place,
                  Scratch& s) {
  if (!params.masked()) return logits;
  if (!in_place && static_cast<int64_t>(s.masked.size()) < vocab_size) s.masked.resize(vocab_size);
  float* out = in_place ? logits : s.masked.data();
  sampling_kernels().apply_mask(logits, in.mask_words + params.i[kMaskBegin], params.num_ids(vocab_size), out);
  return out;
}

// Returns the precomputed block maxima of a row; null if there are none or if the row is edited before it is filtered.
const float* precomputed_maxima_of(const SamplingInputs& in, int64_t row, int64_t vocab_size, const RowParams& params) {
  return in.block_maxima == nullptr || params.edits() ? nullptr : in.block_maxima + row * num_blocks(vocab_size);
}

// Returns whether the rows are enough work for several threads.
bool has_parallel_work(int64_t num_rows, int64_t vocab_size, const SamplingInputs& in) {
  int64_t cost = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowParams params = {in.float_params + row * kNumFloatParams, in.int_params + row * kNumIntParams};
    const int64_t read =
        precomputed_maxima_of(in, row, vocab_size, params) != nullptr ? num_blocks(vocab_size) : vocab_size;
    cost += params.greedy() ? read : kRandomRowCost * vocab_size;
  }
  return cost >= kMinParallelIds;
}

// Returns how many rows are sampled by one thread each. If the remaining rows would leave most threads idle, all
// threads sample them together, in parts of the vocabulary.
int64_t num_whole_rows(int64_t num_rows, int64_t vocab_size) {
  const int64_t threads = num_threads(), left = num_rows % threads;
  return num_rows < 2 * threads && 2 * left <= threads && vocab_size >= kMinParallelIds ? num_rows - left : num_rows;
}

// Which rows follow a rejected draft, as far as rows have been sampled. All threads may use it at the same time.
class Rejections {
 public:
  Rejections(const SamplingInputs& in, int64_t num_rows, std::vector<uint8_t>& rejects) : in_(in), rejects_(rejects) {
    rejects_.assign(static_cast<size_t>(num_rows), 0);
  }

  void record(int64_t row, int32_t token_id) {
    if (rejects(draft_of(row), token_id)) __atomic_store_n(&rejects_[row], 1, __ATOMIC_RELAXED);
  }

  // Returns whether an earlier row of the same request rejected its draft.
  bool has_earlier(int64_t row) const {
    return follows_rejection(
        row, [this](int64_t i) { return draft_of(i); },
        [this](int64_t i) { return __atomic_load_n(&rejects_[i], __ATOMIC_RELAXED) != 0; });
  }

 private:
  int64_t draft_of(int64_t row) const { return in_.int_params[row * kNumIntParams + kDraftId]; }

  const SamplingInputs& in_;
  std::vector<uint8_t>& rejects_;
};

// Returns "" or what is wrong with the range [begin, end) of a list with `size` entries.
std::string range_error(const char* list, int64_t begin, int64_t end, int64_t size, int64_t row) {
  if (0 <= begin && begin <= end && end <= size) return "";
  return std::string(list) + ": expected a range within " + std::to_string(size) + " entries, got [" +
         std::to_string(begin) + ", " + std::to_string(end) + ") at row " + std::to_string(row);
}

std::string mask_error(const RowParams& params, int64_t num_words, int64_t vocab_size, int64_t row) {
  if (!params.masked()) return "";
  const int64_t begin = params.i[kMaskBegin];
  return range_error("mask_words", begin, begin + (params.num_ids(vocab_size) + 31) / 32, num_words, row);
}

}  // namespace

std::string check_sampling_inputs(const SamplingInputs& in, int64_t num_rows, int64_t vocab_size) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t* p = in.int_params + row * kNumIntParams;
    const std::string wrong = range_error("history", p[kHistoryBegin], p[kHistoryEnd], in.num_history, row) +
                              range_error("bias_ids", p[kBiasBegin], p[kBiasEnd], in.num_bias, row) +
                              range_error("banned_ids", p[kBannedBegin], p[kBannedEnd], in.num_banned, row) +
                              mask_error({nullptr, p}, in.num_mask_words, vocab_size, row);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

void sample(float* logits, int64_t num_rows, int64_t vocab_size, const SamplingInputs& in, const SamplingOutputs& out,
            bool keep_processed, bool stop_at_rejections) {
  Rejections rejections(in, num_rows, scratch().rejects);
  const auto sample_row = [&](int64_t row) {
    if (stop_at_rejections && rejections.has_earlier(row)) return;
    Scratch& s = scratch();
    s.fit(vocab_size);
    float* x = logits + row * vocab_size;
    const RowParams params = {in.float_params + row * kNumFloatParams, in.int_params + row * kNumIntParams};
    RowEditor editor(x, vocab_size, s);
    editor.apply(params, in);
    x = masked_row(x, vocab_size, params, in, keep_processed, s);
    const float* precomputed = precomputed_maxima_of(in, row, vocab_size, params);
    const SampledToken sampled = sample_token(x, vocab_size, params, precomputed, keep_processed, s);
    if (!keep_processed) editor.undo();
    out.token_ids[row] = sampled.token_id;
    out.status[row] = sampled.status;
    out.draft_is_allowed[row] = sampled.draft_is_allowed ? 1 : 0;
    rejections.record(row, sampled.token_id);
  };
  const int64_t whole = num_whole_rows(num_rows, vocab_size);
  parallel_for(whole, has_parallel_work(whole, vocab_size, in), sample_row);
  for (int64_t row = whole; row < num_rows; ++row) sample_row(row);
  if (!stop_at_rejections) return;
  for (int64_t row = 0; row < num_rows; ++row) {  // another thread may have sampled some of them
    if (!rejections.has_earlier(row)) continue;
    out.token_ids[row] = -1;
    out.status[row] = kRowSkipped;
    out.draft_is_allowed[row] = 0;
  }
}

namespace {

// Sorts the keys of the top_n most probable ids to the front of s.keys; returns how many there are.
int32_t top_keys(const Row& row, int32_t top_n, FilterScratch& s) {
  const Cutoff everything = {kMinusInfinity, std::numeric_limits<int32_t>::max()};
  const float lowest = top_k_lower_bound(top_n, row, s);
  const int32_t count = sampling_kernels().gather_keys(row, everything, lowest, kPlusInfinity, 1, s.keys.data());
  const int32_t kept = std::min({count, top_n, row.num_ids});
  std::partial_sort(s.keys.begin(), s.keys.begin() + kept, s.keys.begin() + count);
  return kept;
}

void logprobs_of_row(const float* logits, int32_t vocab_size, int64_t i, int32_t chosen, int32_t top_n,
                     const LogprobOutputs& out) {
  Scratch& s = scratch();
  s.fit(vocab_size);
  const SamplingKernels& kernels = sampling_kernels();
  const float largest = parallel_block_maxima(logits, vocab_size, s.block_max.data());
  const Row row = {logits, vocab_size, s.block_max.data(), largest, 1.0f};
  const uint64_t total = largest < kPlusInfinity ? kernels.masses(row, kAllFinite, {}).total : 0;
  const float log_total = log_positive<ScalarLanes>(static_cast<float>(static_cast<double>(total) * 0x1p-40));
  const auto logprob = [&](float logit) { return total ? (logit - largest) - log_total : std::nanf(""); };
  out.chosen_logprob[i] = logprob(logits[chosen]);
  out.chosen_rank[i] = static_cast<int32_t>(kernels.count_before(logits, vocab_size, logits[chosen], chosen)) + 1;
  if (top_n == 0) return;
  const int32_t kept = total ? top_keys(row, top_n, s.filters) : 0;
  for (int32_t n = 0; n < top_n; ++n) {
    out.top_ids[i * out.stride + n] = n < kept ? static_cast<int32_t>(s.filters.keys[n] & 0xffffffffu) : -1;
    out.top_logprobs[i * out.stride + n] = n < kept ? logprob(key_logit(s.filters.keys[n])) : std::nanf("");
  }
}

}  // namespace

void logprobs(const float* logits, int64_t vocab_size, const int32_t* rows, const int32_t* chosen, int64_t num_rows,
              int32_t top_n, const LogprobOutputs& out) {
  parallel_for(num_rows, kRandomRowCost * num_rows * vocab_size >= kMinParallelIds, [&](int64_t i) {
    logprobs_of_row(logits + rows[i] * vocab_size, static_cast<int32_t>(vocab_size), i, chosen[i], top_n, out);
  });
}

}  // namespace fd
