// SPDX-License-Identifier: Apache-2.0
// Linear layers with weights in bfloat16: out = norm(x) weight^T + bias, silu(gate) * up if gated, + residual.
//
// Packed weight: [weight_rows, stride] bfloat16, row-major; stride is K filled up with zeros to a multiple of 64.
// Without a gate, row n is output n, and the rows are filled up to a multiple of 16. In a gated layer, rows 16 t ..
// 16 t + 7 are the gates of outputs 8 t .. 8 t + 7, and the next eight rows their ups.
//
// Every output has the same bits in both kernels and for every number of rows: K is cut at multiples of 1,024, a piece
// is one chain of the product's instruction in steps of 16 from 0, and pieces are added to 0 in ascending order.
//
// - `linear_pieces`, for few rows: a block computes 16 or 32 rows of the weight, each of its warps a piece of K, so
//   that enough memory is under way at once. A warp reads its part of the weight once, and of x what belongs to it.
// - `linear_tiles`, for many rows: the warps of a block share tiles of weight and x, over all pieces.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/linear_outputs.h"
#include "gpu_ops/norm.h"
#include "gpu_ops/tiles.h"

namespace {

using namespace fd::gpu;

constexpr int kTileBytes = 128, kStageK = kTileBytes / 2, kSteps = kStageK / 16;
constexpr int kPiece = 1024, kPieceStages = kPiece / kStageK;
constexpr size_t kMaxSharedBytes = 99 * 1024;  // of a block, on every card
constexpr int kSumPadding = 4;                 // floats between rows of sums, which keep their banks apart

struct LinearShape {
  int num_rows, n, weight_rows, k, stride;
  float eps;
};

// The rows of a matrix of bfloat16 from row `first` on, for a tile of the stages of a pipeline.
template <class Source>
FD_DEVICE Source rows_of(const uint16_t* matrix, int first, int num_rows, int stride) {
  return Source(matrix + int64_t{first + Source::row()} * stride + Source::chunk() * 8, 2 * int64_t{stride},
                num_rows - first);
}

// Writes a warp's sums to rows of sums [row of x][row of the weight].
template <int kMTiles, int kNTiles, int kWidth>
FD_DEVICE void store_sums(const float (&sums)[kMTiles][kNTiles][4], float (*to)[kWidth], int first_row, int first) {
  using Product = TileProduct<float, kMTiles, kNTiles>;
  FD_UNROLL
  for (int m = 0; m < kMTiles; ++m) FD_UNROLL
  for (int n = 0; n < kNTiles; ++n) FD_UNROLL
  for (int i = 0; i < 4; ++i)
    to[first_row + 8 * n + Product::column(i)][first + 16 * m + Product::row(i)] = sums[m][n][i];
}

FD_DEVICE void add_four(const float* from, float (&values)[4]) {
  const Bytes16 bytes = load16(from);
  for (int i = 0; i < 4; ++i) values[i] += bit_cast<float>(bytes.word[i]);
}

// ---- few rows

// What limits decoding is how much memory is under way, not how many warps there are: so the larger tiles may run with
// fewer warps than a quarter of the most, and small layers, which have few warps in all, take more stages of 3 KiB or
// more for each.
constexpr int kShallow = 3, kDeep = 8;
constexpr int kMaxFusedRows = 32;

template <int kMTiles, int kNTiles>
struct PieceStage {
  Tile<16 * kMTiles, kTileBytes> weight;
  Tile<8 * kNTiles, kTileBytes> x;
  Tile<1, kTileBytes> norm;
};

template <int kMTiles, int kNTiles>
using PieceSums = float[8 * kNTiles][16 * kMTiles + kSumPadding];

template <int kMTiles, int kNTiles, int kStages>
union PieceMemory {  // of a warp
  PieceStage<kMTiles, kNTiles> stages[kStages];
  PieceSums<kMTiles, kNTiles> sums;
};

template <int kMTiles, int kNTiles>
struct alignas(128) PieceShared {  // followed by the memory of each warp
  float factors[8 * kNTiles];
  PieceSums<kMTiles, kNTiles> totals;  // of the pieces before this round
};

// Warps of a block, whose shared memory is limited; they take the pieces in rounds.
template <int kMTiles, int kNTiles, int kStages>
constexpr int max_piece_warps() {
  constexpr size_t kLeft = kMaxSharedBytes - sizeof(PieceShared<kMTiles, kNTiles>);
  const size_t fit = kLeft / sizeof(PieceMemory<kMTiles, kNTiles, kStages>);
  return fit < 8 ? static_cast<int>(fit) : 8;
}

template <class Stage>
FD_DEVICE void normalise_stage(Stage& stage, const float* factors, int num_rows) {
  for (int i = static_cast<int>(lane_index()); i < num_rows * 8; i += static_cast<int>(kWarpSize)) {
    uint8_t* chunk = stage.x.chunk(i / 8, i % 8);
    store16(chunk, normalise_chunk(load16(chunk), load16(stage.norm.chunk(0, i % 8)), factors[i / 8]));
  }
  sync_warp();
}

template <class T, bool kIsGated, int kMTiles, int kNTiles, int kStages>
FD_KERNEL void linear_pieces(In<uint16_t> x, In<uint16_t> weight, In<uint16_t> norm, In<uint16_t> bias, In<T> residual,
                             Out<T> out, In<int32_t> device_rows, LinearShape shape) {
  using Memory = PieceMemory<kMTiles, kNTiles, kStages>;
  using Stage = PieceStage<kMTiles, kNTiles>;
  using Pipeline = TilePipeline<Stage, kStages, kWarpSize>;
  auto& shared = shared_memory<PieceShared<kMTiles, kNTiles>>();
  Memory* memory = reinterpret_cast<Memory*>(&shared + 1);
  const int num_rows = read_count(device_rows, shape.num_rows);
  const int warp = static_cast<int>(warp_index()), num_warps = static_cast<int>(block_size() / kWarpSize);
  const int tile_row = static_cast<int>(block_index().x) * 16 * kMTiles;
  const int num_pieces = (shape.k + kPiece - 1) / kPiece;
  using XRows = typename Pipeline::template Source<decltype(Stage::x)>;
  using NormRow = typename Pipeline::template Source<decltype(Stage::norm)>;
  const auto weight_rows = rows_of<typename Pipeline::template Source<decltype(Stage::weight)>>(
      weight.data, tile_row, shape.weight_rows, shape.stride);
  const auto x_rows = rows_of<XRows>(x.data, 0, num_rows, shape.k);
  const auto norm_row = rows_of<NormRow>(norm.data, 0, 1, 0);
  for (int first = 0; first < num_pieces; first += num_warps) {
    const int begin = (first + warp) * kPiece;
    const int left = (shape.k - begin + kStageK - 1) / kStageK;
    const int count = left < 0 ? 0 : left < kPieceStages ? left : kPieceStages;
    const auto issue = [&](Stage& stage, int i) {
      const int column = begin + i * kStageK;
      weight_rows.copy(stage.weight, 2 * int64_t{column});
      x_rows.copy(stage.x, 2 * int64_t{column}, column + XRows::chunk() * 8 < shape.k);
      if (norm.data != nullptr) norm_row.copy(stage.norm, 2 * int64_t{column}, column + NormRow::chunk() * 8 < shape.k);
    };
    Pipeline pipeline(memory[warp].stages);
    TileProduct<float, kMTiles, kNTiles> product;
    pipeline.prefetch(count, issue);
    if (norm.data != nullptr && first == 0) {
      for (int row = warp; row < num_rows; row += num_warps) {
        const float factor = warp_norm_factor(x.data + int64_t{row} * shape.k, shape.k, shape.eps);
        if (lane_index() == 0) shared.factors[row] = factor;
      }
      sync_block();
    }
    pipeline.consume(count, issue, [&](Stage& stage, int) {
      if (norm.data != nullptr) normalise_stage(stage, shared.factors, num_rows);
      product.template multiply<kSteps>(stage.weight, 0, stage.x, 0);
    });
    pipeline.sync();
    store_sums(product.sums, memory[warp].sums, 0, 0);
    sync_block();
    const int num_sums = num_pieces - first < num_warps ? num_pieces - first : num_warps;
    const auto total = [&](int row, int column, float (&values)[4]) {
      for (float& value : values) value = 0.0f;
      if (first > 0) add_four(&shared.totals[row][column], values);
      for (int i = 0; i < num_sums; ++i) add_four(&memory[i].sums[row][column], values);
    };
    if (first + num_warps >= num_pieces) {
      const LinearOutputs<T> to{bias.data, residual.data, out.data, shape.n};
      finish_tile<T, kIsGated, 16 * kMTiles>(to, tile_row, 0, num_rows, total);
      return;
    }
    for (int i = static_cast<int>(thread_index()); i < num_rows * 4 * kMTiles; i += static_cast<int>(block_size())) {
      float values[4];
      total(i / (4 * kMTiles), i % (4 * kMTiles) * 4, values);
      store_outputs(&shared.totals[i / (4 * kMTiles)][i % (4 * kMTiles) * 4], values);
    }
    sync_block();
  }
}

// ---- many rows

template <int kOutputs, int kRows>
struct TileStage {
  Tile<kOutputs, kTileBytes> weight;
  Tile<kRows, kTileBytes> x;
};

// Tiles of 64 x 64 outputs wait for memory more often than larger ones, and need less shared memory.
template <int kOutputs, int kRows>
constexpr int kTileStages = kOutputs * kRows > 64 * 64 ? 3 : 4;

template <int kOutputs, int kRows>
union TileShared {
  TileStage<kOutputs, kRows> stages[kTileStages<kOutputs, kRows>];
  float sums[kRows][kOutputs + kSumPadding];
};

// kWarpsM x kWarpsN warps, each of which computes 16 kMTiles rows of the weight for 8 kNTiles rows of x.
template <class T, bool kIsGated, int kMTiles, int kNTiles, int kWarpsM, int kWarpsN>
FD_KERNEL FD_LAUNCH_BOUNDS(kWarpsM * kWarpsN * 32, 2) void linear_tiles(In<uint16_t> x, In<uint16_t> weight,
                                                                        In<uint16_t> bias, In<T> residual, Out<T> out,
                                                                        In<int32_t> device_rows, LinearShape shape) {
  constexpr int kOutputs = 16 * kMTiles * kWarpsM, kRows = 8 * kNTiles * kWarpsN;
  using Stage = TileStage<kOutputs, kRows>;
  using Pipeline = TilePipeline<Stage, kTileStages<kOutputs, kRows>, kWarpsM * kWarpsN* static_cast<int>(kWarpSize)>;
  auto& shared = shared_memory<TileShared<kOutputs, kRows>>();
  const int num_rows = read_count(device_rows, shape.num_rows);
  const int first_row = static_cast<int>(block_index().x) * kRows;
  const int tile_row = static_cast<int>(block_index().y) * kOutputs;
  if (first_row >= num_rows) return;
  const int warp = static_cast<int>(warp_index());
  const int warp_output = warp % kWarpsM * 16 * kMTiles, warp_row = warp / kWarpsM * 8 * kNTiles;
  const int num_stages = shape.stride / kStageK;
  using XRows = typename Pipeline::template Source<decltype(Stage::x)>;
  const auto weight_rows = rows_of<typename Pipeline::template Source<decltype(Stage::weight)>>(
      weight.data, tile_row, shape.weight_rows, shape.stride);
  const auto x_rows = rows_of<XRows>(x.data, first_row, num_rows, shape.k);
  Pipeline pipeline(shared.stages);
  TileProduct<float, kMTiles, kNTiles> product;
  float totals[kMTiles][kNTiles][4];
  FD_UNROLL
  for (int i = 0; i < kMTiles * kNTiles * 4; ++i) totals[i / (kNTiles * 4)][i / 4 % kNTiles][i % 4] = 0.0f;
  pipeline.run(
      num_stages,
      [&](Stage& stage, int i) {
        weight_rows.copy(stage.weight, int64_t{i} * kTileBytes);
        x_rows.copy(stage.x, int64_t{i} * kTileBytes, i * kStageK + XRows::chunk() * 8 < shape.k);
      },
      [&](Stage& stage, int i) {
        product.template multiply<kSteps>(stage.weight, warp_output, stage.x, warp_row);
        if ((i + 1) % kPieceStages != 0 && i + 1 < num_stages) return;
        FD_UNROLL
        for (int j = 0; j < kMTiles * kNTiles * 4; ++j) {
          const int m = j / (kNTiles * 4), n = j / 4 % kNTiles;
          totals[m][n][j % 4] += product.sums[m][n][j % 4];
        }
        product.clear();
      });
  pipeline.sync();
  store_sums(totals, shared.sums, warp_row, warp_output);
  sync_block();
  const LinearOutputs<T> to{bias.data, residual.data, out.data, shape.n};
  const int rows_left = num_rows - first_row;
  finish_tile<T, kIsGated, kOutputs>(to, tile_row, first_row, rows_left < kRows ? rows_left : kRows,
                                     [&](int row, int column, float (&values)[4]) {
                                       for (float& value : values) value = 0.0f;
                                       add_four(&shared.sums[row][column], values);
                                     });
}

// ---- launches

struct LinearCall {
  const uint16_t *x, *weight, *norm, *bias;
  const void* residual;
  void* out;
  const int32_t* device_rows;
  LinearShape shape;
  void* stream;

