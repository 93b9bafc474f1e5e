// SPDX-License-Identifier: Apache-2.0
// Passes over one row of logits, one table of them per instruction-set path. All paths return the same bits.
#pragma once

#include <cstdint>

#include "common/sampling.h"

namespace fd {

constexpr int kBlock = 64;  // ids that one entry of Row::block_max stands for

constexpr int32_t num_blocks(int64_t num_ids) { return static_cast<int32_t>((num_ids + kBlock - 1) / kBlock); }

// A row after biases, penalties and masks. Scaled logits are logits / temperature; they are formed where they are used.
struct Row {
  const float* logits;     // [num_ids]
  int32_t num_ids;         // ids from here on never survive
  const float* block_max;  // [ceil(num_ids / kBlock)] largest scaled logit of each block
  float largest;           // of the scaled logits
  float temperature;
};

// Scaled logits, in any order.
constexpr int kNumEdges = 2;
struct Edges {
  float logits[kNumEdges];
};

// The mass of all surviving ids, and of those whose scaled logit is at least each edge.
struct Masses {
  uint64_t total;
  uint64_t reached[kNumEdges];
};

// Probabilities relative to the largest, added up by where logits lie: above, within or below a range. Each is at least
// the sum of the true values and at most kRoughness times that.
constexpr double kRoughness = 1.07;
constexpr float kMostRoughLogit = 1024.0f;  // rows whose largest scaled logit is larger, of either sign, round too much
struct RoughMasses {
  double above, within, below;
};

// Blocks [begin, end) of a row.
struct BlockRange {
  int32_t begin, end;
};

// The best of some ids, the lowest of equals; -inf and -1 if none of them survives.
struct Drawn {
  float value;
  int32_t id;
};

struct SamplingKernels {
  // Fills block_max with unscaled maxima and returns the largest logit; NaN for a block or row that has one.
  float (*block_maxima)(const float* logits, int32_t num_ids, float* block_max);
  Masses (*masses)(const Row& row, Cut cut, Edges edges);
  // The masses of all ids by where their logits, not divided by the temperature, lie to [lowest, highest].
  RoughMasses (*rough_masses)(const Row& row, float lowest, float highest);
  // Writes the masses of the ids of these order keys.
  void (*masses_of_keys)(const uint64_t* keys, int64_t count, float largest, uint64_t* masses);
  // Writes the order keys of surviving ids with lowest <= scaled logit < end, ids ascending, from every `every`-th
  // block; returns how many there are.
  int32_t (*gather)(const Row& row, Cut cut, float lowest, float end, int32_t every, uint64_t* keys);
  // Returns the best (scaled logit + noise) of the survivors in these blocks.
  Drawn (*draw)(const Row& row, Cut cut, BlockRange blocks, uint64_t seed, uint64_t position);
  // Writes scaled logits to out, -inf for ids that do not survive; out may be row.logits.
  void (*write_scaled)(const Row& row, Cut cut, float* out);
  // Writes logits to out, -inf for ids whose bit in the mask is 0; out may be logits.
  void (*apply_mask)(const float* logits, const int32_t* mask, int32_t num_ids, float* out);
  // Returns the number of ids in front of (logit, id) in the order of ids.
  int64_t (*count_before)(const float* logits, int32_t num_ids, float logit, int32_t id);
  // noise[v] = gumbel noise of id v.
  void (*gumbel_noise)(uint64_t seed, uint64_t position, int32_t num_ids, float* noise);
};

namespace portable {
extern const SamplingKernels kSamplingKernels;
}
namespace avx2 {
extern const SamplingKernels kSamplingKernels;
}
namespace avx512 {
extern const SamplingKernels kSamplingKernels;
}
namespace avx512_bf16 {
extern const SamplingKernels kSamplingKernels;
}

// Returns the table of the path that this process runs.
const SamplingKernels& sampling_kernels();

}  // namespace fd
