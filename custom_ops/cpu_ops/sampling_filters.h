// SPDX-License-Identifier: Apache-2.0
// The filters top_k, top_p and min_p. Each returns a cutoff in the order of ids (logit descending, id ascending).
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_ops/sampling_kernels.h"

namespace fd {

// Returns the cutoff that allows the ids before this one.
inline Cutoff cutoff_before(float logit, int32_t id) { return {logit, id - 1}; }

// Scratch memory of one thread, reused from call to call.
struct FilterScratch {
  std::vector<float> block_order;
  std::vector<uint64_t> keys, masses;  // order keys, and their masses
  std::vector<uint64_t> bins;          // of a histogram

  void fit(int64_t vocab_size);
};

// Returns a logit that at least k ids reach: the k-th largest block maximum, or -inf.
float top_k_lower_bound(int64_t k, const Row& row, FilterScratch& s);

// Returns the cutoff after the first k ids.
Cutoff top_k_cutoff(int64_t k, const Row& row, FilterScratch& s);

// Returns the cutoff after the shortest prefix of the ids allowed by `cutoff` whose renormalised probability reaches
// top_p.
Cutoff top_p_cutoff(float top_p, const Row& row, Cutoff cutoff, FilterScratch& s);

// Decides for single ids whether they are in that prefix, without computing its end. Mostly one approximate pass
// suffices.
class TopPPrefix {
 public:
  // 0 < top_p < 1. The row must outlive this object.
  TopPPrefix(float top_p, const Row& row, Cutoff cutoff) : top_p_(top_p), row_(row), cutoff_(cutoff) {}

  // Returns whether the prefix contains an id, which must be allowed by the cutoff.
  bool contains(int32_t id);

 private:
  bool contains_exactly(Cutoff ids_before);

  float top_p_;
  const Row& row_;
  Cutoff cutoff_;
  uint64_t total_ = 0;  // mass of all allowed ids; 0: not computed yet
};

// Returns the cutoff after the ids allowed by `cutoff` that have at least min_p times the probability of the most
// probable id.
Cutoff min_p_cutoff(float min_p, const Row& row, Cutoff cutoff);

}  // namespace fd
