// SPDX-License-Identifier: Apache-2.0
// Products of quantized weights and rows: how they lie in memory, are fetched, multiplied, and summed over a group of
// inputs, as common/quant.h defines it.
//
// A packed weight consists of tiles of 16 rows: 16 outputs, or in a gated layer the gates of 8 outputs, then their ups.
// A tile is
//   scales  those of the CPU's panels: fp32 [16], or bf16 [groups of 128 inputs][16], filled up to 64 bytes
//   units   [units][16 rows][32 bytes]: signed bytes of 32 inputs; or signed nibbles of 64, where byte 4 i + j holds
//           inputs 8 i + j (low) and 8 i + j + 4
#pragma once

#include "common/quant.h"
#include "gpu_ops/bf16.h"
#include "gpu_ops/tiles.h"

namespace fd::gpu {

constexpr int kUnitBytes = 512;
constexpr int kStageInputs = 128;  // of a stage of the pipeline
constexpr int kPairRows = 32;      // of two tiles
constexpr int kSumPadding = 4;     // floats between rows of sums, which keep their banks apart

template <Quantization kQuantization>
struct QuantFormat {
  static constexpr bool kFourBits = has_four_bits(kQuantization), kIs16Bit = has_16_bit_rows(kQuantization);
  static constexpr int kLimbs = kIs16Bit ? 2 : 1;
  static constexpr int kUnitInputs = kFourBits ? 64 : 32;
  static constexpr int kStageUnits = kStageInputs / kUnitInputs;
  static constexpr int kGroupStages = static_cast<int>(sum_length(kQuantization)) / kStageInputs;
};

// What a block multiplies: tiles of a weight, and rows of codes (quant_rows.h).
struct QuantOperands {
  const uint8_t* tiles;
  const uint8_t* codes;
  int num_tiles, num_code_rows;  // from the block's first ones on
  int num_units, scale_bytes, tile_bytes, code_stride;
};

template <bool kFourBits, int kTiles>
struct QuantScales {};  // in formats of eight bits they belong to no stage
template <int kTiles>
struct QuantScales<true, kTiles> {
  Tile<1, 32 * kTiles> scales;
};

// 128 inputs of kTiles tiles and kCodeRows rows of codes. Two neighbouring tiles of nibbles lie side by side.
template <Quantization kQuantization, int kTiles, int kCodeRows>
struct QuantStage : QuantScales<has_four_bits(kQuantization), kTiles> {
  static_assert(kTiles % 2 == 0);
  Tile<(has_four_bits(kQuantization) ? 8 : 16) * kTiles, 128> weights;
  Tile<kCodeRows, 128> codes;
};

// Where the threads of a pipeline find the stages of a block's operands.
template <Quantization kQuantization, class Pipeline, int kTiles, int kCodeRows>
class QuantSources {
 public:
  using Stage = QuantStage<kQuantization, kTiles, kCodeRows>;

  explicit FD_DEVICE QuantSources(const QuantOperands& from)
      : from_(from),
        weights_(first_unit(from), 32, 16 * num_groups(from), int64_t{kGroupTiles} * from.tile_bytes),
        codes_(from.codes + Codes::row() * from.code_stride + Codes::chunk() * 16, from.code_stride,
               from.num_code_rows) {}

  FD_DEVICE void fetch(Stage& stage, int index) const {
    const int unit = index * Format::kStageUnits + unit_in_stage();
    weights_.copy(stage.weights, int64_t{index} * Format::kStageUnits * kUnitBytes, unit < from_.num_units);
    codes_.copy(stage.codes, int64_t{index} * kStageInputs);
    if constexpr (Format::kFourBits) {
      using Scales = typename Pipeline::template Source<decltype(stage.scales)>;
      const int tile = Scales::chunk() / 2;
      const uint8_t* first = from_.tiles + tile * from_.tile_bytes + Scales::chunk() % 2 * 16;
      Scales(first, 0, tile < from_.num_tiles ? 1 : 0).copy(stage.scales, int64_t{index} * 32);
    }
  }

 private:
  using Format = QuantFormat<kQuantization>;
  using Weights = typename Pipeline::template Source<decltype(Stage::weights), 16>;
  using Codes = typename Pipeline::template Source<decltype(Stage::codes)>;
  static constexpr int kGroupTiles = Format::kFourBits ? 2 : 1;  // whose rows lie side by side

  FD_DEVICE static int tile_in_group() { return Format::kFourBits ? Weights::chunk() / 4 : 0; }
  FD_DEVICE static int unit_in_stage() { return (Format::kFourBits ? Weights::chunk() % 4 : Weights::chunk()) / 2; }
  FD_DEVICE static int num_groups(const QuantOperands& from) {
    return (from.num_tiles - tile_in_group() + kGroupTiles - 1) / kGroupTiles;
  }
  FD_DEVICE static const uint8_t* first_unit(const QuantOperands& from) {
    const int row = Weights::row(), tile = row / 16 * kGroupTiles + tile_in_group();
    return from.tiles + tile * from.tile_bytes + from.scale_bytes + unit_in_stage() * kUnitBytes + row % 16 * 32 +
           Weights::chunk() % 2 * 16;
  }

