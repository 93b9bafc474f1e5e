// SPDX-License-Identifier: Apache-2.0
// Products of quantized weights and rows (common/quant.h): how they lie in memory, are fetched and multiplied.
//
// A packed weight consists of tiles of 16 rows: 16 outputs, or in a gated layer the gates of 8 outputs, then their ups.
// A tile is
//   factors   fp32 [16]
//   scales    fp16 [groups][8][2], where pair i belongs to rows i and 8 + i, and then the minimums in the same way,
//   each
//             filled up to 64 bytes
//   units     [units][16 rows][32 bytes]: bytes of 32 inputs; or nibbles of 64, of which byte j holds inputs j (low)
//   and
//             32 + j. They are unsigned if the weight has minimums, else signed.
#pragma once

#include "common/quant.h"
#include "gpu_ops/bf16.h"
#include "gpu_ops/tiles.h"

namespace fd::gpu {

constexpr int kUnitBytes = 512;
constexpr int kStageInputs = static_cast<int>(kPart);  // of a stage of the pipeline
constexpr int kStagePieces = static_cast<int>(kPart / kPiece);
constexpr int kGroupScaleBytes = 32;  // of a tile
constexpr int kPairRows = 32;         // of two tiles
constexpr int kSumPadding = 4;        // floats between rows of sums, which keep their banks apart

struct QuantShape {
  int num_rows, n, num_tiles, num_units, num_stages;
  int num_groups, group_shift;  // of scales; group (i >> group_shift) holds piece i
  int scale_bytes, header_bytes, tile_bytes;
  bool has_minimum, is_gated, is_fp32;
};

template <Quantization kQuantization>
struct QuantFormat {
  static constexpr bool kFourBits = has_four_bits(kQuantization), kIs16Bit = has_16_bit_rows(kQuantization);
  static constexpr bool kJoinsPieces = kQuantization != Quantization::kWint8;
  static constexpr int kLimbs = kIs16Bit ? 2 : 1;
  static constexpr int kUnitInputs = kFourBits ? 64 : 32;
  static constexpr int kStageUnits = kStageInputs / kUnitInputs;
  // Stages after which a warp has a value that joins the total: of a part, or of a piece of wint8 without groups.
  static constexpr int kTurnStages = kJoinsPieces ? 1 : static_cast<int>(kWint8Piece) / kStageInputs;
};

// What a block multiplies: tiles of a weight, and rows (quant_rows.h), both from the block's first ones on.
struct QuantOperands {
  const uint8_t* tiles;
  const uint8_t* codes;
  const float* row_scales;  // of the pieces of rows of 8 bits
  const float* row_sums;    // for weights with minimums
  int num_tiles, num_rows;
  const QuantShape& shape;

  FD_DEVICE int num_pieces() const { return shape.num_stages * kStagePieces; }
};

// What 128 inputs have beside codes where pieces are joined. Of rows there are four values each, one for a piece.
template <Quantization kQuantization, int kTiles, int kRows>
struct PartScales {
  Tile<kTiles, 128> scales, minimums;  // of up to four groups
  Bytes16 row_sums[kRows];
  Bytes16 row_scales[kRows];
};
template <int kTiles, int kRows>
struct PartScales<Quantization::kWint4, kTiles, kRows> {
  Tile<kTiles, 128> scales, minimums;
  Bytes16 row_sums[kRows];
};
template <int kTiles, int kRows>
struct PartScales<Quantization::kWint8Pieces, kTiles, kRows> : PartScales<Quantization::kWint4, kTiles, kRows> {};
template <int kTiles, int kRows>
struct PartScales<Quantization::kWint8, kTiles, kRows> {};

// 128 inputs of kTiles tiles and kCodeRows rows of codes. Two neighbouring tiles of nibbles lie side by side.
template <Quantization kQuantization, int kTiles, int kCodeRows>
struct QuantStage : PartScales<kQuantization, kTiles, kCodeRows / QuantFormat<kQuantization>::kLimbs> {
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
        weights_(first_unit(from), 32, 16 * num_groups(from), int64_t{kGroupTiles} * from.shape.tile_bytes),
        codes_(from.codes + Codes::row() * code_stride() + Codes::chunk() * 16, code_stride(),
               from.num_rows * Format::kLimbs) {}