  size_t elements(int64_t width) const { return static_cast<size_t>(shape.num_rows * width); }
  In<uint16_t> x_array() const { return {x, elements(shape.k)}; }
  In<uint16_t> weight_array() const { return {weight, size_t(shape.weight_rows) * size_t(shape.stride)}; }
  In<uint16_t> norm_array() const { return {norm, norm == nullptr ? 0 : size_t(shape.k)}; }
  In<uint16_t> bias_array(bool is_gated) const {
    return {bias, bias == nullptr ? 0 : size_t(shape.n) * (is_gated ? 2 : 1)};
  }
  template <class T>
  In<T> residual_array() const {
    return {static_cast<const T*>(residual), residual == nullptr || residual == out ? 0 : elements(shape.n)};
  }
  template <class T>
  Out<T> out_array() const {
    return {static_cast<T*>(out), elements(shape.n)};
  }
  In<int32_t> rows_array() const { return Count{device_rows, shape.num_rows}.array(); }
};

template <class T, bool kIsGated, int kMTiles, int kNTiles, int kStages = kShallow>
int launch_pieces(const LinearCall& call) {
  const int num_pieces = (call.shape.k + kPiece - 1) / kPiece;
  constexpr int kMaxWarps = max_piece_warps<kMTiles, kNTiles, kStages>();
  const int num_rounds = (num_pieces + kMaxWarps - 1) / kMaxWarps;
  const unsigned num_warps = static_cast<unsigned>((num_pieces + num_rounds - 1) / num_rounds);
  const unsigned num_blocks = static_cast<unsigned>((call.shape.weight_rows + 16 * kMTiles - 1) / (16 * kMTiles));
  const size_t bytes =
      sizeof(PieceShared<kMTiles, kNTiles>) + num_warps * sizeof(PieceMemory<kMTiles, kNTiles, kStages>);
  return launch(linear_pieces<T, kIsGated, kMTiles, kNTiles, kStages>, {num_blocks, 1, 1}, num_warps * kWarpSize, bytes,
                call.stream, call.x_array(), call.weight_array(), call.norm_array(), call.bias_array(kIsGated),
                call.residual_array<T>(), call.out_array<T>(), call.rows_array(), call.shape);
}

template <class T, bool kIsGated, int kMTiles, int kNTiles, int kWarpsM, int kWarpsN>
int launch_tiles(const LinearCall& call) {
  constexpr int kOutputs = 16 * kMTiles * kWarpsM, kRows = 8 * kNTiles * kWarpsN;
  const Dim3 grid = {static_cast<unsigned>((call.shape.num_rows + kRows - 1) / kRows),
                     static_cast<unsigned>((call.shape.weight_rows + kOutputs - 1) / kOutputs), 1};
  return launch(linear_tiles<T, kIsGated, kMTiles, kNTiles, kWarpsM, kWarpsN>, grid, kWarpsM * kWarpsN * kWarpSize,
                sizeof(TileShared<kOutputs, kRows>), call.stream, call.x_array(), call.weight_array(),
                call.bias_array(kIsGated), call.residual_array<T>(), call.out_array<T>(), call.rows_array(),
                call.shape);
}

// Chooses the number of stages for tiles of 16 rows of the weight: more where all warps together are too few.
template <class T, bool kIsGated, int kNTiles>
int launch_small(const LinearCall& call) {
  constexpr int kManyWarps = 512;
  const int num_pieces = (call.shape.k + kPiece - 1) / kPiece;
  const bool is_small = call.shape.weight_rows / 16 * num_pieces < kManyWarps;
  if (is_small && num_pieces <= max_piece_warps<1, kNTiles, kDeep>())
    return launch_pieces<T, kIsGated, 1, kNTiles, kDeep>(call);
  return launch_pieces<T, kIsGated, 1, kNTiles>(call);
}

// The choice changes the speed only. Of 32 rows of the weight, x is read half as often as of 16; that pays where there
// are blocks for every multiprocessor all the same.
template <class T, bool kIsGated>
int launch_linear(const LinearCall& call) {
  constexpr int kManyBlocks = 256;  // more than there are multiprocessors
  const int rows = call.shape.num_rows;
  const bool is_wide = call.shape.weight_rows >= 32 * kManyBlocks;
  if (rows <= 8) return is_wide ? launch_pieces<T, kIsGated, 2, 1>(call) : launch_small<T, kIsGated, 1>(call);
  if (rows <= 16) return is_wide ? launch_pieces<T, kIsGated, 2, 2>(call) : launch_small<T, kIsGated, 2>(call);
  if (rows <= kMaxFusedRows)
    return is_wide ? launch_pieces<T, kIsGated, 2, 4>(call) : launch_pieces<T, kIsGated, 1, 4>(call);
  const int64_t num_large = int64_t{(rows + 63) / 64} * ((call.shape.weight_rows + 127) / 128);
  if (rows <= 64 || num_large < kManyBlocks) return launch_tiles<T, kIsGated, 2, 4, 2, 2>(call);
  return launch_tiles<T, kIsGated, 4, 4, 2, 2>(call);
}

}  // namespace

