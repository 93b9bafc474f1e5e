// SPDX-License-Identifier: Apache-2.0
// Sampling. A row is cut into slices of 8,192 ids, a block each; all that joins slices are exact integers. Launches:
// `scan_slices` finds the largest logit, and the best id if there are no filters; `count_bins` makes a histogram for
// top_k and top_p; `find_ends` finds the bins where they end; `draw_slices` finds the best allowed id and gathers the
// ids that these bins hold; `finish_rows` joins the slices of a row. Greedy rows and rows without filters take part in
// the first and the last.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/sample_row.h"

namespace {

using namespace fd;
using namespace fd::gpu;

// What all launches of a call know.
struct Sizes {
  int num_rows, vocab_size, num_slices;
  bool keep_processed;
  ListSizes lists;
};

// The row and the slice of a block.
struct Place {
  int row, slice, num_slices;
  FD_DEVICE int32_t first() const { return slice * kSliceIds; }
  FD_DEVICE int64_t slot() const { return int64_t{row} * num_slices + slice; }
};

FD_DEVICE Place place_of_block(int num_slices) {
  const int block = static_cast<int>(block_index().x);
  return {block / num_slices, block % num_slices, num_slices};
}

FD_DEVICE RowLogits logits_of_row(float* logits, int row, int32_t vocab_size, const RowParams& params, bool is_edited) {
  return {logits + int64_t{row} * vocab_size, vocab_size, params.num_ids(vocab_size),
          has_aligned_rows(logits, vocab_size), is_edited};
}

// Returns the key of the largest logit of a slice, the lowest id among equals; a NaN comes first.
FD_DEVICE uint64_t key_of_largest(BlockMemory& memory, const SliceValues& v, int32_t first) {
  float largest = kMinusInfinity;
  int32_t id = first + group_offset(0);
  bool has_nan = false;
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j) {
      has_nan |= v.x[g][j] != v.x[g][j];
      if (!(v.x[g][j] > largest)) continue;
      largest = v.x[g][j];
      id = first + group_offset(g) + j;
    }
  }
  return block_first(memory, has_nan ? 0 : order_key(largest, static_cast<uint32_t>(id)));
}

FD_KERNEL void scan_slices(Out<float> logits, In<float> float_params, In<int64_t> int_params, In<int32_t> history,
                           In<int32_t> bias_ids, In<float> bias_values, In<int32_t> banned_ids, In<int32_t> mask_words,
                           Out<uint64_t> largest_keys, Out<uint64_t> best_keys, Out<float> drafts,
                           Out<int32_t> bin_counts, Out<uint64_t> bin_masses, In<int32_t> device_rows, Sizes sizes) {
  const Place at = place_of_block(sizes.num_slices);
  if (at.row >= read_count(device_rows, sizes.num_rows)) return;
  Shared& shared = shared_memory<Shared>();
  const RowParams params = load_params(shared.slice, float_params.data, int_params.data, at.row, sizes.lists);
  const RowLogits row = logits_of_row(logits.data, at.row, sizes.vocab_size, params, false);
  const EditLists lists{history.data,    bias_ids.data,   bias_values.data,
                        banned_ids.data, mask_words.data, sizes.lists.mask_words};
  SliceValues v;
  load_slice(shared.slice, row, params, lists, at.first(), v);
  if (sizes.keep_processed) store_slice(row, at.first(), v);
  const uint64_t largest = key_of_largest(shared.block, v, at.first());
  if (thread_index() == 0) largest_keys.data[at.slot()] = largest;
  if (params.greedy()) return;
  scale(v, params.f[kTemperature]);
  const int64_t draft = params.i[kDraftId] - at.first();
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) FD_UNROLL
  for (int j = 0; j < kGroupIds; ++j)
    if (group_offset(g) + j == draft) drafts.data[at.row] = v.x[g][j];
  if (needs_histogram(params, row.num_ids)) {
    for (int bin = at.slice * kSliceThreads + static_cast<int>(thread_index()); bin < kBins;
         bin += sizes.num_slices * kSliceThreads) {
      bin_counts.data[int64_t{at.row} * kBins + bin] = 0;
      bin_masses.data[int64_t{at.row} * kBins + bin] = 0;
    }
  }
  if (has_filter(params, row.num_ids)) return;
  const float scaled = ScalarLanes::div(key_logit(largest), params.f[kTemperature]);
  const uint64_t best = status_of(scaled) == kRowOk ? best_of_slice(shared.slice, shared.block, v, at.first(), params,
                                                                    ScalarLanes::add(scaled, kSmallestGumbel))
                                                    : kNoKey;
  if (thread_index() == 0) best_keys.data[at.slot()] = best;
}

