// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling_cuts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kShortPrefix = 256;       // ids among which the end of a prefix is found without a histogram
constexpr int64_t kSampledHead = 512;       // largest ids that guess where a prefix ends, with those of
constexpr int32_t kSampledBlocks = 32;      // one block in so many
constexpr float kGuessMargin = 0.05f;       // to within so many deviations of whether an id is in the prefix
constexpr int64_t kNumBins = 1024;          // of the histogram
constexpr double kShareRounding = 0x1p-23;  // of a share of the total that is compared as a float
constexpr float kUnitsOfMass = 32.0f;       // below the largest logit: nothing further down has mass

Cut last_survivor(uint64_t key) { return {key_logit(key), static_cast<int32_t>(key & 0xffffffffu)}; }

// The first `count` keys of the scratch, what they are worth and what lies before them in the order of ids.
struct Keys {
  CutScratch& s;
  int64_t count;
  float largest;
  uint64_t before, total;

  uint64_t* begin() const { return s.keys.data(); }
  uint64_t mass(const uint64_t* first, int64_t num) const {
    sampling_kernels().masses_of_keys(first, num, largest, s.masses.data());
    return std::accumulate(s.masses.begin(), s.masses.begin() + num, uint64_t{0});
  }
};

// The key at which the mass of the keys up to it, with what lies before, reaches top_p; that of all keys together does.
uint64_t reaching_key(Keys a, float top_p) {
  uint64_t* keys = a.begin();
  while (a.count > 1) {
    const int64_t half = a.count / 2;
    std::nth_element(keys, keys + half, keys + a.count);
    const uint64_t mass = a.before + a.mass(keys, half);
    if (reaches(mass, a.total, top_p)) {
      a.count = half;
    } else {
      a.before = mass;
      keys += half;
      a.count -= half;
    }
  }
  return keys[0];
}

// Scaled logits, lowest <= logit < end.
struct Range {
  float lowest, end;
};

// Masses of ids within a range by their distance from its end.
class Histogram {
 public:
  Histogram(Range range, CutScratch& s)
      : end_(range.end), bins_per_unit_(kNumBins / std::min(range.end - range.lowest, kUnitsOfMass)), bins_(s.bins) {
    std::fill(bins_.begin(), bins_.end(), 0);
  }

  int64_t bin_of(uint64_t key) const {
    return static_cast<int64_t>(std::min((end_ - key_logit(key)) * bins_per_unit_, kNumBins - 1.0f));
  }

  void add(const uint64_t* keys, int64_t count, float largest, CutScratch& s, uint64_t weight) {
    sampling_kernels().masses_of_keys(keys, count, largest, s.masses.data());
    for (int64_t i = 0; i < count; ++i) bins_[bin_of(keys[i])] += weight * s.masses[i];
  }

  uint64_t total() const { return std::accumulate(bins_.begin(), bins_.end(), uint64_t{0}); }

  // The first bin up to which the mass, with `before`, reaches top_p of the total; `before` grows by what it skips.
  int64_t reaching_bin(uint64_t* before, uint64_t total, float top_p) const {
    int64_t bin = 0;
    for (; bin < kNumBins - 1 && !reaches(*before + bins_[bin], total, top_p); ++bin) *before += bins_[bin];
    return bin;
  }

  // The logit above this bin.
  float top_of(int64_t bin) const { return end_ - static_cast<float>(bin) / bins_per_unit_; }

 private:
  float end_, bins_per_unit_;
  std::vector<uint64_t>& bins_;
};

// reaching_key of the keys of a range: of many, only those of one bin are put in order.
uint64_t reaching_key_within(Keys a, Range range, float top_p) {
  if (a.count <= kShortPrefix) return reaching_key(a, top_p);
  Histogram histogram(range, a.s);
  histogram.add(a.begin(), a.count, a.largest, a.s, 1);
  const int64_t bin = histogram.reaching_bin(&a.before, a.total, top_p);
  uint64_t* end =
      std::remove_if(a.begin(), a.begin() + a.count, [&](uint64_t k) { return histogram.bin_of(k) != bin; });
  a.count = end - a.begin();
  return reaching_key(a, top_p);
}