// x: [num_rows, k], weight: packed, norm: [k] or null (at most 32 rows), bias: [n], [2 n] if gated, or null, all in
// bf16; out, residual (or null, may be out): [num_rows, n] fp32 or bf16.
FD_EXPORT int fd_linear(const uint16_t* x, const uint16_t* weight, const uint16_t* norm, const uint16_t* bias,
                        const void* residual, void* out, const int32_t* device_rows, int64_t num_rows, int64_t n,
                        int64_t k, int64_t is_gated, int64_t is_fp32, double eps, void* stream) {
  FD_REQUIRE("linear", k, k > 0 && k <= (1 << 24) && k % 8 == 0, "a multiple of 8 inputs, at most 16777216");
  FD_REQUIRE("linear", n, n > 0 && n <= (1 << 21), "1 to 2097152 outputs");
  FD_REQUIRE("linear", num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  FD_REQUIRE("linear", num_rows, norm == nullptr || num_rows <= kMaxFusedRows, "at most 32 rows with a norm");
  if (num_rows == 0) return kSuccess;
  const int64_t tile_outputs = is_gated ? 8 : 16;
  const LinearShape shape{static_cast<int>(num_rows),
                          static_cast<int>(n),
                          static_cast<int>((n + tile_outputs - 1) / tile_outputs * 16),
                          static_cast<int>(k),
                          static_cast<int>((k + kStageK - 1) / kStageK * kStageK),
                          static_cast<float>(eps)};
  const LinearCall call{x, weight, norm, bias, residual, out, device_rows, shape, stream};
  if (is_fp32) return is_gated ? launch_linear<float, true>(call) : launch_linear<float, false>(call);
  return is_gated ? launch_linear<uint16_t, true>(call) : launch_linear<uint16_t, false>(call);
}
