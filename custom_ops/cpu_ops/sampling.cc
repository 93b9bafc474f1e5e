// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/threads.h"
#include "cpu_ops/sampling_cuts.h"
#include "cpu_ops/sampling_kernels.h"
#include "cpu_ops/sampling_shared.h"

namespace fd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kSampledCost = 8;  // of an id in a sampled row, against one of a greedy row
constexpr float kDrawnTopP = 0.25f;  // from here on it is cheaper to draw and ask than to find where top_p ends

struct Change {
  int32_t id;
  float before;
};

// Working memory of one thread, kept between calls.
struct Scratch {
  std::vector<float> block_max, group_max;  // of blocks, of blocks of blocks
  CutScratch cuts;
  std::vector<int32_t> counts;  // per id: 2 * occurrences in the output + (1 if seen at all); all zero between rows
  std::vector<int32_t> seen;
  std::vector<Change> changes;
  std::vector<float> masked;     // a masked row: single edits are taken back, a mask is applied to a copy
  std::vector<uint8_t> rejects;  // per row of a call, of the thread that makes it: 1 if its token is not its draft

  void fit(int64_t vocab_size) {
    if (static_cast<int64_t>(counts.size()) >= vocab_size) return;
    block_max.resize(num_blocks(vocab_size));
    group_max.resize(num_blocks(num_blocks(vocab_size)));
    cuts.fit(vocab_size);
    counts.resize(vocab_size);
  }
};

Scratch& scratch() {
  static thread_local Scratch instance;
  return instance;
}

// The rule's parameters of one row.
struct RowParams {
  const float* f;
  const int64_t* i;
  bool greedy() const { return !(f[kTemperature] >= kGreedyTemperature); }
  bool penalised() const { return f[kRepetition] != 1.0f || f[kPresence] != 0.0f || f[kFrequency] != 0.0f; }
  bool edits() const {
    return penalised() || i[kBiasBegin] < i[kBiasEnd] || i[kBannedBegin] < i[kBannedEnd] || i[kMaskBegin] != kNoMask;
  }
  uint64_t seed() const { return static_cast<uint64_t>(i[kSeed]); }
  uint64_t position() const { return static_cast<uint64_t>(i[kPosition]); }
};

// Edits single logits of a row and can take the edits back.
class RowEditor {
 public:
  RowEditor(float* logits, int64_t vocab_size, Scratch& s) : logits_(logits), vocab_size_(vocab_size), s_(s) {
    s_.changes.clear();
  }

  void apply(const RowParams& row, const SamplingInputs& in) {
    for (int64_t k = row.i[kBiasBegin]; k < row.i[kBiasEnd]; ++k) {
      const int32_t id = in.bias_ids[k];
      if (known(id)) set(id, logits_[id] + in.bias_values[k]);
    }
    if (row.penalised()) penalise(row, in.history);
    for (int64_t k = row.i[kBannedBegin]; k < row.i[kBannedEnd]; ++k) {
      if (known(in.banned_ids[k])) set(in.banned_ids[k], -kInfinity);
    }
  }

  void undo() {
    for (size_t k = s_.changes.size(); k-- > 0;) logits_[s_.changes[k].id] = s_.changes[k].before;
  }

 private:
  bool known(int32_t id) const { return id >= 0 && id < vocab_size_; }

  void set(int32_t id, float value) {
    s_.changes.push_back({id, logits_[id]});
    logits_[id] = value;
  }

  void penalise(const RowParams& row, const int32_t* history) {
    s_.seen.clear();
    for (int64_t k = row.i[kHistoryBegin]; k < row.i[kHistoryEnd]; ++k) {
      const int32_t id = history[k];
      if (!known(id)) continue;
      if (s_.counts[id] == 0) s_.seen.push_back(id);
      s_.counts[id] = (s_.counts[id] | 1) + (k >= row.i[kOutputBegin] ? 2 : 0);
    }
    for (int32_t id : s_.seen) {
      const int32_t occurrences = s_.counts[id] >> 1;
      s_.counts[id] = 0;
      float x = logits_[id];
      x = x > 0.0f ? x / row.f[kRepetition] : x * row.f[kRepetition];
      if (occurrences > 0) x = std::fma(-row.f[kFrequency], static_cast<float>(occurrences), x - row.f[kPresence]);
      set(id, x);
    }
  }

  float* logits_;
  int64_t vocab_size_;
  Scratch& s_;
};

