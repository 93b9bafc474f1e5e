// SPDX-License-Identifier: Apache-2.0
// What append attention is compiled for, and what its kernel and its blocks work with.
#pragma once

#include "gpu_ops/attention_cache.h"
#include "gpu_ops/attention_plan.h"
#include "gpu_ops/tiles.h"

namespace fd::gpu {

constexpr int kKvRows = 64;                     // positions of a stage
constexpr int kSplitStages = kSplit / kKvRows;  // stages of keys, and as many of values
constexpr int kSegment = 16;                    // positions that always are in one block of the cache
constexpr int kGroupSegments = kGroupSplits * kSplit / kSegment;
constexpr int kWarpsPerGroup = 4, kGroupRows = 32;
constexpr int kPlaceBytes = 64;  // the keys, values and scales of a segment begin at multiples of them

template <int kDim, int kGroups, bool kCodes>
struct AttentionConfig {
  static constexpr int kHeadDim = kDim, kRowGroups = kGroups;
  static constexpr bool kIsInt8 = kCodes;
  static constexpr int kTileRows = kGroupRows * kGroups, kThreads = 128 * kGroups;
  static constexpr int kStages = kDim * (kCodes ? 1 : 2) * kGroups >= 512 ? 2 : 3;  // as shared memory allows
  static constexpr int kNTiles = kDim / (8 * kWarpsPerGroup);  // of 8 elements of a value, for each warp
  // What one `load_matrix_x4` brings: steps of keys; steps and tiles of values.
  static constexpr int kKeySteps = kCodes ? 2 : 1;
  static constexpr int kValueSteps = kCodes && kNTiles == 2 ? 2 : 1, kValueTiles = kCodes && kNTiles > 2 ? 4 : 2;
  // How many 16 x 16 parts of the queries a warp holds in registers, as many as these suffice for.
  static constexpr int kHeldQueries = kDim == 256 || (kCodes && kGroups == 2) ? 0 : kGroups == 2 ? 4 : 16;
  using Layout = CacheLayout<kDim, kCodes>;
};

struct AttentionSizes {
  int32_t num_heads, kv_heads, block_size, max_blocks;
  int32_t num_masked_prefix;
  int32_t num_slots;  // rows of partial results per KV head
  float scale;        // of the scores, times log2(e)
};

// Keys or values of 64 positions.
template <class Config, bool kIsInt8 = Config::kIsInt8>
struct AttentionStage {
  Tile<kKvRows, Config::Layout::kRowBytes> rows;
};
template <class Config>
struct AttentionStage<Config, true> {
  static constexpr int kSegments = kKvRows / kSegment;

  Tile<kKvRows, Config::Layout::kRowBytes> rows;
  Tile<kSegments, 4 * kSegment> key_scales, value_scales;  // both with the keys
};

template <class Config>
struct AttentionShared {
  AttentionStage<Config> stages[Config::kStages];
  Tile<Config::kTileRows, 2 * Config::kHeadDim> queries;
  Tile<Config::kTileRows, 2 * kSplit> weights;
  alignas(16) float maxima[Config::kTileRows][kWarpsPerGroup];  // of a row's scores in a split, by warp
  alignas(16) float sums[Config::kTileRows][kWarpsPerGroup];    // of its weights
  int32_t source[Config::kTileRows];                            // the head of a row in qkv; -1: none
  int32_t limit[Config::kTileRows];                             // the last position that a row attends to; -1: none
  uint32_t places[2 * kGroupSegments];  // of the segments of two groups of splits, in units of kPlaceBytes
  uint32_t scale_places[Config::kIsInt8 ? 2 * kGroupSegments : 1];
  int32_t is_found[Config::kThreads / kWarpSize];
  float value_scales[Config::kIsInt8 ? kSplit : 1];  // of a split
};

// Pointers into the arrays of a launch.
struct AttentionArrays {
  const uint16_t* qkv;
  const uint8_t *key, *value;
  const int32_t* block_tables;
  const PlanMember* members;
  float* values;   // [slots][kHeadDim] of partial results
  uint64_t* sums;  // [slots] their PartSums
};

}  // namespace fd::gpu
