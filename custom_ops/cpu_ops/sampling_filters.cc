// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/sampling_filters.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fd {
namespace {

constexpr int64_t kMaxSortedKeys = 256;     // with more keys, a histogram finds the end of a prefix
constexpr int64_t kPivotHeadIds = 512;      // most probable ids that pivots are estimated from, and besides them
constexpr int32_t kPivotBlockStride = 32;   // one block in this many
constexpr float kPivotMargin = 0.05f;       // distance of pivots from top_p, in standard deviations of sqrt(p (1 - p))
constexpr int64_t kNumBins = 1024;          // of the histogram
constexpr double kShareRounding = 0x1p-23;  // rounding of a share of the total to float
constexpr float kMassRange = 32.0f;         // ids this far below the largest logit have no mass

Cutoff cutoff_after(uint64_t key) { return {key_logit(key), static_cast<int32_t>(key & 0xffffffffu)}; }

// The first `count` keys of the scratch memory, the mass of the ids before them, and the mass of all ids.
struct Keys {
  FilterScratch& s;
  int64_t count;
  float largest;
  uint64_t before, total;

  uint64_t* begin() const { return s.keys.data(); }
  uint64_t mass(const uint64_t* first, int64_t num) const {
    sampling_kernels().masses_of_keys(first, num, largest, s.masses.data());
    return std::accumulate(s.masses.begin(), s.masses.begin() + num, uint64_t{0});
  }
};

// Returns the key at which the mass reaches top_p. The mass of all keys together must reach it.
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

// Masses of ids within a range, by their distance from its end.
class Histogram {
 public:
  Histogram(Range range, FilterScratch& s)
      : end_(range.end), bins_per_unit_(kNumBins / std::min(range.end - range.lowest, kMassRange)), bins_(s.bins) {
    std::fill(bins_.begin(), bins_.end(), 0);
  }

  int64_t bin_of(uint64_t key) const {
    return static_cast<int64_t>(std::min((end_ - key_logit(key)) * bins_per_unit_, kNumBins - 1.0f));
  }

  void add(const uint64_t* keys, int64_t count, float largest, FilterScratch& s, uint64_t weight) {
    sampling_kernels().masses_of_keys(keys, count, largest, s.masses.data());
    for (int64_t i = 0; i < count; ++i) bins_[bin_of(keys[i])] += weight * s.masses[i];
  }

  uint64_t total() const { return std::accumulate(bins_.begin(), bins_.end(), uint64_t{0}); }

  // Returns the first bin up to which the mass, including `before`, reaches top_p of the total. Adds the mass of the
  // bins before it to `before`.
  int64_t reaching_bin(uint64_t* before, uint64_t total, float top_p) const {
    int64_t bin = 0;
    for (; bin < kNumBins - 1 && !reaches(*before + bins_[bin], total, top_p); ++bin) *before += bins_[bin];
    return bin;
  }

  // Returns the upper edge of a bin.
  float upper_edge(int64_t bin) const { return end_ - static_cast<float>(bin) / bins_per_unit_; }

 private:
  float end_, bins_per_unit_;
  std::vector<uint64_t>& bins_;
};

// Returns reaching_key of the keys of a range. If there are many, only those of one bin are ordered.
uint64_t reaching_key_within(Keys a, Range range, float top_p) {
  if (a.count <= kMaxSortedKeys) return reaching_key(a, top_p);
  Histogram histogram(range, a.s);
  histogram.add(a.begin(), a.count, a.largest, a.s, 1);
  const int64_t bin = histogram.reaching_bin(&a.before, a.total, top_p);
  uint64_t* end =
      std::remove_if(a.begin(), a.begin() + a.count, [&](uint64_t k) { return histogram.bin_of(k) != bin; });
  a.count = end - a.begin();
  return reaching_key(a, top_p);
}

// Estimates two logits, in descending order, on both sides of the end of the prefix: from the most probable ids, which
// may have much of the mass, and from a sample of the others.
Pivots estimate_pivots(float top_p, const Row& row, Cutoff cutoff, FilterScratch& s) {
  const SamplingKernels& kernels = sampling_kernels();
  const Range all = {row.largest - kMassRange, std::nextafter(row.largest, kPlusInfinity)};
  const float head = std::max(all.lowest, top_k_lower_bound(kPivotHeadIds, row, s));
  Histogram histogram(all, s);
  histogram.add(s.keys.data(), kernels.gather_keys(row, cutoff, head, kPlusInfinity, 1, s.keys.data()), row.largest, s,
                1);
  histogram.add(s.keys.data(), kernels.gather_keys(row, cutoff, all.lowest, head, kPivotBlockStride, s.keys.data()),
                row.largest, s, kPivotBlockStride);
  const uint64_t total = histogram.total();
  const float margin = kPivotMargin * std::sqrt(top_p * (1.0f - top_p));
  const auto logit_at = [&](float share) {
    uint64_t before = 0;
    return histogram.upper_edge(histogram.reaching_bin(&before, total, share));
  };
  return {logit_at(top_p - margin), logit_at(top_p + margin)};
}

}  // namespace