  FD_DEVICE void fetch(Stage& stage, int index) const {
    const int unit = index * Format::kStageUnits + unit_in_stage();
    weights_.copy(stage.weights, int64_t{index} * Format::kStageUnits * kUnitBytes, unit < from_.shape.num_units);
    codes_.copy(stage.codes, int64_t{index} * kStageInputs);
    if constexpr (Format::kJoinsPieces) {
      if (from_.shape.num_groups > 0) fetch_scales(stage, index);
      if constexpr (!Format::kIs16Bit) fetch_row_values(stage.row_scales, from_.row_scales, index);
      if (from_.shape.has_minimum) fetch_row_values(stage.row_sums, from_.row_sums, index);
    }
  }

 private:
  using Format = QuantFormat<kQuantization>;
  using Weights = typename Pipeline::template Source<decltype(Stage::weights), 16>;
  using Codes = typename Pipeline::template Source<decltype(Stage::codes)>;
  static constexpr int kGroupTiles = Format::kFourBits ? 2 : 1;  // whose rows lie side by side

  FD_DEVICE int code_stride() const { return from_.shape.num_stages * kStageInputs; }
  FD_DEVICE static int tile_in_group() { return Format::kFourBits ? Weights::chunk() / 4 : 0; }
  FD_DEVICE static int unit_in_stage() { return (Format::kFourBits ? Weights::chunk() % 4 : Weights::chunk()) / 2; }
  FD_DEVICE static int num_groups(const QuantOperands& from) {
    return (from.num_tiles - tile_in_group() + kGroupTiles - 1) / kGroupTiles;
  }
  FD_DEVICE static const uint8_t* first_unit(const QuantOperands& from) {
    const int row = Weights::row(), tile = row / 16 * kGroupTiles + tile_in_group();
    return from.tiles + int64_t{tile} * from.shape.tile_bytes + from.shape.header_bytes + unit_in_stage() * kUnitBytes +
           row % 16 * 32 + Weights::chunk() % 2 * 16;
  }

  // Copies the scales of the groups that a stage touches, and their minimums.
  FD_DEVICE void fetch_scales(Stage& stage, int index) const {
    using Scales = typename Pipeline::template Source<Tile<kTiles, 128>>;
    const QuantShape& shape = from_.shape;
    const int slot = Scales::chunk() / 2, group = (index * kStagePieces >> shape.group_shift) + slot;
    const bool exists = slot <= (kStagePieces - 1) >> shape.group_shift && group < shape.num_groups;
    const Scales scales(from_.tiles + int64_t{Scales::row()} * shape.tile_bytes + kFactorBytes +
                            group * kGroupScaleBytes + Scales::chunk() % 2 * 16,
                        shape.tile_bytes, from_.num_tiles);
    scales.copy(stage.scales, 0, exists);
    if (shape.has_minimum) scales.copy(stage.minimums, shape.scale_bytes, exists);
  }
  template <int kRows>
  FD_DEVICE void fetch_row_values(Bytes16 (&to)[kRows], const float* from, int index) const {
    Pipeline::copy_chunks(to, from + index * kStagePieces, int64_t{4} * from_.num_pieces(), from_.num_rows);
  }

  const QuantOperands& from_;
  Weights weights_;
  Codes codes_;
};

// Returns the factor of row `row` of tile `tile`.
FD_DEVICE float factor_of_row(const QuantOperands& from, int tile, int row) {
  return tile < from.num_tiles ? reinterpret_cast<const float*>(from.tiles + int64_t{tile} * from.shape.tile_bytes)[row]
                               : 0.0f;
}

// What both classes of products below say about their values: each lane has kValues for each of 2 x kNTiles product
// tiles of two tiles of the weight, a pair, and 8 kNTiles rows of codes.
template <Quantization kQuantization, int kNTiles>
struct QuantValues {
  using Format = QuantFormat<kQuantization>;
  using Product = TileProduct<int32_t, 2, kNTiles>;
  static constexpr int kValues = 4 / Format::kLimbs;