FD_KERNEL void count_bins(Out<float> logits, In<float> float_params, In<int64_t> int_params, In<int32_t> history,
                          In<int32_t> bias_ids, In<float> bias_values, In<int32_t> banned_ids, In<int32_t> mask_words,
                          In<uint64_t> largest_keys, Out<int32_t> bin_counts, Out<uint64_t> bin_masses,
                          In<int32_t> device_rows, Sizes sizes) {
  const Place at = place_of_block(sizes.num_slices);
  if (at.row >= read_count(device_rows, sizes.num_rows)) return;
  Shared& shared = shared_memory<Shared>();
  const RowParams params = load_params(shared.slice, float_params.data, int_params.data, at.row, sizes.lists);
  const RowLogits row = logits_of_row(logits.data, at.row, sizes.vocab_size, params, sizes.keep_processed);
  if (!needs_histogram(params, row.num_ids)) return;
  const float largest = largest_scaled(shared.block, largest_keys.data, params, at.row, sizes.num_slices);
  if (status_of(largest) != kRowOk) return;
  const EditLists lists{history.data,    bias_ids.data,   bias_values.data,
                        banned_ids.data, mask_words.data, sizes.lists.mask_words};
  SliceValues v;
  load_slice(shared.slice, row, params, lists, at.first(), v);
  scale(v, params.f[kTemperature]);
  Histogram& histogram = shared.slice.histogram;
  sync_block();
  for (int bin = static_cast<int>(thread_index()); bin < kBins; bin += kSliceThreads)
    histogram.counts[bin] = 0, histogram.masses[bin] = 0;
  sync_block();
  const bool counts = params.has_top_k(row.num_ids), sums = params.has_top_p();
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j) {
      if (v.x[g][j] == kMinusInfinity) continue;
      const int bin = bin_of(v.x[g][j], largest);
      if (counts) atomic_add(&histogram.counts[bin], 1);
      const uint64_t mass = sums ? mass_at(v.x[g][j], largest) : 0;
      if (mass != 0) atomic_add(&histogram.masses[bin], mass);
    }
  }
  sync_block();
  for (int bin = static_cast<int>(thread_index()); bin < kBins; bin += kSliceThreads) {
    const int64_t slot = int64_t{at.row} * kBins + bin;
    if (histogram.counts[bin] != 0) atomic_add(&bin_counts.data[slot], histogram.counts[bin]);
    if (histogram.masses[bin] != 0) atomic_add(&bin_masses.data[slot], histogram.masses[bin]);
  }
}

// A block for each row that `draw_slices` works on.
FD_KERNEL void find_ends(In<float> float_params, In<int64_t> int_params, In<uint64_t> largest_keys,
                         In<int32_t> bin_counts, In<uint64_t> bin_masses, Out<uint64_t> states, Out<int32_t> arrivals,
                         In<int32_t> device_rows, Sizes sizes) {
  const int row = static_cast<int>(block_index().x);
  if (row == 0 && thread_index() == 0) arrivals.data[0] = 0;  // of the blocks of `finish_rows`
  if (row >= read_count(device_rows, sizes.num_rows)) return;
  Shared& shared = shared_memory<Shared>();
  const RowParams params = load_params(shared.slice, float_params.data, int_params.data, row, sizes.lists);
  const int32_t num_ids = params.num_ids(sizes.vocab_size);
  if (params.greedy() || !(has_filter(params, num_ids) || sizes.keep_processed)) return;
  const float largest = largest_scaled(shared.block, largest_keys.data, params, row, sizes.num_slices);
  const RowStatus status = status_of(largest);
  Histogram& histogram = shared.slice.histogram;
  if (needs_histogram(params, num_ids)) {
    for (int bin = static_cast<int>(thread_index()); bin < kBins; bin += kSliceThreads) {
      histogram.counts[bin] = bin_counts.data[int64_t{row} * kBins + bin];
      histogram.masses[bin] = bin_masses.data[int64_t{row} * kBins + bin];
    }
  }
  sync_block();
  RowState state{};
  if (status == kRowOk) state = divide_bins(shared.block, histogram, params, num_ids, largest);
  if (thread_index() != 0) return;
  uint64_t* words = states.data + int64_t{row} * kNumStateWords;
  for (int i = 0; i < kNumStateWords; ++i) words[i] = state.words[i];
  words[kStateStatus] = status;
}

// Where candidates of a row are listed (CandidateList).
struct CandidateOutput {
  uint32_t* logits;
  uint16_t* places;
  int32_t* counts;
};