  const QuantOperands& from_;
  Weights weights_;
  Codes codes_;
};

// Returns the scale of row `row` of tile `tile` in a format of eight bits.
FD_DEVICE float scale_of_row(const QuantOperands& from, int tile, int row) {
  return tile < from.num_tiles ? reinterpret_cast<const float*>(from.tiles + tile * from.tile_bytes)[row] : 0.0f;
}

// The sums over a group for two tiles, a pair, and 8 kNTiles rows of codes, which a warp holds in registers. Each lane
// has kValues values for each of 2 kNTiles tiles of the product.
template <Quantization kQuantization, int kNTiles>
class QuantProduct {
 public:
  using Format = QuantFormat<kQuantization>;
  using Product = TileProduct<int32_t, 2, kNTiles>;
  static constexpr int kValues = 4 / Format::kLimbs;

  // Value j of product tile (m, n) belongs to this row of the pair, and to this row of x.
  FD_DEVICE static int weight_row(int m, int j) { return 16 * m + Product::row(j * Format::kLimbs); }
  FD_DEVICE static int row(int n, int j) { return (8 * n + Product::column(j * Format::kLimbs)) / Format::kLimbs; }

  FD_DEVICE QuantProduct() { begin_group(); }

  // Sums of nibbles begin with the bits of a number in fp32 whose lowest bit is 1: they are its integers, and need no
  // conversion.
  FD_DEVICE void begin_group() {
    const float start = Format::kFourBits ? kRoundingShift : 0.0f;
    FD_UNROLL
    for (int i = 0; i < 8 * kNTiles; ++i)
      product_.sums[i / 4 / kNTiles][i / 4 % kNTiles][i % 4] = bit_cast<int32_t>(start);
  }

  // Adds the products of a stage for pair `pair` and the rows of codes from `code_row`.
  template <class Stage>
  FD_DEVICE void multiply(const Stage& stage, int pair, int code_row) {
    if constexpr (!Format::kFourBits) {
      product_.template multiply<kStageInputs / 32>(stage.weights, 32 * pair, stage.codes, code_row);
    } else {
      FD_UNROLL
      for (int unit = 0; unit < Format::kStageUnits; ++unit) {
        typename Product::B codes[2][kNTiles];
        load_codes(stage, code_row, 4 * unit, codes);
        FD_UNROLL
        for (int m = 0; m < 2; ++m) {
          const typename Product::A nibbles = Product::load_a(stage.weights, 16 * pair, 4 * m + 2 * unit);
          typename Product::A low, high;  // codes times 16
          FD_UNROLL
          for (int i = 0; i < 4; ++i)
            low.word[i] = nibbles.word[i] << 4 & 0xf0f0f0f0u, high.word[i] = nibbles.word[i] & 0xf0f0f0f0u;
          FD_UNROLL
          for (int n = 0; n < kNTiles; ++n) product_.multiply(m, n, low, codes[0][n]);
          FD_UNROLL
          for (int n = 0; n < kNTiles; ++n) product_.multiply(m, n, high, codes[1][n]);
        }
      }
    }
  }

  // Returns a sum in fp32, rounded once; times 16 in formats of four bits.
  FD_DEVICE float sum(int m, int n, int j) const {
    const int32_t first = product_.sums[m][n][j * Format::kLimbs],
                  second = product_.sums[m][n][j * Format::kLimbs + Format::kLimbs - 1];
    if constexpr (Format::kFourBits) {
      const float value = bit_cast<float>(first) - kRoundingShift;
      return Format::kIs16Bit ? fused_multiply_add(value, 256.0f, bit_cast<float>(second) - kRoundingShift) : value;
    } else {
      return static_cast<float>(integer_sum(m, n, j));
    }
  }
  // Returns a sum of a format of eight bits.
  FD_DEVICE int32_t integer_sum(int m, int n, int j) const {
    const int32_t first = product_.sums[m][n][j * Format::kLimbs];
    return Format::kIs16Bit ? 256 * first + product_.sums[m][n][2 * j + 1] : first;
  }

  // Returns the scale of row `row` of a pair in a stage's group, in formats of four bits, for sums times 16.
  template <class Stage>
  FD_DEVICE static float scale(const Stage& stage, int pair, int row) {
    const uint8_t* chunk = stage.scales.chunk(0, 4 * pair + row / 8);
    return low_bf16(reinterpret_cast<const uint16_t*>(chunk)[row % 8]) * 0.0625f;
  }

 private:
  // Loads two steps of the rows of codes from 16-byte chunk `chunk`.
  template <class Stage>
  FD_DEVICE static void load_codes(const Stage& stage, int code_row, int chunk,
                                   typename Product::B (&codes)[2][kNTiles]) {
    if constexpr (kNTiles == 1) {
      Product::load_b_steps(stage.codes, code_row, chunk, codes[0][0], codes[1][0]);
    } else {
      FD_UNROLL
      for (int i = 0; i < kNTiles; ++i) {
        const int step = i / (kNTiles / 2), n = i % (kNTiles / 2) * 2;
        Product::load_b(stage.codes, code_row + 8 * n, chunk + 2 * step, codes[step][n], codes[step][n + 1]);
      }
    }
  }

  Product product_;
};

}  // namespace fd::gpu
