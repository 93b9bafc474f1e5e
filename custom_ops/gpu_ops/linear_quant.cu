// SPDX-License-Identifier: Apache-2.0
// Linear layers with weights of 8 or 4 bits, as common/quant.h defines them: one launch quantizes the rows
// (quant_rows.h), one multiplies. Sums over a piece are exact integers, and pieces and parts are joined in order, so
// that every kernel here has the same bits, for any number of rows.
//
// - `quant_pieces`, for up to 16 rows: a block computes two tiles of the weight, and its warps take turns at parts of
//   K, so that enough memory is under way. It reads each byte of the weight once.
// - `quant_tiles`, for more rows: the warps of a block share tiles of weight and rows, and each sums over all of K.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/linear_outputs.h"
#include "gpu_ops/quant_pieces.h"
#include "gpu_ops/quant_rows.h"

namespace {

using namespace fd;
using namespace fd::gpu;

// The rows of a layer, quantized: what quantize_rows writes.
struct QuantRows {
  In<uint8_t> codes;
  In<float> scales, sums;
};

// Returns the operands of a block from a tile and a row on.
template <Quantization kQuantization>
FD_DEVICE QuantOperands operands_from(const uint8_t* weight, const QuantRows& rows, const QuantShape& shape, int tile,
                                      int row, int num_rows) {
  const int64_t num_pieces = int64_t{shape.num_stages} * kStagePieces;
  return {weight + int64_t{tile} * shape.tile_bytes,
          rows.codes.data + row * QuantFormat<kQuantization>::kLimbs * num_pieces * kPiece,
          rows.scales.data + row * num_pieces,
          rows.sums.data + row * num_pieces,
          shape.num_tiles - tile,
          num_rows - row,
          shape};
}

// Finishes the outputs of kWeightRows rows of the weight for rows [first_row, first_row + num_rows), whose totals are
// rows of shared memory. Those of rows of 16 bits are multiplied by the scale of the row.
template <bool kIs16Bit, int kWeightRows, int kWidth>
FD_DEVICE void finish_totals(const QuantShape& shape, const float* row_scales, const uint16_t* bias,
                             const uint8_t* residual, uint8_t* out, int tile, int first_row, int num_rows,
                             const float (*totals)[kWidth]) {
  const auto sums = [&](int row, int column, float (&values)[4]) {
    const Bytes16 bytes = load16(&totals[row][column]);
    for (int i = 0; i < 4; ++i) {
      values[i] = bit_cast<float>(bytes.word[i]);
      if (kIs16Bit) values[i] *= row_scales[first_row + row];
    }
  };
  const auto finish = [&](auto element, auto is_gated) {
    using T = decltype(element);
    const LinearOutputs<T> to{bias, reinterpret_cast<const T*>(residual), reinterpret_cast<T*>(out), shape.n};
    finish_tile<T, decltype(is_gated)::value, kWeightRows>(to, tile * 16, first_row, num_rows, sums);
  };
  if (shape.is_fp32)
    shape.is_gated ? finish(float{}, std::true_type{}) : finish(float{}, std::false_type{});
  else
    shape.is_gated ? finish(uint16_t{}, std::true_type{}) : finish(uint16_t{}, std::false_type{});
}

// ---- up to 16 rows

template <Quantization kQuantization, int kNTiles>
FD_KERNEL FD_LAUNCH_BOUNDS(kSplit * 32, 2) void quant_pieces(In<uint8_t> weight, In<uint8_t> codes, In<float> scales,
                                                             In<float> sums, In<uint16_t> bias, In<uint8_t> residual,
                                                             Out<uint8_t> out, In<int32_t> device_rows,
                                                             QuantShape shape) {
  using Shared = PiecesShared<kQuantization, kNTiles>;
  using Format = QuantFormat<kQuantization>;
  constexpr int kStages = kPieceStages<kQuantization, kNTiles>;
  using Pipeline = TilePipeline<typename Shared::Stage, kStages, static_cast<int>(kWarpSize)>;
  auto& shared = shared_memory<Shared>();
  const int num_rows = read_count(device_rows, shape.num_rows), tile = 2 * static_cast<int>(block_index().x);
  if (num_rows == 0) return;
  const auto from = operands_from<kQuantization>(weight.data, {codes, scales, sums}, shape, tile, 0, num_rows);
  const int warp = static_cast<int>(warp_index());
  const PieceOrder<kQuantization> order(shape.num_stages);
  const int count = order.count(warp);
  const QuantSources<kQuantization, Pipeline, 2, 8 * kNTiles> sources(from);
  const auto issue = [&](typename Shared::Stage& stage, int i) { sources.fetch(stage, order.stage(warp, i)); };
  Pipeline pipeline(shared.stages[warp]);
  QuantProduct<kQuantization, kNTiles> product;
  PieceTotals<kQuantization, kNTiles> totals(from);
  pipeline.prefetch(count, issue);
  for (int turn = 0, used = 0; turn < order.num_turns; turn += kSplit) {
    auto& turns = shared.turns[turn / kSplit % 2];
    for (int i = 0; i < order.kTurn && used < count; ++i, ++used) {
      const auto& stage = pipeline.wait();
      pipeline.issue(issue, used + kStages - 1, count);
      product.multiply(stage, shape, 0, 0, i + 1 == order.kTurn || used + 1 == count,
                       [&](int m, int n, int j, float value) { turns[warp].store(m, n, j, value); });
      pipeline.release();
    }
    sync_block();
    FD_UNROLL
    for (int i = 0; i < kSplit; ++i)
      if (turn + i < order.num_turns) totals.add(turns[i]);
  }
  totals.store(shared);
  sync_block();
  finish_totals<Format::kIs16Bit, kPairRows>(shape, scales.data, bias.data, residual.data, out.data, tile, 0, num_rows,
                                             shared.totals);
}

// ---- more rows

template <Quantization kQuantization, int kTiles, int kCodeRows, int kStages>
union TilesShared {
  QuantStage<kQuantization, kTiles, kCodeRows> stages[kStages];
  float totals[kCodeRows / QuantFormat<kQuantization>::kLimbs][16 * kTiles + kSumPadding];
};

// kWarpsM x kWarpsN warps, each of which computes a pair of tiles for 8 kNTiles rows of codes.
template <Quantization kQuantization, int kNTiles, int kWarpsM, int kWarpsN, int kStages>
FD_KERNEL FD_LAUNCH_BOUNDS(kWarpsM * kWarpsN * 32,
                           1) void quant_tiles(In<uint8_t> weight, In<uint8_t> codes, In<float> scales, In<float> sums,
                                               In<uint16_t> bias, In<uint8_t> residual, Out<uint8_t> out,
                                               In<int32_t> device_rows, QuantShape shape) {
  using Format = QuantFormat<kQuantization>;
  using Product = QuantProduct<kQuantization, kNTiles>;
  constexpr int kTiles = 2 * kWarpsM, kCodeRows = 8 * kNTiles * kWarpsN, kRows = kCodeRows / Format::kLimbs;
  constexpr int kValues = Product::kValues;
  using Stage = QuantStage<kQuantization, kTiles, kCodeRows>;
  using Pipeline = TilePipeline<Stage, kStages, kWarpsM * kWarpsN* static_cast<int>(kWarpSize)>;
  auto& shared = shared_memory<TilesShared<kQuantization, kTiles, kCodeRows, kStages>>();
  const int num_rows = read_count(device_rows, shape.num_rows), first_row = static_cast<int>(block_index().x) * kRows;
  if (first_row >= num_rows) return;
  const int tile = static_cast<int>(block_index().y) * kTiles;
  const auto from = operands_from<kQuantization>(weight.data, {codes, scales, sums}, shape, tile, first_row, num_rows);
  const int pair = static_cast<int>(warp_index()) % kWarpsM;
  const int code_row = static_cast<int>(warp_index()) / kWarpsM * 8 * kNTiles;
  Pipeline pipeline(shared.stages);
  Product product;
  float totals[2][kNTiles][kValues], factors[2][2];
  FD_UNROLL
  for (int i = 0; i < 2 * kNTiles * kValues; ++i)
    totals[i / kNTiles / kValues][i / kValues % kNTiles][i % kValues] = 0.0f;
  const auto load_factors = [&] {
    FD_UNROLL
    for (int i = 0; i < 4; ++i)
      factors[i / 2][i % 2] = factor_of_row(from, 2 * pair + i / 2, Product::Product::row(2 * (i % 2)));
  };
  if constexpr (!Format::kJoinsPieces) load_factors();
  const QuantSources<kQuantization, Pipeline, kTiles, kCodeRows> sources(from);
  pipeline.run(
      shape.num_stages, [&](Stage& stage, int i) { sources.fetch(stage, i); },
      [&](Stage& stage, int i) {
        const bool is_last = (i + 1) % Format::kTurnStages == 0 || i + 1 == shape.num_stages;
        product.multiply(stage, shape, pair, code_row, is_last, [&](int m, int n, int j, float value) {
          totals[m][n][j] = Product::join(value, factors[m][j * Format::kLimbs / 2], totals[m][n][j]);
        });
      });
  pipeline.sync();
  if constexpr (Format::kJoinsPieces) load_factors();
  FD_UNROLL
  for (int i = 0; i < 2 * kNTiles * kValues; ++i) {
    const int m = i / kNTiles / kValues, n = i / kValues % kNTiles, j = i % kValues;
    shared.totals[code_row / Format::kLimbs + Product::row(n, j)][kPairRows * pair + Product::weight_row(m, j)] =
        Product::finish(totals[m][n][j], factors[m][j * Format::kLimbs / 2]);
  }
  sync_block();
  const int rows_left = num_rows - first_row;
  finish_totals<Format::kIs16Bit, 16 * kTiles>(shape, scales.data, bias.data, residual.data, out.data, tile, first_row,
                                               rows_left < kRows ? rows_left : kRows, shared.totals);
}

// ---- launches

struct QuantCall {
  const uint16_t *x, *norm, *bias;
  const uint8_t *weight, *residual;
  uint8_t *out, *codes;
  float *row_scales, *row_sums;
  Count rows;
  int k;
  float eps;
  QuantShape shape;
  int num_multiprocessors;
  void* stream;