// Lists the ids of a slice in the bins where top_k and top_p end.
FD_DEVICE void list_candidates(BlockMemory& memory, const SliceValues& v, const RowState& state, int slice,
                               const CandidateOutput& out) {
  const float largest = state.logit(kStateLargest);
  uint32_t is_candidate = 0;
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) FD_UNROLL
  for (int j = 0; j < kGroupIds; ++j)
    if (v.x[g][j] > kMinusInfinity && state.is_candidate(bin_of(v.x[g][j], largest)))
      is_candidate |= 1u << (g * kGroupIds + j);
  const auto own = static_cast<uint64_t>(__builtin_popcount(is_candidate));
  const uint64_t before = sum_before(memory, own);
  if (thread_index() == kSliceThreads - 1) out.counts[slice] = static_cast<int32_t>(before + own);
  if (before + own > kMaxCandidates) return;
  int64_t slot = int64_t{slice} * kMaxCandidates + static_cast<int64_t>(before);
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j) {
      if ((is_candidate >> (g * kGroupIds + j) & 1) == 0) continue;
      out.logits[slot] = bit_cast<uint32_t>(v.x[g][j]);
      out.places[slot++] = static_cast<uint16_t>(group_offset(g) + j);
    }
  }
}

FD_KERNEL void draw_slices(Out<float> logits, In<float> float_params, In<int64_t> int_params, In<int32_t> history,
                           In<int32_t> bias_ids, In<float> bias_values, In<int32_t> banned_ids, In<int32_t> mask_words,
                           In<uint64_t> states, Out<uint64_t> best_keys, Out<uint32_t> candidate_logits,
                           Out<uint16_t> candidate_places, Out<int32_t> candidate_counts, In<int32_t> device_rows,
                           Sizes sizes) {
  const Place at = place_of_block(sizes.num_slices);
  if (at.row >= read_count(device_rows, sizes.num_rows)) return;
  Shared& shared = shared_memory<Shared>();
  const RowParams params = load_params(shared.slice, float_params.data, int_params.data, at.row, sizes.lists);
  const RowLogits row = logits_of_row(logits.data, at.row, sizes.vocab_size, params, sizes.keep_processed);
  const bool filters = has_filter(params, row.num_ids);
  if (params.greedy() || !(filters || sizes.keep_processed)) return;
  const RowState state = load_state(shared.state, states.data, at.row);
  if (state.number(kStateStatus) != kRowOk) return;
  const EditLists lists{history.data,    bias_ids.data,   bias_values.data,
                        banned_ids.data, mask_words.data, sizes.lists.mask_words};
  SliceValues v;
  load_slice(shared.slice, row, params, lists, at.first(), v);
  scale(v, params.f[kTemperature]);
  const float largest = state.logit(kStateLargest), least = state.logit(kStateLeast);
  const int end = state.number(kStateEnd);
  const auto is_drawn = [&](float x) { return x >= least && bin_of(x, largest) < end; };
  if (state.has_candidates()) {
    const int64_t slot = int64_t{at.row} * sizes.num_slices;
    list_candidates(shared.block, v, state, at.slice,
                    {candidate_logits.data + slot * kMaxCandidates, candidate_places.data + slot * kMaxCandidates,
                     candidate_counts.data + slot});
  }
  if (sizes.keep_processed) {
    FD_UNROLL
    for (int g = 0; g < kGroups; ++g) FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j)
      if (!is_drawn(v.x[g][j]) && !state.is_candidate(bin_of(v.x[g][j], largest))) v.x[g][j] = kMinusInfinity;
    store_slice(row, at.first(), v);  // candidates remain until `finish_rows` decides
    if (!filters) return;
  }
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) FD_UNROLL
  for (int j = 0; j < kGroupIds; ++j)
    if (!is_drawn(v.x[g][j])) v.x[g][j] = kMinusInfinity;
  const float bound = ScalarLanes::add(largest, kSmallestGumbel);
  const uint64_t best = best_of_slice(shared.slice, shared.block, v, at.first(), params, bound);
  if (thread_index() == 0) best_keys.data[at.slot()] = best;
}