  // Value j of product tile (m, n) belongs to this row of the pair, and to this row of x.
  FD_DEVICE static int weight_row(int m, int j) { return 16 * m + Product::row(j * Format::kLimbs); }
  FD_DEVICE static int row(int n, int j) { return (8 * n + Product::column(j * Format::kLimbs)) / Format::kLimbs; }
};

// Of wint8 without groups: values are sums of pieces of two stages, which a warp holds as integers.
template <int kNTiles>
class Wint8Product : public QuantValues<Quantization::kWint8, kNTiles> {
 public:
  // Multiplies a stage for pair `pair` and the rows of codes from `code_row`. If it is the last one of a turn
  // (Format::kTurnStages), calls use(m, n, j, value) for every value.
  template <class Stage, class Use>
  FD_DEVICE void multiply(const Stage& stage, const QuantShape&, int pair, int code_row, bool is_last, Use use) {
    product_.template multiply<kStagePieces>(stage.weights, kPairRows * pair, stage.codes, code_row);
    if (!is_last) return;
    FD_UNROLL
    for (int i = 0; i < 4 * kNTiles; ++i) {
      const int m = i / (2 * kNTiles), n = i / 2 % kNTiles, j = i % 2;
      use(m, n, j, static_cast<float>(256 * product_.sums[m][n][2 * j] + product_.sums[m][n][2 * j + 1]));
    }
    product_.clear();
  }

  FD_DEVICE static float join(float value, float factor, float total) {
    return fused_multiply_add(value, factor, total);
  }
  FD_DEVICE static float finish(float total, float) { return total; }

 private:
  TileProduct<int32_t, 2, kNTiles> product_;
};

// Of all others: values are parts, each of one stage.
template <Quantization kQuantization, int kNTiles>
class PartProduct : public QuantValues<kQuantization, kNTiles> {
 public:
  using Values = QuantValues<kQuantization, kNTiles>;
  using typename Values::Format, typename Values::Product;

  template <class Stage, class Use>
  FD_DEVICE static void multiply(const Stage& stage, const QuantShape& shape, int pair, int code_row, bool, Use use) {
    if (shape.has_minimum) return multiply_stage<true, true>(stage, shape.group_shift, pair, code_row, use);
    if (kQuantization != Quantization::kW8a8 || shape.num_groups > 0)
      return multiply_stage<true, false>(stage, shape.group_shift, pair, code_row, use);
    multiply_stage<false, false>(stage, 0, pair, code_row, use);
  }

  FD_DEVICE static float join(float value, float, float total) { return total + value; }
  FD_DEVICE static float finish(float total, float factor) { return total * factor; }

 private:
  using A = typename Product::A;
  using B = typename Product::B;

  // Product tiles of which a warp computes the parts at a time, so that registers suffice.
  static constexpr int kAtOnce = kNTiles < 4 ? kNTiles : 4;
  using Parts = float[2][kAtOnce][Values::kValues];

  // The scales or minimums of the rows of a pair for which a lane has values.
  struct PairScales {
    float value[2][2];
  };

  // Integers begin with the bits of a number in fp32 whose lowest bit is 1, so that they need no conversion: sums of 32
  // products are below 2^22. Nibbles are multiplied 16 times too large, and there the lowest bit is 1 / 16.
  FD_DEVICE static float start() { return Format::kFourBits ? kRoundingShift * 0.0625f : kRoundingShift; }

  template <bool kHasScales, bool kHasMinimum, class Stage, class Use>
  FD_DEVICE static void multiply_stage(const Stage& stage, int group_shift, int pair, int code_row, Use use) {
    FD_UNROLL
    for (int first = 0; first < kNTiles; first += kAtOnce) {
      Parts parts;
      FD_UNROLL
      for (int i = 0; i < 2 * kAtOnce * Values::kValues; ++i) (&parts[0][0][0])[i] = 0.0f;
      FD_ROLLED
      for (int piece = 0; piece < kStagePieces; piece += 2)
        add_two_pieces<kHasScales, kHasMinimum>(stage, group_shift, pair, code_row + 8 * first, piece, parts);
      FD_UNROLL
      for (int i = 0; i < 2 * kAtOnce * Values::kValues; ++i) {
        const int m = i / (kAtOnce * Values::kValues), n = i / Values::kValues % kAtOnce, j = i % Values::kValues;
        use(m, first + n, j, parts[m][n][j]);
      }
    }
  }

