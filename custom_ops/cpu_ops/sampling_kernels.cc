// SPDX-License-Identifier: Apache-2.0
// Compiled once per FD_ISA path. Rows are walked in blocks of 64 ids; a block whose largest logit already decides the
// question is skipped. A last, partial block is read from a copy that is padded with -inf.
#include "cpu_ops/sampling_kernels.h"

#include "cpu_ops/sampling_lanes.h"

namespace fd {
namespace FD_ISA {
namespace {

using F = Lanes::F;
using U = Lanes::U;
using M = Lanes::M;
constexpr int kWidth = Lanes::kWidth;
constexpr int kGroup = 4 * kWidth;  // ids that one call of the generator serves
constexpr float kMinusInfinity = -__builtin_inff();

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

struct WideCut {
  F logit;
  U id_end;
  bool cuts;  // ids other than those at -inf, which have no mass and never win
  explicit FD_RULE WideCut(Cut cut)
      : logit(Lanes::set(cut.logit)), id_end(Lanes::set(cut.id + 1u)), cuts(cut.logit > kMinusInfinity) {}
  FD_RULE M survives(F scaled, U ids) const {
    const M tied = Lanes::both(Lanes::equal(scaled, logit), Lanes::is_negative(Lanes::sub(ids, id_end)));
    return Lanes::either(Lanes::greater(scaled, logit), tied);
  }
};

// Divides by the temperature; a temperature of 1 costs nothing.
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

// True if every id of a block with this maximum fails the cut or has no mass.
FD_RULE bool weightless(const Row& row, Cut cut, float block_max) {
  return block_max < cut.logit || row.largest - block_max > 29.0f;
}

// Appends the keys of the ids of a block whose bit is set.
FD_RULE int32_t append_keys(uint64_t chosen, const float* logits, float temperature, int32_t first_id, uint64_t* keys) {
  int32_t count = 0;
  for (; chosen != 0; chosen &= chosen - 1) {
    const int i = __builtin_ctzll(chosen);
    keys[count++] = order_key(logits[i] / temperature, static_cast<uint32_t>(first_id + i));
  }
  return count;
}

int32_t gather(const Row& row, Cut cut, float lowest, float end, int32_t every, uint64_t* keys) {
  Block storage;
  const WideCut wide(cut);
  const Scale scale(row);
  const F first = Lanes::set(lowest), behind = Lanes::set(end);
  int32_t count = 0;
  for (int32_t b = 0; b < num_blocks(row.num_ids); b += every) {
    if (row.block_max[b] < cut.logit || row.block_max[b] < lowest) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    uint64_t chosen = 0;
    for (int i = 0; i < kBlock; i += kWidth) {
      const F s = scale(Lanes::load(x + i));
      const M within = Lanes::both(Lanes::at_least(s, first), Lanes::greater(behind, s));
      const M kept = Lanes::both(wide.survives(s, ids_from(b * kBlock + i)), within);
      chosen |= static_cast<uint64_t>(Lanes::mask_bits(kept)) << i;
    }
    count += append_keys(chosen, x, row.temperature, b * kBlock, keys + count);
  }
  return count;
}

Masses masses(const Row& row, Cut cut, Edges edges) {
  Block storage;
  const WideCut wide(cut);
  const Scale scale(row);
  const F largest = Lanes::set(row.largest), gone = Lanes::set(kMinusInfinity);
  F edge[kNumEdges];
  for (int e = 0; e < kNumEdges; ++e) edge[e] = Lanes::set(edges.logits[e]);
  Lanes::Mass total = {}, reached[kNumEdges] = {};
  for (int32_t b = 0; b < num_blocks(row.num_ids); ++b) {
    if (weightless(row, cut, row.block_max[b])) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    for (int i = 0; i < kBlock; i += kWidth) {
      F s = scale(Lanes::load(x + i));
      if (wide.cuts) s = Lanes::select(wide.survives(s, ids_from(b * kBlock + i)), s, gone);
      const Lanes::Mass mass = Lanes::mass(relative_probability<Lanes>(s, largest));
      total = Lanes::add(total, mass);
      for (int e = 0; e < kNumEdges; ++e) reached[e] = Lanes::add_where(Lanes::at_least(s, edge[e]), reached[e], mass);
    }
  }
  Masses sums = {Lanes::sum(total), {}};
  for (int e = 0; e < kNumEdges; ++e) sums.reached[e] = Lanes::sum(reached[e]);
  return sums;
}

// At least e^(logit - largest) of scaled logits, and at most kRoughness times that. The bits of a float, read as an
// integer, are piecewise linear in its binary logarithm: a float made of the logarithm is at least the power of two,
// and at most 1.0615 times that. All rounding together is worth less than the 0.005 added here.
struct RoughMass {
  F slope, one;
  explicit FD_RULE RoughMass(const Row& row) {
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

RoughMasses rough_masses(const Row& row, float lowest, float highest) {
  constexpr int32_t stretch = 512;  // blocks that floats add up without losing much
  Block storage;
  const RoughMass rough(row);
  const F least = Lanes::set(lowest), most = Lanes::set(highest), none = Lanes::set(0.0f);
  RoughMasses sums = {0, 0, 0};
  for (int32_t begin = 0; begin < num_blocks(row.num_ids); begin += stretch) {
    F above = none, within = none, below = none;
    for (int32_t b = begin; b < num_blocks(row.num_ids) && b < begin + stretch; ++b) {
      if (weightless(row, Cut{kMinusInfinity, -1}, row.block_max[b])) continue;
      const float* x = storage.read(row.logits, row.num_ids, b);
      for (int i = 0; i < kBlock; i += kWidth) {
        const F logit = Lanes::load(x + i), mass = rough(logit);
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

// Random words of the kGroup ids from first_id, a multiple of kGroup.
FD_RULE void group_words(int32_t first_id, uint64_t seed, uint64_t position, U words[4]) {
  const U groups = Lanes::add(Lanes::set(static_cast<uint32_t>(first_id) / 4), Lanes::group_iota());
  noise_words<Lanes>(groups, seed, position, words);
  Lanes::interleave(words);
}

// At least the noise of these words, from one conversion: noise = -log(-log1p(-w)) <= -log(w), and the bits of a float,
// read as an integer, are a piecewise linear lower bound of its binary logarithm.
FD_RULE F noise_bound(U words) {
  const U half = Lanes::bit_and(Lanes::template shift_right_signed<1>(words), Lanes::set(0x7fffffffu));
  const F linear = Lanes::to_float(Lanes::bits(Lanes::to_float(half)));  // (log2(half) + 127) * 2^23, or less
  return Lanes::fma(linear, Lanes::set(-kLn2 * 0x1p-23f), Lanes::set((31.0f + 127.0f) * kLn2 + 0.01f));
}

// The best (value, id) of each lane; a later id must be strictly better.
struct Best {
  F value = Lanes::set(kMinusInfinity);
  U id = Lanes::set(0xffffffffu);
  FD_RULE void offer(F candidate, U ids) {
    const M better = Lanes::greater(candidate, value);
    value = Lanes::select(better, candidate, value);
    id = Lanes::select(better, ids, id);
  }
  FD_RULE Drawn lowest_id() const {
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

// Scaled logits of the kGroup ids from first_id, -inf where they do not survive. Returns whether any may.
FD_RULE bool load_survivors(const float* x, int32_t first_id, const WideCut& wide, const Scale& scale, F scaled[4]) {
  uint32_t any = wide.cuts ? 0 : 1;
  for (int i = 0; i < 4; ++i) {
    scaled[i] = scale(Lanes::load(x + i * kWidth));
    if (!wide.cuts) continue;
    const M kept = wide.survives(scaled[i], ids_from(first_id + i * kWidth));
    scaled[i] = Lanes::select(kept, scaled[i], Lanes::set(kMinusInfinity));
    any |= Lanes::mask_bits(kept);
  }
  return any != 0;
}

Drawn draw(const Row& row, Cut cut, BlockRange blocks, uint64_t seed, uint64_t position) {
  Block storage;
  Best best;
  const WideCut wide(cut);
  const Scale scale(row);
  float to_beat = kMinusInfinity;
  for (int32_t b = blocks.begin; b < blocks.end; ++b) {
    if (row.block_max[b] < cut.logit || row.block_max[b] + kLargestGumbel < to_beat) continue;
    const float* x = storage.read(row.logits, row.num_ids, b);
    for (int base = 0; base < kBlock; base += kGroup) {
      F scaled[4];
      U words[4];
      const int32_t first_id = b * kBlock + base;
      if (!load_survivors(x + base, first_id, wide, scale, scaled)) continue;
      group_words(first_id, seed, position, words);
      for (int i = 0; i < 4; ++i) {
        // Ids come in ascending order, so one that cannot exceed the best so far cannot win.
        const M hopeful = Lanes::greater(Lanes::add(scaled[i], noise_bound(words[i])), Lanes::set(to_beat));
        if (Lanes::mask_bits(hopeful) == 0) continue;
        best.offer(Lanes::add(scaled[i], gumbel_from_word<Lanes>(words[i])), ids_from(first_id + i * kWidth));
        to_beat = Lanes::reduce_max(best.value);
      }
    }
  }
  return best.lowest_id();
}

void write_scaled(const Row& row, Cut cut, float* out) {
  const WideCut wide(cut);
  const Scale scale(row);
  const F gone = Lanes::set(kMinusInfinity);
  int32_t i = 0;
  for (; i + kWidth <= row.num_ids; i += kWidth) {
    const F scaled = scale(Lanes::load(row.logits + i));
    Lanes::store(out + i, Lanes::select(wide.survives(scaled, ids_from(i)), scaled, gone));
  }
  for (; i < row.num_ids; ++i) {
    const float scaled = row.logits[i] / row.temperature;
    out[i] = survives(cut, scaled, i) ? scaled : kMinusInfinity;
  }
}

void apply_mask(const float* logits, const int32_t* mask, int32_t num_ids, float* out) {
  const F gone = Lanes::set(kMinusInfinity);
  int32_t i = 0;
  for (; i + 32 <= num_ids; i += 32) {
    uint32_t bits = static_cast<uint32_t>(mask[i / 32]);
    for (int k = 0; k < 32; k += kWidth, bits >>= kWidth) {
      Lanes::store(out + i + k, Lanes::select(Lanes::lanes_of(bits), Lanes::load(logits + i + k), gone));
    }
  }
  for (; i < num_ids; ++i) out[i] = (mask[i / 32] >> (i % 32)) & 1 ? logits[i] : kMinusInfinity;
}

int64_t count_before(const float* logits, int32_t num_ids, float logit, int32_t id) {
  Block storage;
  const WideCut wide(Cut{logit, id - 1});
  int64_t count = 0;
  for (int32_t b = 0; b < num_blocks(num_ids); ++b) {
    const float* x = storage.read(logits, num_ids, b);
    for (int i = 0; i < kBlock; i += kWidth) {
      count += __builtin_popcount(Lanes::mask_bits(wide.survives(Lanes::load(x + i), ids_from(b * kBlock + i))));
    }
  }
  return count;
}

void gumbel_noise(uint64_t seed, uint64_t position, int32_t num_ids, float* noise) {
  for (int32_t first = 0; first < num_ids; first += kGroup) {
    U words[4];
    float narrow[kGroup];
    group_words(first, seed, position, words);
    for (int i = 0; i < 4; ++i) Lanes::store(narrow + i * kWidth, gumbel_from_word<Lanes>(words[i]));
    for (int32_t i = 0; i < kGroup && first + i < num_ids; ++i) noise[first + i] = narrow[i];
  }
}

}  // namespace

extern const SamplingKernels kSamplingKernels;
const SamplingKernels kSamplingKernels = {block_maxima, masses,       rough_masses, masses_of_keys, gather,
                                          draw,         write_scaled, apply_mask,   count_before,   gumbel_noise};

}  // namespace FD_ISA
}  // namespace fd