  size_t elements(int64_t width) const { return static_cast<size_t>(shape.num_rows * width); }
  size_t code_bytes(bool is_16_bit) const { return elements(shape.num_stages * kStageInputs * (is_16_bit ? 2 : 1)); }
  size_t num_scales(bool is_16_bit) const { return elements(is_16_bit ? 1 : shape.num_stages * kStagePieces); }
  size_t num_sums() const { return elements(shape.has_minimum ? shape.num_stages * kStagePieces : 0); }
};

template <bool kIs16Bit>
int launch_rows(const QuantCall& call) {
  const int stride = call.shape.num_stages * kStageInputs;
  unsigned threads = kWarpSize;
  while (threads < kNormChains && threads * kNormChunk < static_cast<unsigned>(stride)) threads *= 2;
  return launch(quantize_rows<kIs16Bit>, {static_cast<unsigned>(call.shape.num_rows), 1, 1}, threads,
                sizeof(QuantRowsShared), call.stream, In<uint16_t>(call.x, call.elements(call.k)),
                In<uint16_t>(call.norm, call.norm == nullptr ? 0 : static_cast<size_t>(call.k)),
                Out<uint8_t>(call.codes, call.code_bytes(kIs16Bit)),
                Out<float>(call.row_scales, call.num_scales(kIs16Bit)), Out<float>(call.row_sums, call.num_sums()),
                call.rows.array(), call.rows.max, call.k, stride, call.eps);
}

template <Quantization kQuantization, class Kernel>
int launch_product(const QuantCall& call, Kernel kernel, Dim3 grid, unsigned threads, size_t shared_bytes) {
  constexpr bool kIs16Bit = has_16_bit_rows(kQuantization);
  const QuantShape& shape = call.shape;
  const size_t out_bytes = call.elements(int64_t{shape.n} * (shape.is_fp32 ? 4 : 2));
  const size_t bias_size = call.bias == nullptr ? 0 : static_cast<size_t>(shape.n) * (shape.is_gated ? 2 : 1);
  const bool has_residual = call.residual != nullptr && call.residual != call.out;
  return launch(kernel, grid, threads, shared_bytes, call.stream,
                In<uint8_t>(call.weight, static_cast<size_t>(shape.num_tiles) * static_cast<size_t>(shape.tile_bytes)),
                In<uint8_t>(call.codes, call.code_bytes(kIs16Bit)),
                In<float>(call.row_scales, call.num_scales(kIs16Bit)), In<float>(call.row_sums, call.num_sums()),
                In<uint16_t>(call.bias, bias_size), In<uint8_t>(call.residual, has_residual ? out_bytes : 0),
                Out<uint8_t>(call.out, out_bytes), call.rows.array(), shape);
}

template <Quantization kQuantization, int kNTiles>
int launch_pieces(const QuantCall& call) {
  const unsigned num_blocks = static_cast<unsigned>((call.shape.num_tiles + 1) / 2);
  return launch_product<kQuantization>(call, quant_pieces<kQuantization, kNTiles>, {num_blocks, 1, 1},
                                       kSplit * kWarpSize, sizeof(PiecesShared<kQuantization, kNTiles>));
}

template <Quantization kQuantization, int kNTiles, int kWarpsM, int kWarpsN, int kStages>
int launch_tiles(const QuantCall& call) {
  constexpr int kTiles = 2 * kWarpsM, kCodeRows = 8 * kNTiles * kWarpsN;
  constexpr int kRows = kCodeRows / QuantFormat<kQuantization>::kLimbs;
  const Dim3 grid = {static_cast<unsigned>((call.shape.num_rows + kRows - 1) / kRows),
                     static_cast<unsigned>((call.shape.num_tiles + kTiles - 1) / kTiles), 1};
  return launch_product<kQuantization>(call, quant_tiles<kQuantization, kNTiles, kWarpsM, kWarpsN, kStages>, grid,
                                       kWarpsM * kWarpsN * kWarpSize,
                                       sizeof(TilesShared<kQuantization, kTiles, kCodeRows, kStages>));
}

// Stages of large tiles, as many as shared memory holds.
template <Quantization kQuantization>
constexpr int kLargeStages = has_four_bits(kQuantization) || kQuantization == Quantization::kWint8 ? 3 : 2;

// The choice changes the speed only: large tiles where they occupy every multiprocessor.
template <Quantization kQuantization>
int launch_linear(const QuantCall& call) {
  constexpr int kLimbs = QuantFormat<kQuantization>::kLimbs;
  if (const int code = launch_rows<QuantFormat<kQuantization>::kIs16Bit>(call)) return code;
  const int rows = call.shape.num_rows, code_rows = rows * kLimbs;
  if (code_rows <= 8) return launch_pieces<kQuantization, 1>(call);
  if (code_rows <= 16) return launch_pieces<kQuantization, 2>(call);
  if constexpr (kLimbs == 2)
    if (rows <= 16) return launch_pieces<kQuantization, 4>(call);
  const int64_t num_large = int64_t{(code_rows + 127) / 128} * ((call.shape.num_tiles + 7) / 8);
  if (num_large < call.num_multiprocessors) return launch_tiles<kQuantization, 2, 1, 4, 4>(call);
  return launch_tiles<kQuantization, 8, 4, 2, kLargeStages<kQuantization>>(call);
}

QuantShape shape_of(const QuantizedForm& form, int64_t num_rows, int64_t n, int64_t k, bool is_gated, bool is_fp32) {
  const int unit_inputs = has_four_bits(form.quantization) ? 64 : 32;
  QuantShape shape;
  shape.num_rows = static_cast<int>(num_rows);
  shape.n = static_cast<int>(n);
  shape.num_tiles = static_cast<int>((n + kPanel - 1) / kPanel) * (is_gated ? 2 : 1);
  shape.num_units = static_cast<int>((k + unit_inputs - 1) / unit_inputs);
  shape.num_stages = static_cast<int>((k + kStageInputs - 1) / kStageInputs);
  shape.num_groups = static_cast<int>(form.num_groups(k));
  shape.group_shift = form.group_shift();
  shape.scale_bytes = static_cast<int>(scale_bytes(form, k));
  shape.header_bytes = static_cast<int>(header_bytes(form, k));
  shape.tile_bytes = shape.header_bytes + shape.num_units * kUnitBytes;
  shape.has_minimum = form.has_minimum;
  shape.is_gated = is_gated;
  shape.is_fp32 = is_fp32;
  return shape;
}

}  // namespace

