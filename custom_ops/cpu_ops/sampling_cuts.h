// SPDX-License-Identifier: Apache-2.0
// The filters top_k, top_p and min_p: which ids of a row survive, as a place in the order of ids.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_ops/sampling_kernels.h"

namespace fd {

constexpr Cut kAllFinite = {-__builtin_inff(), -1};

// The ids in front of this one.
inline Cut before(float logit, int32_t id) { return {logit, id - 1}; }

// Working memory of one thread, kept between calls.
struct CutScratch {
  std::vector<float> block_order;
  std::vector<uint64_t> keys, masses;  // of keys
  std::vector<uint64_t> bins;          // of a histogram

  void fit(int64_t vocab_size);
};

// A logit that at least k ids reach: the k-th largest block maximum, or -inf.
float reached_by(int64_t k, const Row& row, CutScratch& s);

// The cut after the k first ids of the order.
Cut cut_top_k(int64_t k, const Row& row, CutScratch& s);

// The cut after the smallest prefix of `cut`'s survivors whose probability, renormalised over them, reaches top_p.
Cut cut_top_p(float top_p, const Row& row, Cut cut, CutScratch& s);

// The same prefix without its end: says of single ids whether they lie in it. Most answers take one rough pass.
class Prefix {
 public:
  // 0 < top_p < 1. The row outlives it.
  Prefix(float top_p, const Row& row, Cut cut) : top_p_(top_p), row_(row), cut_(cut) {}

  // Whether the prefix holds an id that survives the cut.
  bool holds(int32_t id);

 private:
  bool holds_exactly(Cut in_front);

  float top_p_;
  const Row& row_;
  Cut cut_;
  uint64_t total_ = 0;  // 0: not known yet
};

// The cut after those of `cut`'s survivors that have at least min_p times the probability of the most probable.
Cut cut_min_p(float min_p, const Row& row, Cut cut);

}  // namespace fd