void FilterScratch::fit(int64_t vocab_size) {
  block_order.resize(num_blocks(vocab_size));
  keys.resize(vocab_size + kBlock);  // the padding of the last block may add keys
  masses.resize(keys.size());
  bins.resize(kNumBins);
}

float top_k_lower_bound(int64_t k, const Row& row, FilterScratch& s) {
  const int64_t blocks = num_blocks(row.num_ids);
  if (k > blocks) return kMinusInfinity;
  std::copy_n(row.block_max, blocks, s.block_order.begin());
  std::nth_element(s.block_order.begin(), s.block_order.begin() + (k - 1), s.block_order.begin() + blocks,
                   [](float a, float b) { return a > b; });
  return s.block_order[k - 1];
}

Cutoff top_k_cutoff(int64_t k, const Row& row, FilterScratch& s) {
  const int32_t count =
      sampling_kernels().gather_keys(row, kAllFinite, top_k_lower_bound(k, row, s), kPlusInfinity, 1, s.keys.data());
  if (count < k) return kAllFinite;
  std::nth_element(s.keys.begin(), s.keys.begin() + (k - 1), s.keys.begin() + count);
  return cutoff_after(s.keys[k - 1]);
}

// One pass sums the masses down to each pivot; another one gathers the ids between the pivots around the end of the
// prefix.
Cutoff top_p_cutoff(float top_p, const Row& row, Cutoff cutoff, FilterScratch& s) {
  const Pivots pivots = estimate_pivots(top_p, row, cutoff, s);
  const Masses masses = sampling_kernels().masses(row, cutoff, pivots);
  Range range = {row.largest - kMassRange, std::nextafter(row.largest, kPlusInfinity)};
  uint64_t before = 0;
  for (int e = 0; e < kNumPivots; ++e) {
    if (masses.reached[e] > 0 && reaches(masses.reached[e], masses.total, top_p)) {
      range.lowest = std::max(range.lowest, pivots.logits[e]);
      break;
    }
    range.end = pivots.logits[e];
    before = masses.reached[e];
  }
  const int32_t count = sampling_kernels().gather_keys(row, cutoff, range.lowest, range.end, 1, s.keys.data());
  return cutoff_after(reaching_key_within({s, count, row.largest, before, masses.total}, range, top_p));
}

// The prefix contains an id unless the mass before it reaches top_p. Different logits may be equal after division by
// the temperature, so ids with nearly the same logit are counted as before it in one bound and as after it in the
// other.
bool TopPPrefix::contains(int32_t id) {
  const float logit = row_.logits[id];
  const float near = std::abs(logit) * 0x1p-20f + row_.temperature * std::numeric_limits<float>::min();
  const Cutoff ids_before = cutoff_before(logit / row_.temperature, id);
  if (cutoff_.logit > kMinusInfinity || std::abs(row_.largest) > kMaxApproxLogit) return contains_exactly(ids_before);
  const ApproxMasses m = sampling_kernels().approx_masses(row_, logit - near, logit + near);
  const double most = m.above + m.within, least = m.above / kMaxOverestimate;
  if (most < (top_p_ - kShareRounding) * (most + m.below / kMaxOverestimate)) return true;
  if (least >= top_p_ * (least + m.within + m.below)) return false;
  return contains_exactly(ids_before);
}

bool TopPPrefix::contains_exactly(Cutoff ids_before) {
  if (total_ == 0) total_ = sampling_kernels().masses(row_, cutoff_, {}).total;
  return !reaches(sampling_kernels().masses(row_, ids_before, {}).total, total_, top_p_);
}

Cutoff min_p_cutoff(float min_p, const Row& row, Cutoff cutoff) {
  const float least = least_logit(min_p, row.largest);
  return least > cutoff.logit ? Cutoff{least, std::numeric_limits<int32_t>::max()} : cutoff;
}

}  // namespace fd