// The lowest id that holds the largest logit of the row.
int32_t first_id_of(const float* logits, int32_t num_ids, const float* block_max, float largest) {
  int32_t block = 0;
  while (block_max[block] != largest) ++block;
  for (int32_t id = block * kBlock;; ++id) {
    if (id >= num_ids || logits[id] == largest) return id;
  }
}

Cut cut_of_top_k(const RowParams& params, const Row& row, Scratch& s) {
  const int64_t k = params.i[kTopK];
  return k > 0 && k < row.num_ids ? cut_top_k(k, row, s.cuts) : kAllFinite;
}

Cut cut_of_min_p(const RowParams& params, const Row& row, Cut cut) {
  return params.f[kMinP] >= std::numeric_limits<float>::min() ? cut_min_p(params.f[kMinP], row, cut) : cut;
}

int32_t num_ids_of(const int64_t* int_params, int64_t vocab_size) {
  return static_cast<int32_t>(std::clamp<int64_t>(int_params[kVocabLimit], 0, vocab_size));
}

struct Choice {
  int32_t token_id;
  int32_t status;
  bool draft_survives;
};

Choice choose_greedy(const RowParams& params, const Row& row) {
  const int32_t id = first_id_of(row.logits, row.num_ids, row.block_max, row.largest);
  return {id, kRowOk, params.i[kDraftId] == id};
}

// Whether the row's draft is an id, and its scaled logit survives the cut.
bool draft_survives(const RowParams& params, const Row& row, Cut cut) {
  const int64_t draft = params.i[kDraftId];
  return draft >= 0 && draft < row.num_ids &&
         survives(cut, row.logits[draft] / row.temperature, static_cast<int32_t>(draft));
}

// The best of all ids is the best of those that top_p keeps, if it is one of them. If not, the best of those in front
// of it may be.
Choice draw_and_ask(const RowParams& params, const Row& row, Cut cut) {
  Prefix prefix(params.f[kTopP], row, cut);
  cut = cut_of_min_p(params, row, cut);
  const bool hopes = draft_survives(params, row, cut);
  const auto draw = [&](Cut among) { return shared_draw(row, among, params.seed(), params.position()); };
  int32_t id = draw(cut);
  while (!prefix.holds(id)) id = draw(before(row.logits[id] / row.temperature, id));
  return {id, kRowOk, hopes && prefix.holds(static_cast<int32_t>(params.i[kDraftId]))};
}

Choice choose_sampled(const RowParams& params, Row row, float* processed, Scratch& s) {
  row.temperature = params.f[kTemperature];
  row.largest /= row.temperature;
  if (row.largest == kInfinity) return {-1, kRowNan, false};
  for (int32_t b = 0; b < num_blocks(row.num_ids); ++b) s.block_max[b] /= row.temperature;
  Cut cut = cut_of_top_k(params, row, s);
  const float top_p = params.f[kTopP];
  if (top_p >= kDrawnTopP && top_p < 1.0f && processed == nullptr) return draw_and_ask(params, row, cut);
  if (top_p < 1.0f) cut = cut_top_p(top_p, row, cut, s.cuts);
  cut = cut_of_min_p(params, row, cut);
  const int32_t id = shared_draw(row, cut, params.seed(), params.position());
  const Choice choice = {id, kRowOk, draft_survives(params, row, cut)};
  if (processed != nullptr) sampling_kernels().write_scaled(row, cut, processed);
  return choice;
}

// As shared_block_maxima of a row whose blocks' maxima are `told`: only ids of a last block that is cut are looked at.
float told_block_maxima(const float* told, const float* logits, int32_t num_ids, Scratch& s) {
  const int32_t whole = num_ids / kBlock, rest = num_ids % kBlock;
  std::copy_n(told, whole, s.block_max.begin());
  if (rest > 0) {
    float& last = s.block_max[whole];
    last = sampling_kernels().block_maxima(logits + num_ids - rest, rest, s.group_max.data());
  }
  return sampling_kernels().block_maxima(s.block_max.data(), num_blocks(num_ids), s.group_max.data());
}

Choice choose(float* logits, int64_t vocab_size, const RowParams& params, const float* told, bool keep_processed,
              Scratch& s) {
  const int32_t num_ids = num_ids_of(params.i, vocab_size);
  const float largest = told != nullptr ? told_block_maxima(told, logits, num_ids, s)
                                        : shared_block_maxima(logits, num_ids, s.block_max.data());
  if (!(largest < kInfinity)) return {-1, kRowNan, false};
  if (keep_processed) std::fill(logits + num_ids, logits + vocab_size, -kInfinity);
  if (largest == -kInfinity) return {-1, kRowEmpty, false};
  const Row row = {logits, num_ids, s.block_max.data(), largest, 1.0f};
  return params.greedy() ? choose_greedy(params, row)
                         : choose_sampled(params, row, keep_processed ? logits : nullptr, s);
}