  template <bool kHasScales, bool kHasMinimum, class Stage>
  FD_DEVICE static void add_two_pieces(const Stage& stage, int group_shift, int pair, int code_row, int first,
                                       Parts& parts) {
    A loaded[2];
    B codes[2];  // two tiles of a piece, or one tile of two pieces
    FD_UNROLL
    for (int piece = first; piece < first + 2; ++piece) {
      FD_UNROLL
      for (int m = 0; m < 2 && (piece == first || !Format::kFourBits); ++m)
        loaded[m] = Format::kFourBits ? Product::load_a(stage.weights, 16 * pair, 4 * m + first)
                                      : Product::load_a(stage.weights, kPairRows * pair + 16 * m, 2 * piece);
      PairScales scales{}, minimums{};
      if (kHasScales) scales = load_scales(stage.scales, pair, piece >> group_shift);
      if (kHasMinimum) minimums = load_scales(stage.minimums, pair, piece >> group_shift);
      FD_UNROLL
      for (int n = 0; n < kAtOnce; ++n) {
        if (kNTiles > 1 && n % 2 == 0) Product::load_b(stage.codes, code_row + 8 * n, 2 * piece, codes[0], codes[1]);
        if (kNTiles == 1 && piece == first) Product::load_b_steps(stage.codes, code_row, 2 * first, codes[0], codes[1]);
        int32_t sums[2][4];
        FD_UNROLL
        for (int m = 0; m < 2; ++m) {
          for (int32_t& sum : sums[m]) sum = bit_cast<int32_t>(start());
          const A weights = Format::kFourBits ? times_16(loaded[m], piece - first) : loaded[m];
          Product::template multiply_bytes<kHasMinimum>(sums[m], weights, codes[kNTiles > 1 ? n % 2 : piece - first]);
        }
        add_sums<kHasScales, kHasMinimum>(stage, code_row / Format::kLimbs, n, piece, sums, scales, minimums, parts);
      }
    }
  }

  // Adds the sums of a piece, for product tiles (0, n) and (1, n), to the parts.
  template <bool kHasScales, bool kHasMinimum, class Stage>
  FD_DEVICE static void add_sums(const Stage& stage, int first_row, int n, int piece, const int32_t (&sums)[2][4],
                                 const PairScales& scales, const PairScales& minimums, Parts& parts) {
    FD_UNROLL
    for (int j = 0; j < Values::kValues; ++j) {
      const int row = first_row + Values::row(n, j), of_pair = j * Format::kLimbs / 2;
      FD_UNROLL
      for (int m = 0; m < 2; ++m) {
        float scale = kHasScales ? scales.value[m][of_pair] : 1.0f;
        if constexpr (!Format::kIs16Bit) {
          const float of_row = piece_value(stage.row_scales[row], piece);
          scale = kHasScales ? scale * of_row : of_row;
        }
        float& part = parts[m][n][j];
        part = fused_multiply_add(sum_of(sums[m], j), scale, part);
        if (kHasMinimum)
          part = fused_multiply_add(piece_value(stage.row_sums[row], piece), minimums.value[m][of_pair], part);
      }
    }
  }

  // Returns sum j in fp32, rounded once.
  FD_DEVICE static float sum_of(const int32_t (&sums)[4], int j) {
    const float first = bit_cast<float>(sums[j * Format::kLimbs]) - start();
    if constexpr (!Format::kIs16Bit) return first;
    return fused_multiply_add(first, 256.0f, bit_cast<float>(sums[2 * j + 1]) - start());
  }
  FD_DEVICE static float piece_value(const Bytes16& values, int piece) { return bit_cast<float>(values.word[piece]); }

  // Returns codes times 16, which are the low or the high nibbles of bytes.
  FD_DEVICE static A times_16(const A& nibbles, int is_high) {
    A result;
    FD_UNROLL
    for (int i = 0; i < 4; ++i) result.word[i] = (is_high ? nibbles.word[i] : nibbles.word[i] << 4) & 0xf0f0f0f0u;
    return result;
  }

  // Returns what belongs to group `slot` of a stage.
  template <class Scales>
  FD_DEVICE static PairScales load_scales(const Scales& scales, int pair, int slot) {
    const int row = static_cast<int>(lane_index() / 4);
    PairScales result;
    FD_UNROLL
    for (int m = 0; m < 2; ++m) {
      const uint8_t* chunk = scales.chunk(2 * pair + m, 2 * slot + row / 4);
      const uint32_t two = reinterpret_cast<const uint32_t*>(chunk)[row % 4];
      result.value[m][0] = widen_half(two), result.value[m][1] = widen_half(two >> 16);
    }
    return result;
  }
};

template <Quantization kQuantization, int kNTiles>
using QuantProduct = std::conditional_t<QuantFormat<kQuantization>::kJoinsPieces, PartProduct<kQuantization, kNTiles>,
                                        Wint8Product<kNTiles>>;

}  // namespace fd::gpu
