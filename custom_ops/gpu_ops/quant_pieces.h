// SPDX-License-Identifier: Apache-2.0
// How the warps of a block share K where rows are few: each takes every kSplit-th group of inputs, and what it finds is
// joined in the order of groups (common/quant.h). In w8a8, where all inputs are one group, each takes every kSplit-th
// stage, and their sums are added.
#pragma once

#include "gpu_ops/quant_tiles.h"

namespace fd::gpu {

constexpr int kSplit = 4;  // warps of a block

// Stages of a warp, of 3 to 8 KiB. What limits decoding is how much memory is under way, not how many warps there are:
// two or three blocks have 50 to 100 KiB under way on a multiprocessor.
template <Quantization kQuantization, int kNTiles>
constexpr int kPieceStages = has_four_bits(kQuantization) ? (kNTiles == 1   ? 5
                                                             : kNTiles == 2 ? 4
                                                                            : 3)
                                                          : (kNTiles < 4 ? 3 : 2);

template <Quantization kQuantization, int kNTiles>
struct PiecesShared {
  static constexpr int kRows = 8 * kNTiles / QuantFormat<kQuantization>::kLimbs;
  static constexpr int kValues = 2 * kNTiles * QuantProduct<kQuantization, kNTiles>::kValues;  // of a lane
  using Stage = QuantStage<kQuantization, 2, 8 * kNTiles>;

  // What a warp found for a group: sums in fp32, integers in w8a8, and in formats of four bits their scales.
  struct Group {
    uint32_t sums[kValues][kWarpSize];
    float scales[kPairRows];
  };

  union {
    Stage stages[kSplit][kPieceStages<kQuantization, kNTiles>];
    float totals[kRows][kPairRows + kSumPadding];
  };
  Group groups[2][kSplit];
};

// Adds the groups of a round to the totals of some values of each lane: warp w has a quarter of them, from
// w * kValues / kSplit on.
template <Quantization kQuantization, int kNTiles>
struct PieceTotals {
  using Product = QuantProduct<kQuantization, kNTiles>;
  using Shared = PiecesShared<kQuantization, kNTiles>;
  using Format = QuantFormat<kQuantization>;
  static constexpr int kOwn = Shared::kValues / kSplit;
  static_assert(Shared::kValues % kSplit == 0);

  float totals[kOwn], scales[kOwn];

  FD_DEVICE static int value(int i) { return static_cast<int>(warp_index()) * kOwn + i; }
  FD_DEVICE static int weight_row(int i) {
    return Product::weight_row(value(i) / (kNTiles * Product::kValues), value(i) % Product::kValues);
  }
  FD_DEVICE static int row(int i) {
    return Product::row(value(i) / Product::kValues % kNTiles, value(i) % Product::kValues);
  }

  explicit FD_DEVICE PieceTotals(const QuantOperands& from) {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      totals[i] = 0.0f;
      if (!Format::kFourBits) scales[i] = scale_of_row(from, weight_row(i) / 16, weight_row(i) % 16);
    }
  }

  // Adds the group that a warp found.
  FD_DEVICE void add(const typename Shared::Group& group) {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const float scale = Format::kFourBits ? group.scales[weight_row(i)] : scales[i];
      totals[i] = fused_multiply_add(bit_cast<float>(group.sums[value(i)][lane_index()]), scale, totals[i]);
    }
  }
  // Adds the only group, of which each warp found a part.
  FD_DEVICE void add_parts(const typename Shared::Group (&parts)[kSplit]) {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      int32_t sum = 0;
      for (const auto& part : parts) sum += static_cast<int32_t>(part.sums[value(i)][lane_index()]);
      totals[i] = add_group(sum, scales[i], 0.0f);
    }
  }
  FD_DEVICE void store(Shared& shared) const {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i) shared.totals[row(i)][weight_row(i)] = totals[i];
  }
};

// Writes what a warp found for a group. `stage` is the last one of the group, or null if there was none.
template <Quantization kQuantization, int kNTiles, class Stage, class Group>
FD_DEVICE void store_group(const QuantProduct<kQuantization, kNTiles>& product, const Stage* stage, Group& group) {
  using Product = QuantProduct<kQuantization, kNTiles>;
  FD_UNROLL
  for (int i = 0; i < 2 * kNTiles * Product::kValues; ++i) {
    const int m = i / (kNTiles * Product::kValues), n = i / Product::kValues % kNTiles, j = i % Product::kValues;
    if constexpr (kQuantization == Quantization::kW8a8) {
      group.sums[i][lane_index()] = static_cast<uint32_t>(product.integer_sum(m, n, j));
    } else {
      group.sums[i][lane_index()] = bit_cast<uint32_t>(product.sum(m, n, j));
    }
  }
  if constexpr (has_four_bits(kQuantization))
    group.scales[lane_index()] = Product::scale(*stage, 0, static_cast<int>(lane_index()));
}

// The stages of one warp: it takes every kSplit-th group, in w8a8 every kSplit-th stage.
template <Quantization kQuantization>
struct PieceOrder {
  static constexpr int kTurn = kQuantization == Quantization::kW8a8 ? 1 : QuantFormat<kQuantization>::kGroupStages;
  int num_turns, num_stages;  // of all warps together

  explicit FD_DEVICE PieceOrder(int count) : num_turns((count + kTurn - 1) / kTurn), num_stages(count) {}
  FD_DEVICE int stage(int warp, int i) const { return (i / kTurn * kSplit + warp) * kTurn + i % kTurn; }
  FD_DEVICE int count(int warp) const {
    const int turns = (num_turns - warp + kSplit - 1) / kSplit;
    const int missing = (num_turns - 1) % kSplit == warp ? num_turns * kTurn - num_stages : 0;
    return turns * kTurn - missing;
  }
};

}  // namespace fd::gpu
