// SPDX-License-Identifier: Apache-2.0
// Joins the slices of a row of logits to its token.
#pragma once

#include "gpu_ops/sample_filters.h"
#include "gpu_ops/sample_noise.h"

namespace fd::gpu {

struct Shared {
  SliceMemory slice;
  BlockMemory block;
  RowState state;
};

struct RowMemory {
  Shared shared;
  uint64_t bins[kBins];
};

FD_DEVICE bool needs_histogram(const RowParams& row, int32_t num_ids) {
  return !row.greedy() && (row.has_top_k(num_ids) || row.has_top_p());
}

FD_DEVICE bool has_filter(const RowParams& row, int32_t num_ids) {
  return row.has_top_k(num_ids) || row.has_top_p() || row.has_min_p();
}

// Returns the first of the keys of the slices of a row.
FD_DEVICE uint64_t first_of_slices(BlockMemory& memory, const uint64_t* keys, int row, int num_slices) {
  const int slice = static_cast<int>(thread_index());
  return block_first(memory, slice < num_slices ? keys[int64_t{row} * num_slices + slice] : kNoKey);
}

// Returns the largest scaled logit of a row, NaN or -inf if the row fails.
FD_DEVICE float largest_scaled(BlockMemory& memory, const uint64_t* largest_keys, const RowParams& params, int row,
                               int num_slices) {
  const float largest = key_logit(first_of_slices(memory, largest_keys, row, num_slices));
  return status_of(largest) == kRowOk ? ScalarLanes::div(largest, params.f[kTemperature]) : largest;
}

// Loads what `find_ends` has found. Contains a barrier.
FD_DEVICE RowState load_state(RowState& shared, const uint64_t* states, int row) {
  const int i = static_cast<int>(thread_index());
  if (i < kNumStateWords) shared.words[i] = states[int64_t{row} * kNumStateWords + i];
  sync_block();
  RowState state;
  for (int word = 0; word < kNumStateWords; ++word) state.words[word] = shared.words[word];
  return state;
}

// The candidates of the slices of a row: their scaled logits, and their places in their slices.
struct CandidateList {
  const uint32_t* logits;  // [num_slices, kMaxCandidates]
  const uint16_t* places;
  const int32_t* counts;  // [num_slices]; more than kMaxCandidates: the others are not listed
};

// The candidates of a row: from their lists, or if a slice has too many, from the logits.
struct CandidateSource {
  SliceMemory& memory;
  const RowState& state;
  const RowParams& params;
  const RowLogits& row;
  const EditLists& lists;
  CandidateList candidates;
  int num_slices;
  bool is_listed;