FD_KERNEL void finish_rows(Out<float> logits, In<float> float_params, In<int64_t> int_params, In<int32_t> history,
                           In<int32_t> bias_ids, In<float> bias_values, In<int32_t> banned_ids, In<int32_t> mask_words,
                           In<uint64_t> largest_keys, In<uint64_t> best_keys, In<float> drafts, In<uint64_t> states,
                           In<uint32_t> candidate_logits, In<uint16_t> candidate_places, In<int32_t> candidate_counts,
                           Scratch<int32_t> survives, Out<int32_t> token_ids, Out<int32_t> statuses,
                           Out<uint8_t> draft_is_allowed, Out<int32_t> arrivals, In<int32_t> device_rows, Sizes sizes,
                           bool stop_at_rejections) {
  RowMemory& memory = shared_memory<RowMemory>();
  const int row = static_cast<int>(block_index().x), rows = read_count(device_rows, sizes.num_rows);
  if (row < rows) {
    const RowParams params = load_params(memory.shared.slice, float_params.data, int_params.data, row, sizes.lists);
    const RowLogits of_row = logits_of_row(logits.data, row, sizes.vocab_size, params, sizes.keep_processed);
    const EditLists lists{history.data,    bias_ids.data,   bias_values.data,
                          banned_ids.data, mask_words.data, sizes.lists.mask_words};
    const int64_t slot = int64_t{row} * sizes.num_slices;
    const CandidateList candidates{candidate_logits.data + slot * kMaxCandidates,
                                   candidate_places.data + slot * kMaxCandidates, candidate_counts.data + slot};
    const SliceResults found{largest_keys.data, best_keys.data, drafts.data, states.data};
    const SampledToken sampled =
        params.greedy() ? sample_greedy(memory.shared.block, params, found, row, sizes.num_slices)
                        : sample_random(memory, params, of_row, lists, candidates, found, row, sizes.num_slices);
    if (thread_index() == 0) {
      token_ids.data[row] = sampled.id;
      statuses.data[row] = sampled.status;
      survives.data[row] = sampled.draft_is_allowed ? 1 : 0;
    }
  }
  if (last_block(arrivals.data, static_cast<int32_t>(grid_size().x)))
    settle_rows(int_params.data, rows, stop_at_rejections, survives.data, token_ids.data, statuses.data,
                draft_is_allowed.data);
}

// Where the arrays that launches exchange lie in the workspace.
struct Workspace {
  explicit Workspace(int64_t num_rows, int64_t vocab_size)
      : num_slices((vocab_size + kSliceIds - 1) / kSliceIds), rows(num_rows), slices(num_rows * num_slices) {}

  int64_t num_slices;
  int64_t rows, slices, bins = rows * kBins, candidates = slices * kMaxCandidates;
  int64_t bytes = 0;

  int64_t largest_keys = place(slices, 8), best_keys = place(slices, 8), drafts = place(rows, 4);
  int64_t bin_counts = place(bins, 4), bin_masses = place(bins, 8), states = place(rows * kNumStateWords, 8);
  int64_t candidate_logits = place(candidates, 4), candidate_places = place(candidates, 2);
  int64_t candidate_counts = place(slices, 4), survives = place(rows, 4), arrivals = place(1, 4);

 private:
  int64_t place(int64_t count, int64_t item_bytes) {
    const int64_t begin = bytes;
    bytes += (count * item_bytes + 255) / 256 * 256;
    return begin;
  }
};

}  // namespace

// Writes the bytes that the launches of `fd_sample` exchange.
FD_EXPORT int fd_sample_workspace(int64_t num_rows, int64_t vocab_size, int64_t* bytes) {
  *bytes = Workspace(num_rows, vocab_size).bytes;
  return kSuccess;
}