// Logits, descending, close to where the prefix probably ends: from its largest ids, which can weigh much, and from a
// sample of the others.
Edges guess_end(float top_p, const Row& row, Cut cut, CutScratch& s) {
  const SamplingKernels& kernels = sampling_kernels();
  const Range all = {row.largest - kUnitsOfMass, std::nextafter(row.largest, kInfinity)};
  const float head = std::max(all.lowest, reached_by(kSampledHead, row, s));
  Histogram histogram(all, s);
  histogram.add(s.keys.data(), kernels.gather(row, cut, head, kInfinity, 1, s.keys.data()), row.largest, s, 1);
  histogram.add(s.keys.data(), kernels.gather(row, cut, all.lowest, head, kSampledBlocks, s.keys.data()), row.largest,
                s, kSampledBlocks);
  const uint64_t total = histogram.total();
  const float margin = kGuessMargin * std::sqrt(top_p * (1.0f - top_p));
  const auto logit_at = [&](float share) {
    uint64_t before = 0;
    return histogram.top_of(histogram.reaching_bin(&before, total, share));
  };
  return {logit_at(top_p - margin), logit_at(top_p + margin)};
}

}  // namespace

void CutScratch::fit(int64_t vocab_size) {
  block_order.resize(num_blocks(vocab_size));
  keys.resize(vocab_size + kBlock);  // a padded last block may add ids that do not exist
  masses.resize(keys.size());
  bins.resize(kNumBins);
}

float reached_by(int64_t k, const Row& row, CutScratch& s) {
  const int64_t blocks = num_blocks(row.num_ids);
  if (k > blocks) return -kInfinity;
  std::copy_n(row.block_max, blocks, s.block_order.begin());
  std::nth_element(s.block_order.begin(), s.block_order.begin() + (k - 1), s.block_order.begin() + blocks,
                   [](float a, float b) { return a > b; });
  return s.block_order[k - 1];
}

Cut cut_top_k(int64_t k, const Row& row, CutScratch& s) {
  const int32_t count = sampling_kernels().gather(row, kAllFinite, reached_by(k, row, s), kInfinity, 1, s.keys.data());
  if (count < k) return kAllFinite;
  std::nth_element(s.keys.begin(), s.keys.begin() + (k - 1), s.keys.begin() + count);
  return last_survivor(s.keys[k - 1]);
}

// One pass for the masses down to each edge, one for the ids between the two edges among which the prefix ends.
Cut cut_top_p(float top_p, const Row& row, Cut cut, CutScratch& s) {
  const Edges edges = guess_end(top_p, row, cut, s);
  const Masses masses = sampling_kernels().masses(row, cut, edges);
  Range range = {row.largest - kUnitsOfMass, std::nextafter(row.largest, kInfinity)};
  uint64_t before = 0;
  for (int e = 0; e < kNumEdges; ++e) {
    if (masses.reached[e] > 0 && reaches(masses.reached[e], masses.total, top_p)) {
      range.lowest = std::max(range.lowest, edges.logits[e]);
      break;
    }
    range.end = edges.logits[e];
    before = masses.reached[e];
  }
  const int32_t count = sampling_kernels().gather(row, cut, range.lowest, range.end, 1, s.keys.data());
  return last_survivor(reaching_key_within({s, count, row.largest, before, masses.total}, range, top_p));
}

// An id is held unless the mass in front of it reaches top_p. Logits that differ may be equal once they are divided:
// those too near to tell are taken to lie in front, then behind.
bool Prefix::holds(int32_t id) {
  const float logit = row_.logits[id];
  const float near = std::abs(logit) * 0x1p-20f + row_.temperature * std::numeric_limits<float>::min();
  const Cut in_front = before(logit / row_.temperature, id);
  if (cut_.logit > -kInfinity || std::abs(row_.largest) > kMostRoughLogit) return holds_exactly(in_front);
  const RoughMasses m = sampling_kernels().rough_masses(row_, logit - near, logit + near);
  const double most = m.above + m.within, least = m.above / kRoughness;
  if (most < (top_p_ - kShareRounding) * (most + m.below / kRoughness)) return true;
  if (least >= top_p_ * (least + m.within + m.below)) return false;
  return holds_exactly(in_front);
}

bool Prefix::holds_exactly(Cut in_front) {
  if (total_ == 0) total_ = sampling_kernels().masses(row_, cut_, {}).total;
  return !reaches(sampling_kernels().masses(row_, in_front, {}).total, total_, top_p_);
}

Cut cut_min_p(float min_p, const Row& row, Cut cut) {
  const float least = row.largest + log_positive<ScalarLanes>(min_p);
  return least > cut.logit ? Cut{least, std::numeric_limits<int32_t>::max()} : cut;
}

}  // namespace fd
