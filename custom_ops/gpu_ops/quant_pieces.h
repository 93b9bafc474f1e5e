// SPDX-License-Identifier: Apache-2.0
// How the warps of a block share K where rows are few: each takes every kSplit-th turn of inputs, and what it finds,
// one value per output, joins the total in the order of turns (common/quant.h).
#pragma once

#include "gpu_ops/quant_tiles.h"

namespace fd::gpu {

constexpr int kSplit = 4;  // warps of a block

// Stages of a warp, of 3 to 8 KiB. What limits decoding is how much memory is under way, not how many warps there are:
// two or three blocks have 50 to 100 KiB under way on a multiprocessor.
template <Quantization kQuantization, int kNTiles>
constexpr int kPieceStages = has_four_bits(kQuantization)           ? (kNTiles == 1 ? 4 : 3)
                             : kQuantization == Quantization::kW8a8 ? (kNTiles == 1 ? 3 : 2)
                                                                    : (kNTiles < 4 ? 3 : 2);

template <Quantization kQuantization, int kNTiles>
struct PiecesShared {
  static constexpr int kRows = 8 * kNTiles / QuantFormat<kQuantization>::kLimbs;
  static constexpr int kValues = 2 * kNTiles * QuantProduct<kQuantization, kNTiles>::kValues;  // of a lane
  using Stage = QuantStage<kQuantization, 2, 8 * kNTiles>;

  // What a warp found in a turn.
  struct Turn {
    float values[kValues][kWarpSize];

    FD_DEVICE void store(int m, int n, int j, float value) {
      values[(m * kNTiles + n) * (kValues / (2 * kNTiles)) + j][lane_index()] = value;
    }
  };

  union {
    Stage stages[kSplit][kPieceStages<kQuantization, kNTiles>];
    float totals[kRows][kPairRows + kSumPadding];
  };
  Turn turns[2][kSplit];
};

// Adds the turns of a round to the totals of some values of each lane: warp w has a quarter of them, from
// w * kValues / kSplit on.
template <Quantization kQuantization, int kNTiles>
struct PieceTotals {
  using Product = QuantProduct<kQuantization, kNTiles>;
  using Shared = PiecesShared<kQuantization, kNTiles>;
  static constexpr int kOwn = Shared::kValues / kSplit;
  static_assert(Shared::kValues % kSplit == 0);

  float totals[kOwn], factors[kOwn];

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
      factors[i] = factor_of_row(from, weight_row(i) / 16, weight_row(i) % 16);
    }
  }

  // Adds what a warp found.
  FD_DEVICE void add(const typename Shared::Turn& turn) {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i)
      totals[i] = Product::join(turn.values[value(i)][lane_index()], factors[i], totals[i]);
  }
  FD_DEVICE void store(Shared& shared) const {
    FD_UNROLL
    for (int i = 0; i < kOwn; ++i) shared.totals[row(i)][weight_row(i)] = Product::finish(totals[i], factors[i]);
  }
};

// The stages of one warp, which takes every kSplit-th turn.
template <Quantization kQuantization>
struct PieceOrder {
  static constexpr int kTurn = QuantFormat<kQuantization>::kTurnStages;
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
