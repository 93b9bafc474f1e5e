// SPDX-License-Identifier: Apache-2.0
// Kernels of sampling for each FD_ISA path. They process rows in blocks of 64 ids and skip a block if its largest logit
// already decides the result. A last, partial block is read from a copy that is padded with -inf.
#include "cpu_ops/sampling_kernels.h"

#include "cpu_ops/noise_lanes.h"
#include "cpu_ops/sampling_lanes.h"

namespace fd {
namespace FD_ISA {
namespace {

using F = Lanes::F;
using U = Lanes::U;
using M = Lanes::M;
constexpr int kWidth = Lanes::kWidth;
constexpr int kGroup = kNoiseGroup;

// One block of the row, padded if it is the last.
struct Block {
  float padded[kBlock];
  FD_RULE const float* read(const float* logits, int32_t num_ids, int32_t block) {
    const int32_t first = block * kBlock;
    if (first + kBlock <= num_ids) return logits + first;
    for (int32_t i = 0; i < kBlock; ++i) padded[i] = first + i < num_ids ? logits[first + i] : kMinusInfinity;
    return padded;
  }
};

FD_RULE U ids_from(int32_t first) { return Lanes::add(Lanes::set(static_cast<uint32_t>(first)), Lanes::iota()); }

struct VectorCutoff {
  F logit;
  U id_end;
  bool excludes_finite;  // false if only logits of -inf, which have no mass and are never sampled, are excluded
  explicit FD_RULE VectorCutoff(Cutoff cutoff)
      : logit(Lanes::set(cutoff.logit)),
        id_end(Lanes::set(cutoff.id + 1u)),
        excludes_finite(cutoff.logit > kMinusInfinity) {}
  FD_RULE M is_allowed(F scaled, U ids) const {
    const M tied = Lanes::both(Lanes::equal(scaled, logit), Lanes::is_negative(Lanes::sub(ids, id_end)));
    return Lanes::either(Lanes::greater(scaled, logit), tied);
  }
};

// Divides by the temperature, unless it is 1.
struct Scale {
  F temperature;
  bool is_one;
  explicit FD_RULE Scale(const Row& row) : temperature(Lanes::set(row.temperature)), is_one(row.temperature == 1.0f) {}
  FD_RULE F operator()(F x) const { return is_one ? x : Lanes::div(x, temperature); }
};

float block_maxima(const float* logits, int32_t num_ids, float* block_max) {
  Block storage;
  float largest = kMinusInfinity;
  bool any_nan = false;
  for (int32_t b = 0; b < num_blocks(num_ids); ++b) {
    const float* x = storage.read(logits, num_ids, b);
    F most = Lanes::set(kMinusInfinity);
    uint32_t nan = 0;
    for (int i = 0; i < kBlock; i += 2 * kWidth) {
      const F one = Lanes::load(x + i), two = Lanes::load(x + i + kWidth);
      nan |= Lanes::mask_bits(Lanes::unordered(one, two));
      most = Lanes::max(most, Lanes::max(one, two));
    }
    block_max[b] = nan != 0 ? __builtin_nanf("") : Lanes::reduce_max(most);
    if (block_max[b] > largest) largest = block_max[b];
    any_nan |= nan != 0;
  }
  return any_nan ? __builtin_nanf("") : largest;
}

// Returns whether every id of a block with this maximum is excluded by the cutoff or has no mass.
FD_RULE bool has_no_mass(const Row& row, Cutoff cutoff, float block_max) {
  return block_max < cutoff.logit || row.largest - block_max > 29.0f;
}

// Appends the keys of the ids of a block whose bits are set in `selected`.
FD_RULE int32_t append_keys(uint64_t selected, const float* logits, float temperature, int32_t first_id,
                            uint64_t* keys) {
  int32_t count = 0;
  for (; selected != 0; selected &= selected - 1) {
    const int i = __builtin_ctzll(selected);
    keys[count++] = order_key(logits[i] / temperature, static_cast<uint32_t>(first_id + i));
  }
  return count;
}

int32_t gather_keys(const Row& row, Cutoff cutoff, float lowest, float end, int32_t every, uint64_t* keys) {
  Block storage;
  const VectorCutoff wide(cutoff);
  const Scale scale(row);
  const F begin = Lanes::set(lowest), stop = Lanes::set(end);
  int32_t count = 0;
  for (int32_t b = 0; b < num_blocks(row.num_ids); b += every) {
    if (row.block_max[b] < cutoff.logit || row.block_max[b] < lowest) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    uint64_t selected = 0;
    for (int i = 0; i < kBlock; i += kWidth) {
      const F s = scale(Lanes::load(x + i));
      const M within = Lanes::both(Lanes::at_least(s, begin), Lanes::greater(stop, s));
      const M matches = Lanes::both(wide.is_allowed(s, ids_from(b * kBlock + i)), within);
      selected |= static_cast<uint64_t>(Lanes::mask_bits(matches)) << i;
    }
    count += append_keys(selected, x, row.temperature, b * kBlock, keys + count);
  }
  return count;
}

Masses masses(const Row& row, Cutoff cutoff, Pivots pivots) {
  Block storage;
  const VectorCutoff wide(cutoff);
  const Scale scale(row);
  const F largest = Lanes::set(row.largest), excluded = Lanes::set(kMinusInfinity);
  F pivot[kNumPivots];
  for (int e = 0; e < kNumPivots; ++e) pivot[e] = Lanes::set(pivots.logits[e]);
  Lanes::Mass total = {}, reached[kNumPivots] = {};
  for (int32_t b = 0; b < num_blocks(row.num_ids); ++b) {
    if (has_no_mass(row, cutoff, row.block_max[b])) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    for (int i = 0; i < kBlock; i += kWidth) {
      F s = scale(Lanes::load(x + i));
      if (wide.excludes_finite) s = Lanes::select(wide.is_allowed(s, ids_from(b * kBlock + i)), s, excluded);
      const Lanes::Mass mass = Lanes::mass(relative_probability<Lanes>(s, largest));
      total = Lanes::add(total, mass);
      for (int e = 0; e < kNumPivots; ++e)
        reached[e] = Lanes::add_where(Lanes::at_least(s, pivot[e]), reached[e], mass);
    }
  }
  Masses sums = {Lanes::sum(total), {}};
  for (int e = 0; e < kNumPivots; ++e) sums.reached[e] = Lanes::sum(reached[e]);
  return sums;
}

// Approximates e^(logit - largest) of scaled logits from above, by at most a factor of kMaxOverestimate. The bits of a
// float, read as an integer, are piecewise linear in its binary logarithm. A float whose bits are computed from the
// logarithm is at least the power of two and at most 1.0615 times that. The 0.005 added here exceeds all rounding
// errors.
struct ApproxMass {
  F slope, one;
  explicit FD_RULE ApproxMass(const Row& row) {
    constexpr float per_nat = 0x1.715476p0f * 0x1p23f;
    slope = Lanes::set(per_nat / row.temperature);
    one = Lanes::set(127.005f * 0x1p23f - row.largest * per_nat);
  }
  FD_RULE F operator()(F logit) const {
    return Lanes::from_bits(Lanes::truncate(Lanes::max(Lanes::fma(logit, slope, one), Lanes::set(0.0f))));
  }
};

FD_RULE double sum_lanes(F x) {
  float lanes[kWidth];
  Lanes::store(lanes, x);
  double total = 0;
  for (float lane : lanes) total += static_cast<double>(lane);
  return total;
}

ApproxMasses approx_masses(const Row& row, float lowest, float highest) {
  constexpr int32_t max_blocks = 512;  // blocks that are summed in fp32 without much rounding
  Block storage;
  const ApproxMass approx(row);
  const F least = Lanes::set(lowest), most = Lanes::set(highest), none = Lanes::set(0.0f);
  ApproxMasses sums = {0, 0, 0};
  for (int32_t begin = 0; begin < num_blocks(row.num_ids); begin += max_blocks) {
    F above = none, within = none, below = none;
    for (int32_t b = begin; b < num_blocks(row.num_ids) && b < begin + max_blocks; ++b) {
      if (has_no_mass(row, Cutoff{kMinusInfinity, -1}, row.block_max[b])) continue;
      const float* x = storage.read(row.logits, row.num_ids, b);
      for (int i = 0; i < kBlock; i += kWidth) {
        const F logit = Lanes::load(x + i), mass = approx(logit);
        const M is_above = Lanes::greater(logit, most), is_below = Lanes::greater(least, logit);
        above = Lanes::add(above, Lanes::select(is_above, mass, none));
        below = Lanes::add(below, Lanes::select(is_below, mass, none));
        within = Lanes::add(within, Lanes::select(Lanes::either(is_above, is_below), none, mass));
      }
    }
    sums.above += sum_lanes(above), sums.within += sum_lanes(within), sums.below += sum_lanes(below);
  }
  return sums;
}

void masses_of_keys(const uint64_t* keys, int64_t count, float largest, uint64_t* masses) {
  const F wide_largest = Lanes::set(largest);
  for (int64_t first = 0; first < count; first += kWidth) {
    float logits[kWidth];
    uint64_t mass[kWidth];
    for (int i = 0; i < kWidth; ++i) logits[i] = first + i < count ? key_logit(keys[first + i]) : kMinusInfinity;
    Lanes::store(mass, Lanes::mass(relative_probability<Lanes>(Lanes::load(logits), wide_largest)));
    for (int i = 0; i < kWidth && first + i < count; ++i) masses[first + i] = mass[i];
  }
}

// The best value and its id in each lane; an equal value with a higher id does not replace it.
struct Best {
  F value = Lanes::set(kMinusInfinity);
  U id = Lanes::set(0xffffffffu);
  FD_RULE void offer(F candidate, U ids) {
    const M better = Lanes::greater(candidate, value);
    value = Lanes::select(better, candidate, value);
    id = Lanes::select(better, ids, id);
  }
  FD_RULE BestId over_lanes() const {
    float values[kWidth];
    uint32_t ids[kWidth];
    Lanes::store(values, value);
    Lanes::store(ids, id);
    int best = 0;
    for (int i = 1; i < kWidth; ++i) {
      if (values[i] > values[best] || (values[i] == values[best] && ids[i] < ids[best])) best = i;
    }
    return {values[best], static_cast<int32_t>(ids[best])};
  }
};

// Loads the scaled logits of kGroup ids from first_id on, -inf if they are not allowed. Returns false if none is
// allowed.
FD_RULE bool load_allowed(const float* x, int32_t first_id, const VectorCutoff& wide, const Scale& scale, F scaled[4]) {
  uint32_t any = wide.excludes_finite ? 0 : 1;
  for (int i = 0; i < 4; ++i) {
    scaled[i] = scale(Lanes::load(x + i * kWidth));
    if (!wide.excludes_finite) continue;
    const M allowed = wide.is_allowed(scaled[i], ids_from(first_id + i * kWidth));
    scaled[i] = Lanes::select(allowed, scaled[i], Lanes::set(kMinusInfinity));
    any |= Lanes::mask_bits(allowed);
  }
  return any != 0;
}

BestId gumbel_argmax(const Row& row, Cutoff cutoff, BlockRange blocks, uint64_t seed, uint64_t position) {
  Block storage;
  Best best;
  const VectorCutoff wide(cutoff);
  const Scale scale(row);
  float best_value = kMinusInfinity;
  for (int32_t b = blocks.begin; b < blocks.end; ++b) {
    if (row.block_max[b] < cutoff.logit || row.block_max[b] + kLargestGumbel < best_value) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    for (int base = 0; base < kBlock; base += kGroup) {
      F scaled[4];
      U words[4];
      const int32_t first_id = b * kBlock + base;
      if (!load_allowed(x + base, first_id, wide, scale, scaled)) continue;
      group_words(first_id, seed, position, words);
      for (int i = 0; i < 4; ++i) {
        // Ids are processed in ascending order, so an id that cannot exceed the best value so far cannot be the result.
        const M may_win = Lanes::greater(Lanes::add(scaled[i], noise_bound<Lanes>(words[i])), Lanes::set(best_value));
        if (Lanes::mask_bits(may_win) == 0) continue;
        best.offer(Lanes::add(scaled[i], gumbel_from_word<Lanes>(words[i])), ids_from(first_id + i * kWidth));
        best_value = Lanes::reduce_max(best.value);
      }
    }
  }
  return best.over_lanes();
}

void write_processed(const Row& row, Cutoff cutoff, float* out) {
  const VectorCutoff wide(cutoff);
  const Scale scale(row);
  const F excluded = Lanes::set(kMinusInfinity);
  int32_t i = 0;
  for (; i + kWidth <= row.num_ids; i += kWidth) {
    const F scaled = scale(Lanes::load(row.logits + i));
    Lanes::store(out + i, Lanes::select(wide.is_allowed(scaled, ids_from(i)), scaled, excluded));
  }
  for (; i < row.num_ids; ++i) {
    const float scaled = row.logits[i] / row.temperature;
    out[i] = is_allowed(cutoff, scaled, i) ? scaled : kMinusInfinity;
  }
}

void apply_mask(const float* logits, const int32_t* mask, int32_t num_ids, float* out) {
  const F excluded = Lanes::set(kMinusInfinity);
  int32_t i = 0;
  for (; i + 32 <= num_ids; i += 32) {
    uint32_t bits = static_cast<uint32_t>(mask[i / 32]);
    for (int k = 0; k < 32; k += kWidth, bits >>= kWidth) {
      Lanes::store(out + i + k, Lanes::select(Lanes::lanes_of(bits), Lanes::load(logits + i + k), excluded));
    }
  }
  for (; i < num_ids; ++i) out[i] = mask_allows(mask, i) ? logits[i] : kMinusInfinity;
}

int64_t count_before(const float* logits, int32_t num_ids, float logit, int32_t id) {
  Block storage;
  const VectorCutoff wide(Cutoff{logit, id - 1});
  int64_t count = 0;
  for (int32_t b = 0; b < num_blocks(num_ids); ++b) {
    const float* x = storage.read(logits, num_ids, b);
    for (int i = 0; i < kBlock; i += kWidth) {
      count += __builtin_popcount(Lanes::mask_bits(wide.is_allowed(Lanes::load(x + i), ids_from(b * kBlock + i))));
    }
  }
  return count;
}

}  // namespace

extern const SamplingKernels kSamplingKernels;
const SamplingKernels kSamplingKernels = {block_maxima,  masses,          approx_masses, masses_of_keys, gather_keys,
                                          gumbel_argmax, write_processed, apply_mask,    count_before};

}  // namespace FD_ISA
}  // namespace fd
