// SPDX-License-Identifier: Apache-2.0
// top_k and top_p in passes over slices. A histogram over the distance from the largest scaled logit, with bins that
// are finer where the distance is small, tells which bins are allowed and which are not. The ids of the few bins
// between are candidates, among which the exact cutoff is found.
#pragma once

#include "gpu_ops/sample_block.h"

namespace fd::gpu {

constexpr int kBinShift = 17;  // 64 bins for each power of two of the distance
constexpr int kFirstBin =
    ((127 - 9) << 6) - 1;            // bin 0 has distances below 2^-9, the last one those near 2^7 and above
constexpr float kMassRange = 29.0f;  // ids this far below the largest logit have no mass
constexpr int kMaxCandidates = 512;  // of a slice; with more, the row is read again
constexpr int kIdBits = 18, kDigitBits = 10, kKeyBits = 50;
constexpr int64_t kMaxVocabSize = int64_t{1} << kIdBits;
constexpr uint64_t kLeastTotal = uint64_t{1} << kMassBits;  // the mass of the largest logit

// What is known of a row after its histogram.
enum StateWord {
  kStateStatus,
  kStateLargest,    // scaled logit
  kStateLeast,      // scaled logit that min_p asks for, or -inf
  kStateEnd,        // ids of the bins before this one are allowed, if min_p allows them
  kStateTopPBegin,  // bins that may hold the end of top_p
  kStateTopPEnd,
  kStateTopKBin,         // the bin that holds the end of top_k, -1 if bins need not be divided
  kStateTopKLeft,        // how many of its ids are allowed
  kStateMassBeforeTopP,  // of the bins before kStateTopPBegin
  kStateTotal,           // mass of the ids that top_k allows; without those of kStateTopKBin
  kNumStateWords
};

struct RowState {
  uint64_t words[kNumStateWords];