// logits: [num_rows, vocab_size]; parameters, lists and results as in SamplingBatch (fastdeploy/ops/sampling.py).
// Ranges that exceed their list are cut, and words that it lacks of a mask allow no id.
FD_EXPORT int fd_sample(float* logits, const float* float_params, const int64_t* int_params, const int32_t* history,
                        int64_t num_history, const int32_t* bias_ids, const float* bias_values, int64_t num_bias,
                        const int32_t* banned_ids, int64_t num_banned, const int32_t* mask_words,
                        int64_t num_mask_words, int32_t* token_ids, int32_t* status, uint8_t* draft_is_allowed,
                        void* workspace, int64_t workspace_bytes, const int32_t* device_rows, int64_t num_rows,
                        int64_t vocab_size, int64_t keep_processed, int64_t stop_at_rejections, void* stream) {
  FD_REQUIRE("sample", num_rows, num_rows >= 0, "at least 0");
  FD_REQUIRE("sample", vocab_size, vocab_size > 0 && vocab_size <= kMaxVocabSize, "1 to 262144");
  const Workspace at(num_rows, vocab_size);
  FD_REQUIRE("sample", num_rows, at.slices <= INT32_MAX, "at most 2147483647 slices of 8192 ids");
  FD_REQUIRE("sample", workspace_bytes, workspace_bytes >= at.bytes, "as many as fd_sample_workspace says");
  if (num_rows == 0) return kSuccess;
  const auto array = [&](int64_t offset) { return static_cast<void*>(static_cast<char*>(workspace) + offset); };
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  const auto words64 = [&](int64_t offset) { return static_cast<uint64_t*>(array(offset)); };
  auto* drafts = static_cast<float*>(array(at.drafts));
  auto* bin_counts = static_cast<int32_t*>(array(at.bin_counts));
  auto* candidate_logits = static_cast<uint32_t*>(array(at.candidate_logits));
  auto* candidate_places = static_cast<uint16_t*>(array(at.candidate_places));
  auto* candidate_counts = static_cast<int32_t*>(array(at.candidate_counts));
  const Out<float> x(logits, size(num_rows * vocab_size));
  const In<float> floats(float_params, size(num_rows * kNumFloatParams));
  const In<int64_t> ints(int_params, size(num_rows * kNumIntParams));
  const In<int32_t> past(history, size(num_history)), biased(bias_ids, size(num_bias));
  const In<float> biases(bias_values, size(num_bias));
  const In<int32_t> banned(banned_ids, size(num_banned)), mask(mask_words, size(num_mask_words));
  const Count count{device_rows, static_cast<int32_t>(num_rows)};
  const Sizes sizes{count.max, static_cast<int>(vocab_size), static_cast<int>(at.num_slices), keep_processed != 0,
                    ListSizes{num_history, num_bias, num_banned, num_mask_words}};
  const Dim3 per_slice = {static_cast<unsigned>(at.slices), 1, 1}, per_row = {static_cast<unsigned>(num_rows), 1, 1};
  const Out<int32_t> arrivals(static_cast<int32_t*>(array(at.arrivals)), 1);
  const auto run = [&](auto* kernel, Dim3 grid, size_t bytes, const auto&... arguments) {
    return launch(kernel, grid, kSliceThreads, bytes, stream, arguments...);
  };
  if (const int code = run(scan_slices, per_slice, sizeof(Shared), x, floats, ints, past, biased, biases, banned, mask,
                           Out<uint64_t>(words64(at.largest_keys), size(at.slices)),
                           Out<uint64_t>(words64(at.best_keys), size(at.slices)), Out<float>(drafts, size(at.rows)),
                           Out<int32_t>(bin_counts, size(at.bins)),
                           Out<uint64_t>(words64(at.bin_masses), size(at.bins)), count.array(), sizes))
    return code;
  const In<uint64_t> largest_keys(words64(at.largest_keys), size(at.slices));
  if (const int code = run(count_bins, per_slice, sizeof(Shared), x, floats, ints, past, biased, biases, banned, mask,
                           largest_keys, Out<int32_t>(bin_counts, size(at.bins)),
                           Out<uint64_t>(words64(at.bin_masses), size(at.bins)), count.array(), sizes))
    return code;
  if (const int code =
          run(find_ends, per_row, sizeof(Shared), floats, ints, largest_keys, In<int32_t>(bin_counts, size(at.bins)),
              In<uint64_t>(words64(at.bin_masses), size(at.bins)),
              Out<uint64_t>(words64(at.states), size(at.rows * kNumStateWords)), arrivals, count.array(), sizes))
    return code;
  const In<uint64_t> states(words64(at.states), size(at.rows * kNumStateWords));
  if (const int code = run(draw_slices, per_slice, sizeof(Shared), x, floats, ints, past, biased, biases, banned, mask,
                           states, Out<uint64_t>(words64(at.best_keys), size(at.slices)),
                           Out<uint32_t>(candidate_logits, size(at.candidates)),
                           Out<uint16_t>(candidate_places, size(at.candidates)),
                           Out<int32_t>(candidate_counts, size(at.slices)), count.array(), sizes))
    return code;
  return run(finish_rows, per_row, sizeof(RowMemory), x, floats, ints, past, biased, biases, banned, mask, largest_keys,
             In<uint64_t>(words64(at.best_keys), size(at.slices)), In<float>(drafts, size(at.rows)), states,
             In<uint32_t>(candidate_logits, size(at.candidates)), In<uint16_t>(candidate_places, size(at.candidates)),
             In<int32_t>(candidate_counts, size(at.slices)),
             Scratch<int32_t>(static_cast<int32_t*>(array(at.survives)), size(at.rows)),
             Out<int32_t>(token_ids, size(num_rows)), Out<int32_t>(status, size(num_rows)),
             Out<uint8_t>(draft_is_allowed, size(num_rows)), arrivals, count.array(), sizes, stop_at_rejections != 0);
}