// x: [num_rows, k]; norm: [k] or null; bias: [n], [2 n] if gated, or null, all in bf16; weight: packed, in the form of
// quantization, group_size and has_minimum; out, residual (or null, may be out): [num_rows, n] fp32 or bf16. codes,
// row_scales and row_sums are memory for what quant_rows.h describes; row_sums may be null if there is no minimum.
FD_EXPORT int fd_linear_quantized(const uint16_t* x, const uint8_t* weight, const uint16_t* norm, const uint16_t* bias,
                                  const uint8_t* residual, uint8_t* out, uint8_t* codes, float* row_scales,
                                  float* row_sums, const int32_t* device_rows, int64_t num_rows, int64_t n, int64_t k,
                                  int64_t is_gated, int64_t is_fp32, int64_t quantization, int64_t group_size,
                                  int64_t has_minimum, int64_t num_multiprocessors, double eps, void* stream) {
  FD_REQUIRE("linear", k, k > 0 && k <= 1 << 16 && k % 8 == 0, "a multiple of 8 inputs, at most 65536");
  FD_REQUIRE("linear", n, n > 0 && n <= 1 << 20, "1 to 1048576 outputs");
  FD_REQUIRE("linear", num_rows, num_rows >= 0 && num_rows <= 1 << 24, "0 to 16777216");
  FD_REQUIRE("linear", quantization, quantization >= 0 && quantization <= 3, "0 to 3");
  FD_REQUIRE("linear", group_size, group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128,
             "0, 32, 64 or 128");
  FD_REQUIRE("linear", has_minimum, has_minimum == 0 || (has_minimum == 1 && row_sums != nullptr),
             "0, or 1 and memory for the sums of codes");
  if (num_rows == 0) return kSuccess;
  const QuantizedForm form{static_cast<Quantization>(quantization), static_cast<int32_t>(group_size), has_minimum != 0};
  const QuantCall call{x,
                       norm,
                       bias,
                       weight,
                       residual,
                       out,
                       codes,
                       row_scales,
                       form.has_minimum ? row_sums : nullptr,
                       {device_rows, static_cast<int32_t>(num_rows)},
                       static_cast<int>(k),
                       static_cast<float>(eps),
                       shape_of(form, num_rows, n, k, is_gated != 0, is_fp32 != 0),
                       static_cast<int>(num_multiprocessors),
                       stream};
  switch (form.kernel()) {
    case Quantization::kWint8:
      return launch_linear<Quantization::kWint8>(call);
    case Quantization::kWint4:
      return launch_linear<Quantization::kWint4>(call);
    case Quantization::kW8a8:
      return launch_linear<Quantization::kW8a8>(call);
    case Quantization::kWint8Pieces:
      return launch_linear<Quantization::kWint8Pieces>(call);
    default:
      return launch_linear<Quantization::kW4a8>(call);
  }
}