// The row that the filters read: the logits, or, where the row has a mask, masked ones: in place or in the scratch.
float* masked_row(float* logits, int64_t vocab_size, const RowParams& params, const SamplingInputs& in, bool in_place,
                  Scratch& s) {
  const int64_t begin = params.i[kMaskBegin];
  if (begin == kNoMask) return logits;
  if (!in_place && static_cast<int64_t>(s.masked.size()) < vocab_size) s.masked.resize(vocab_size);
  float* out = in_place ? logits : s.masked.data();
  sampling_kernels().apply_mask(logits, in.mask_words + begin, num_ids_of(params.i, vocab_size), out);
  return out;
}

// What is known of the blocks of a row that nothing changes before it is filtered, or null.
const float* told_of(const SamplingInputs& in, int64_t row, int64_t vocab_size, const RowParams& params) {
  return in.block_maxima == nullptr || params.edits() ? nullptr : in.block_maxima + row * num_blocks(vocab_size);
}

// True if the rows are worth more than one thread.
bool worth_sharing(int64_t num_rows, int64_t vocab_size, const SamplingInputs& in) {
  int64_t cost = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const RowParams params = {in.float_params + row * kNumFloatParams, in.int_params + row * kNumIntParams};
    const int64_t read = told_of(in, row, vocab_size, params) != nullptr ? num_blocks(vocab_size) : vocab_size;
    cost += params.greedy() ? read : kSampledCost * vocab_size;
  }
  return cost >= kParallelCost;
}

// The rows that threads take whole. Of few rows, those that would leave most threads without one are taken by all
// threads together, in parts.
int64_t rows_by_thread(int64_t num_rows, int64_t vocab_size) {
  const int64_t threads = num_threads(), left = num_rows % threads;
  return num_rows < 2 * threads && 2 * left <= threads && vocab_size >= kParallelCost ? num_rows - left : num_rows;
}

// Which rows nobody will ask for, as far as rows have been chosen. Any thread may ask and tell.
class Rejections {
 public:
  Rejections(const SamplingInputs& in, int64_t num_rows, std::vector<uint8_t>& rejects) : in_(in), rejects_(rejects) {
    rejects_.assign(static_cast<size_t>(num_rows), 0);
  }

  void tell(int64_t row, int32_t token_id) {
    if (draft_of(row) >= 0 && token_id != draft_of(row)) __atomic_store_n(&rejects_[row], 1, __ATOMIC_RELAXED);
  }

  bool precede(int64_t row) const {
    for (; row > 0 && draft_of(row - 1) >= 0; --row)
      if (__atomic_load_n(&rejects_[row - 1], __ATOMIC_RELAXED) != 0) return true;
    return false;
  }

 private:
  int64_t draft_of(int64_t row) const { return in_.int_params[row * kNumIntParams + kDraftId]; }

  const SamplingInputs& in_;
  std::vector<uint8_t>& rejects_;
};

// What is wrong with the range [begin, end) of a list with `size` entries, or "".
std::string range_complaint(const char* list, int64_t begin, int64_t end, int64_t size, int64_t row) {
  if (0 <= begin && begin <= end && end <= size) return "";
  return std::string(list) + ": expected a range within " + std::to_string(size) + " entries, got [" +
         std::to_string(begin) + ", " + std::to_string(end) + ") at row " + std::to_string(row);
}

std::string mask_complaint(const int64_t* p, int64_t num_words, int64_t vocab_size, int64_t row) {
  if (p[kMaskBegin] == kNoMask) return "";
  return range_complaint("mask_words", p[kMaskBegin], p[kMaskBegin] + (num_ids_of(p, vocab_size) + 31) / 32, num_words,
                         row);
}

}  // namespace