  // Calls f(scaled logit, id) for each candidate. To be called by all threads.
  template <class Function>
  FD_DEVICE void for_each(const Function& f) const {
    if (is_listed) {
      for (int slice = static_cast<int>(warp_index()); slice < num_slices; slice += kSliceWarps) {
        const int64_t first = int64_t{slice} * kMaxCandidates;
        for (int i = static_cast<int>(lane_index()); i < candidates.counts[slice]; i += static_cast<int>(kWarpSize))
          f(bit_cast<float>(candidates.logits[first + i]), slice * kSliceIds + candidates.places[first + i]);
      }
      return;
    }
    for (int slice = 0; slice < num_slices; ++slice) {
      SliceValues v;
      load_slice(memory, row, params, lists, slice * kSliceIds, v);
      if (!row.is_edited) scale(v, params.f[kTemperature]);
      write_groups(memory, v);
      for (int g = 0; g < kGroups; ++g) {
        float x[kGroupIds];
        read_group(memory, g, x);
        for (int j = 0; j < kGroupIds; ++j)
          if (x[j] > kMinusInfinity && state.is_candidate(bin_of(x[j], state.logit(kStateLargest))))
            f(x[j], slice * kSliceIds + group_offset(g) + j);
      }
    }
  }
};

// Returns the cutoff of top_k and top_p, which lies among the candidates.
FD_DEVICE Cutoff cutoff_among(RowMemory& memory, const CandidateSource& source) {
  BlockMemory& block = memory.shared.block;
  const RowState& state = source.state;
  const float largest = state.logit(kStateLargest);
  const int top_k_bin = state.number(kStateTopKBin);
  const auto each = [&](const auto& f) { source.for_each(f); };
  Cutoff top_k = kAllFinite;
  if (top_k_bin >= 0) {
    const auto left = static_cast<uint64_t>(state.number(kStateTopKLeft));
    const auto weight = [&](float x, int32_t) { return static_cast<uint64_t>(bin_of(x, largest) == top_k_bin); };
    top_k = find_cutoff(block, memory.bins, each, weight, [&](uint64_t count) { return count >= left; }, 0);
  }
  if (!source.params.has_top_p()) return top_k;
  const auto is_kept = [&](int bin, float x, int32_t id) { return bin != top_k_bin || is_allowed(top_k, x, id); };
  uint64_t total = state.words[kStateTotal];
  if (top_k_bin >= 0) {
    uint64_t own = 0;
    each([&](float x, int32_t id) {
      if (bin_of(x, largest) == top_k_bin && is_allowed(top_k, x, id)) own += mass_at(x, largest);
    });
    total += block_sum(block, own);
  }
  const int begin = state.number(kStateTopPBegin), end = state.number(kStateTopPEnd);
  const auto weight = [&](float x, int32_t id) {
    const int bin = bin_of(x, largest);
    return bin >= begin && bin < end && is_kept(bin, x, id) ? mass_at(x, largest) : 0;
  };
  const auto holds = [&](uint64_t mass) { return reaches(mass, total, source.params.f[kTopP]); };
  return find_cutoff(block, memory.bins, each, weight, holds, state.words[kStateMassBeforeTopP]);
}

// Returns the key of the best allowed candidate; writes the processed logits of all of them if they are kept.
FD_DEVICE uint64_t best_of_candidates(BlockMemory& memory, const CandidateSource& source, Cutoff cutoff) {
  uint64_t best = kNoKey;
  const float least = source.state.logit(kStateLeast);
  source.for_each([&](float x, int32_t id) {
    const bool is_kept = is_allowed(cutoff, x, id) && x >= least;
    if (source.row.is_edited) source.row.row[id] = is_kept ? x : kMinusInfinity;
    if (!is_kept) return;
    const GroupWords words = group_words(id, source.params.seed(), source.params.position());
    const uint64_t key = noisy_key(x, words.of_id[id % kGroupIds], id);
    if (key < best) best = key;
  });
  return block_first(memory, best);
}

struct SampledToken {
  int32_t id;
  RowStatus status;
  bool draft_is_allowed;
};

FD_DEVICE SampledToken token_of(uint64_t key, bool draft_is_allowed) {
  return {key == kNoKey ? -1 : static_cast<int32_t>(key & 0xFFFFFFFFu), kRowOk, draft_is_allowed};
}

// What the launches before have found, for all rows.
struct SliceResults {
  const uint64_t* largest_keys;  // [num_rows, num_slices]
  const uint64_t* best_keys;     // [num_rows, num_slices]
  const float* drafts;           // [num_rows] scaled logits
  const uint64_t* states;        // [num_rows, kNumStateWords]
};

FD_DEVICE SampledToken sample_greedy(BlockMemory& memory, const RowParams& params, const SliceResults& found, int row,
                                     int num_slices) {
  const uint64_t key = first_of_slices(memory, found.largest_keys, row, num_slices);
  const RowStatus status = status_of(key_logit(key));
  if (status != kRowOk) return {-1, status, false};
  return token_of(key, params.i[kDraftId] == static_cast<int64_t>(key & 0xFFFFFFFFu));
}

// To be called by all threads; all return the same.
FD_DEVICE SampledToken sample_random(RowMemory& memory, const RowParams& params, const RowLogits& logits,
                                     const EditLists& lists, const CandidateList& candidates, const SliceResults& found,
                                     int row, int num_slices) {
  Shared& shared = memory.shared;
  const float largest = largest_scaled(shared.block, found.largest_keys, params, row, num_slices);
  if (status_of(largest) != kRowOk) return {-1, status_of(largest), false};
  uint64_t best = first_of_slices(shared.block, found.best_keys, row, num_slices);
  Cutoff cutoff = {kPlusInfinity, -1};  // of the bins from `end` on
  float least = kMinusInfinity;
  int end = kBins;
  if (has_filter(params, logits.num_ids)) {
    const RowState state = load_state(shared.state, found.states, row);
    least = state.logit(kStateLeast);
    end = state.number(kStateEnd);
    if (state.has_candidates()) {
      const int slice = static_cast<int>(thread_index());
      const bool is_longer = slice < num_slices && candidates.counts[slice] > kMaxCandidates;
      const bool is_listed = block_sum(shared.block, is_longer ? 1 : 0) == 0;
      const CandidateSource source{shared.slice, state, params, logits, lists, candidates, num_slices, is_listed};
      cutoff = cutoff_among(memory, source);
      const uint64_t other = best_of_candidates(shared.block, source, cutoff);
      best = other < best ? other : best;
    }
  }
  const int64_t draft = params.i[kDraftId];
  if (draft < 0 || draft >= logits.num_ids) return token_of(best, false);
  const float scaled = found.drafts[row];
  const Cutoff of_draft = bin_of(scaled, largest) < end ? kAllFinite : cutoff;
  return token_of(best, draft_survives(params, logits.num_ids, of_draft, scaled) && scaled >= least);
}

// Writes draft_is_allowed from `survives`, two rows a thread, and marks the rows after a rejected draft if they are to
// be skipped. The last rows come first: a row is found by those before it.
FD_DEVICE void settle_rows(const int64_t* int_params, int num_rows, bool stop_at_rejections, const int32_t* survives,
                           int32_t* token_ids, int32_t* statuses, uint8_t* draft_is_allowed) {
  constexpr int rows_of_block = 2 * kSliceThreads;
  const auto draft = [&](int64_t row) { return int_params[row * kNumIntParams + kDraftId]; };
  const auto rejects_draft = [&](int64_t row) { return rejects(draft(row), token_ids[row]); };
  for (int begin = (num_rows - 1) / rows_of_block * rows_of_block; begin >= 0; begin -= rows_of_block) {
    const int first = begin + 2 * static_cast<int>(thread_index());
    bool is_skipped[2];
    for (int i = 0; i < 2; ++i)
      is_skipped[i] = stop_at_rejections && first + i < num_rows && follows_rejection(first + i, draft, rejects_draft);
    sync_block();
    for (int i = 0; i < 2 && first + i < num_rows; ++i) {
      draft_is_allowed[first + i] = survives[first + i] != 0 && !is_skipped[i] ? 1 : 0;
      if (!is_skipped[i]) continue;
      token_ids[first + i] = -1;
      statuses[first + i] = kRowSkipped;
    }
  }
}

}  // namespace fd::gpu