  FD_DEVICE int number(StateWord word) const { return static_cast<int>(static_cast<int64_t>(words[word])); }
  FD_DEVICE float logit(StateWord word) const { return bit_cast<float>(static_cast<uint32_t>(words[word])); }
  FD_DEVICE bool has_candidates() const {
    return number(kStateTopKBin) >= 0 || number(kStateTopPBegin) < number(kStateTopPEnd);
  }
  FD_DEVICE bool is_candidate(int bin) const {
    return bin == number(kStateTopKBin) || (bin >= number(kStateTopPBegin) && bin < number(kStateTopPEnd));
  }
};

FD_DEVICE int bin_of(float scaled, float largest) {
  const float distance = ScalarLanes::add(largest, -scaled);
  const int bin = static_cast<int>(bit_cast<uint32_t>(distance) >> kBinShift) - kFirstBin;
  return bin < 0 ? 0 : bin < kBins ? bin : kBins - 1;
}

FD_DEVICE uint64_t mass_at(float scaled, float largest) {
  if (ScalarLanes::add(largest, -scaled) > kMassRange) return 0;
  return mass_of(relative_probability<ScalarLanes>(scaled, largest));
}

// Returns the sum of the bins before `end`.
FD_DEVICE uint64_t sum_of_bins(BlockMemory& memory, const uint64_t* bins, int end) {
  uint64_t sum = 0;
  for (int bin = static_cast<int>(thread_index()); bin < end; bin += kSliceThreads) sum += bins[bin];
  return block_sum(memory, sum);
}

// Finds the bins that hold the ends of top_k and top_p. All threads return the same.
FD_DEVICE RowState divide_bins(BlockMemory& memory, const Histogram& histogram, const RowParams& row, int32_t num_ids,
                               float largest) {
  int end = kBins, top_k_bin = -1;
  uint64_t left = 0;
  if (row.has_top_k(num_ids)) {
    const auto k = static_cast<uint64_t>(row.i[kTopK]);
    uint64_t before = 0;
    const int bin = find_bin(memory, histogram.counts, [&](uint64_t count) { return count >= k; }, before);
    if (bin >= 0) {
      left = k - before;
      const bool is_whole = left == static_cast<uint64_t>(histogram.counts[bin]);
      top_k_bin = is_whole ? -1 : bin;
      end = is_whole ? bin + 1 : bin;
    }
  }
  uint64_t before_top_p = 0, total = 0;
  int begin_top_p = 0, end_top_p = 0;
  if (row.has_top_p()) {
    const float top_p = row.f[kTopP];
    total = sum_of_bins(memory, histogram.masses, end);
    uint64_t least = total < kLeastTotal ? kLeastTotal : total, most = total;
    if (top_k_bin >= 0) most += histogram.masses[top_k_bin];
    const auto reached_bin = [&](uint64_t of_all, uint64_t& before) {
      const auto holds = [&](uint64_t mass) { return reaches(mass, of_all, top_p); };
      const int bin = find_bin(memory, histogram.masses, holds, before);
      if (top_k_bin < 0 || (bin >= 0 && bin < top_k_bin)) return bin;
      before = total;
      return top_k_bin;
    };
    begin_top_p = reached_bin(least, before_top_p);
    uint64_t unused = 0;
    end_top_p = (most > least ? reached_bin(most, unused) : begin_top_p) + 1;
    end = begin_top_p;
  }
  const auto word = [](int number) { return static_cast<uint64_t>(static_cast<int64_t>(number)); };
  const float least = row.has_min_p() ? least_logit(row.f[kMinP], largest) : kMinusInfinity;
  RowState state;
  state.words[kStateStatus] = kRowOk;
  state.words[kStateLargest] = bit_cast<uint32_t>(largest);
  state.words[kStateLeast] = bit_cast<uint32_t>(least);
  state.words[kStateEnd] = word(end);
  state.words[kStateTopPBegin] = word(begin_top_p);
  state.words[kStateTopPEnd] = word(end_top_p);
  state.words[kStateTopKBin] = word(top_k_bin);
  state.words[kStateTopKLeft] = left;
  state.words[kStateMassBeforeTopP] = before_top_p;
  state.words[kStateTotal] = total;
  return state;
}

// Returns a key of kKeyBits, in the order of ids.
FD_DEVICE uint64_t short_key(float scaled, int32_t id) {
  const uint64_t key = order_key(scaled, static_cast<uint32_t>(id));
  return key >> 32 << kIdBits | static_cast<uint32_t>(id);
}

FD_DEVICE Cutoff cutoff_after(uint64_t key) {
  return {key_logit(key >> kIdBits << 32), static_cast<int32_t>(key & ((uint64_t{1} << kIdBits) - 1))};
}

// Returns the cutoff after the first id at which holds(before + weights of the ids up to it). for_each(f) calls
// f(scaled, id) for ids of all threads, weight(scaled, id) is 0 for those that do not count. The key is found digit by
// digit, each by a histogram.
template <class ForEach, class Weight, class Holds>
FD_DEVICE Cutoff find_cutoff(BlockMemory& memory, uint64_t* bins, const ForEach& for_each, const Weight& weight,
                             const Holds& holds, uint64_t before) {
  uint64_t prefix = 0;
  for (int shift = kKeyBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int bin = static_cast<int>(thread_index()); bin < kBins; bin += kSliceThreads) bins[bin] = 0;
    sync_block();
    for_each([&](float scaled, int32_t id) {
      const uint64_t key = short_key(scaled, id);
      if (key >> (shift + kDigitBits) != prefix) return;
      if (const uint64_t w = weight(scaled, id)) atomic_add(&bins[(key >> shift) % kBins], w);
    });
    const int bin = find_bin(memory, bins, holds, before);
    prefix = prefix << kDigitBits | static_cast<uint32_t>(bin);
  }
  return cutoff_after(prefix);
}

}  // namespace fd::gpu