std::string check_sampling_inputs(const SamplingInputs& in, int64_t num_rows, int64_t vocab_size) {
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t* p = in.int_params + row * kNumIntParams;
    const std::string wrong = range_complaint("history", p[kHistoryBegin], p[kHistoryEnd], in.num_history, row) +
                              range_complaint("bias_ids", p[kBiasBegin], p[kBiasEnd], in.num_bias, row) +
                              range_complaint("banned_ids", p[kBannedBegin], p[kBannedEnd], in.num_banned, row) +
                              mask_complaint(p, in.num_mask_words, vocab_size, row);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

void sample(float* logits, int64_t num_rows, int64_t vocab_size, const SamplingInputs& in, const SamplingOutputs& out,
            bool keep_processed, bool stop_at_rejections) {
  Rejections rejections(in, num_rows, scratch().rejects);
  const auto sample_row = [&](int64_t row) {
    if (stop_at_rejections && rejections.precede(row)) return;
    Scratch& s = scratch();
    s.fit(vocab_size);
    float* x = logits + row * vocab_size;
    const RowParams params = {in.float_params + row * kNumFloatParams, in.int_params + row * kNumIntParams};
    RowEditor editor(x, vocab_size, s);
    editor.apply(params, in);
    x = masked_row(x, vocab_size, params, in, keep_processed, s);
    const Choice choice = choose(x, vocab_size, params, told_of(in, row, vocab_size, params), keep_processed, s);
    if (!keep_processed) editor.undo();
    out.token_ids[row] = choice.token_id;
    out.status[row] = choice.status;
    out.draft_survives[row] = choice.draft_survives ? 1 : 0;
    rejections.tell(row, choice.token_id);
  };
  const int64_t whole = rows_by_thread(num_rows, vocab_size);
  parallel_for(whole, worth_sharing(whole, vocab_size, in), sample_row);
  for (int64_t row = whole; row < num_rows; ++row) sample_row(row);
  if (!stop_at_rejections) return;
  for (int64_t row = 0; row < num_rows; ++row) {  // another thread may have chosen some of them
    if (!rejections.precede(row)) continue;
    out.token_ids[row] = -1;
    out.status[row] = kRowSkipped;
    out.draft_survives[row] = 0;
  }
}

namespace {

// Orders the top_n first ids into keys[0..]; returns how many there are.
int32_t top_keys(const Row& row, int32_t top_n, CutScratch& s) {
  const Cut everything = {-kInfinity, std::numeric_limits<int32_t>::max()};
  const float lowest = reached_by(top_n, row, s);
  const int32_t count = sampling_kernels().gather(row, everything, lowest, kInfinity, 1, s.keys.data());
  const int32_t kept = std::min({count, top_n, row.num_ids});
  std::partial_sort(s.keys.begin(), s.keys.begin() + kept, s.keys.begin() + count);
  return kept;
}

void logprobs_of_row(const float* logits, int32_t vocab_size, int64_t i, int32_t chosen, int32_t top_n,
                     const LogprobOutputs& out) {
  Scratch& s = scratch();
  s.fit(vocab_size);
  const SamplingKernels& kernels = sampling_kernels();
  const float largest = shared_block_maxima(logits, vocab_size, s.block_max.data());
  const Row row = {logits, vocab_size, s.block_max.data(), largest, 1.0f};
  const uint64_t total = largest < kInfinity ? kernels.masses(row, kAllFinite, {}).total : 0;
  const float log_total = log_positive<ScalarLanes>(static_cast<float>(static_cast<double>(total) * 0x1p-40));
  const auto logprob = [&](float logit) { return total ? (logit - largest) - log_total : std::nanf(""); };
  out.chosen_logprob[i] = logprob(logits[chosen]);
  out.chosen_rank[i] = static_cast<int32_t>(kernels.count_before(logits, vocab_size, logits[chosen], chosen)) + 1;
  if (top_n == 0) return;
  const int32_t kept = total ? top_keys(row, top_n, s.cuts) : 0;
  for (int32_t n = 0; n < top_n; ++n) {
    out.top_ids[i * out.stride + n] = n < kept ? static_cast<int32_t>(s.cuts.keys[n] & 0xffffffffu) : -1;
    out.top_logprobs[i * out.stride + n] = n < kept ? logprob(key_logit(s.cuts.keys[n])) : std::nanf("");
  }
}

}  // namespace

void logprobs(const float* logits, int64_t vocab_size, const int32_t* rows, const int32_t* chosen, int64_t num_rows,
              int32_t top_n, const LogprobOutputs& out) {
  parallel_for(num_rows, kSampledCost * num_rows * vocab_size >= kParallelCost, [&](int64_t i) {
    logprobs_of_row(logits + rows[i] * vocab_size, static_cast<int32_t>(vocab_size), i, chosen[i], top_n, out);
  });
}

}  // namespace fd
