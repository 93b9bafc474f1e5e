// SPDX-License-Identifier: Apache-2.0
// Products through tiles.h, each out[rows, columns] = a b^T with the reduction over K: plain, with operands that are
// stored transposed, and of bytes; by a block of two warps or by one warp; in integers that fp32 represents.

#include "gpu_ops/tiles.h"
#include "common/export.h"

namespace {

using namespace fd::gpu;

constexpr int kColumns = 16, kThreads = 64, kStages = 3;

struct Stage {
  Tile<32, 128> a;
  Tile<kColumns, 128> b;
};
struct Shared {
  Stage stages[kStages];
};

// Rows of `row_bytes` bytes, as a tile takes them.
template <class Source, class T>
FD_DEVICE Source rows_of(const T* matrix, int num_rows, int row_bytes) {
  return Source(reinterpret_cast<const uint8_t*>(matrix) + Source::row() * row_bytes + Source::chunk() * 16, row_bytes,
                num_rows);
}

// Each warp computes 16 rows of out[32, 16]. Rows of `row_bytes` bytes, filled up with zeros, a stage takes 128.
template <class Sum>
FD_KERNEL void plain(In<uint8_t> a, In<uint8_t> b, Out<Sum> out, int row_bytes, int num_columns) {
  using Pipeline = TilePipeline<Stage, kStages, kThreads>;
  using A = typename Pipeline::template Source<decltype(Stage::a)>;
  using B = typename Pipeline::template Source<decltype(Stage::b)>;
  const auto a_rows = rows_of<A>(a.data, 32, row_bytes);
  const auto b_rows = rows_of<B>(b.data, num_columns, row_bytes);
  Pipeline pipeline(shared_memory<Shared>().stages);
  TileProduct<Sum, 1, 2> product;
  const int first = static_cast<int>(warp_index()) * 16;
  pipeline.run((row_bytes + 127) / 128,
               [&](Stage& stage, int i) {
                 a_rows.copy(stage.a, i * 128, i * 128 + A::chunk() * 16 < row_bytes);
                 b_rows.copy(stage.b, i * 128, i * 128 + B::chunk() * 16 < row_bytes);
               },
               [&](Stage& stage, int) { product.template multiply<4>(stage.a, first, stage.b, 0); });
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 4; ++i)
      out.data[(first + product.row(i)) * kColumns + 8 * n + product.column(i)] = product.sums[0][n][i];
}

// Only the first eight columns, by one warp for 32 rows.
FD_KERNEL void narrow(In<uint8_t> a, In<uint8_t> b, Out<float> out, int row_bytes) {
  using Pipeline = TilePipeline<Stage, 2, 32>;
  const auto a_rows = rows_of<Pipeline::Source<decltype(Stage::a)>>(a.data, 32, row_bytes);
  const auto b_rows = rows_of<Pipeline::Source<decltype(Stage::b)>>(b.data, 8, row_bytes);
  Pipeline pipeline(shared_memory<Shared>().stages);
  TileProduct<float, 2, 1> product;
  pipeline.run(
      row_bytes / 128,
      [&](Stage& stage, int i) {
        a_rows.copy(stage.a, i * 128);
        b_rows.copy(stage.b, i * 128);
      },
      [&](Stage& stage, int) { product.multiply<4>(stage.a, 0, stage.b, 0); });
  for (int m = 0; m < 2; ++m)
    for (int i = 0; i < 4; ++i)
      out.data[(16 * m + product.row(i)) * kColumns + product.column(i)] = product.sums[m][0][i];
}

// The first eight columns of products of unsigned bytes of a and signed ones of b, by one warp for 32 rows of 128
// bytes.
FD_KERNEL void unsigned_bytes(In<uint8_t> a, In<uint8_t> b, Out<int32_t> out) {
  using Pipeline = TilePipeline<Stage, 2, 32>;
  using Product = TileProduct<int32_t, 2, 1>;
  const auto a_rows = rows_of<Pipeline::Source<decltype(Stage::a)>>(a.data, 32, 128);
  const auto b_rows = rows_of<Pipeline::Source<decltype(Stage::b)>>(b.data, 8, 128);
  Pipeline pipeline(shared_memory<Shared>().stages);
  int32_t sums[2][4] = {};
  pipeline.run(
      1,
      [&](Stage& stage, int) {
        a_rows.copy(stage.a, 0);
        b_rows.copy(stage.b, 0);
      },
      [&](Stage& stage, int) {
        for (int chunk = 0; chunk < 8; chunk += 4) {
          Product::B first, second;
          Product::load_b_steps(stage.b, 0, chunk, first, second);
          for (int m = 0; m < 2; ++m) {
            Product::multiply_bytes<true>(sums[m], Product::load_a(stage.a, 16 * m, chunk), first);
            Product::multiply_bytes<true>(sums[m], Product::load_a(stage.a, 16 * m, chunk + 2), second);
          }
        }
      });
  for (int m = 0; m < 2; ++m)
    for (int i = 0; i < 4; ++i) out.data[(16 * m + Product::row(i)) * kColumns + Product::column(i)] = sums[m][i];
}

struct TransposedStage {
  Tile<16, 128> a, b;
};
struct TransposedShared {
  TransposedStage stages[2];
};

// out[16, 16] = a^T b for a and b [16 steps, 64], of which the first 16 columns are used.
FD_KERNEL void transposed(In<uint16_t> a, In<uint16_t> b, Out<float> out, int steps) {
  using Product = TileProduct<float, 1, 2>;
  using Pipeline = TilePipeline<TransposedStage, 2, 32>;
  using Rows = Pipeline::Source<Tile<16, 128>>;
  const auto a_rows = rows_of<Rows>(a.data, 16, 128), b_rows = rows_of<Rows>(b.data, 16, 128);
  Pipeline pipeline(shared_memory<TransposedShared>().stages);
  Product product;
  pipeline.run(
      steps,
      [&](TransposedStage& stage, int i) {
        a_rows.copy(stage.a, i * 16 * 128);
        b_rows.copy(stage.b, i * 16 * 128);
      },
      [&](TransposedStage& stage, int) {
        Product::B first, second;
        Product::load_b_transposed(stage.b, 0, 0, first, second);
        const Product::A rows = Product::load_a_transposed(stage.a, 0, 0);
        product.multiply(0, 0, rows, first);
        product.multiply(0, 1, rows, second);
      });
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 4; ++i) out.data[product.row(i) * 16 + 8 * n + product.column(i)] = product.sums[0][n][i];
}

// A tile whose groups of rows are copied in reverse.
template <int kRows, int kBytes, int kGroupRows>
FD_KERNEL void grouped(In<uint8_t> rows, Out<uint8_t> out, int num_rows) {
  using OneTile = Tile<kRows, kBytes>;
  struct Two {
    OneTile stages[2];
  };
  TilePipeline<OneTile, 2, kThreads> pipeline(shared_memory<Two>().stages);
  pipeline.run(
      1,
      [&](OneTile& tile, int) {
        pipeline.template copy_groups<kGroupRows>(tile, num_rows, [&](unsigned group, unsigned offset) {
          return rows.data + (kRows / kGroupRows - 1 - group) * kGroupRows * kBytes + offset;
        });
      },
      [&](OneTile& tile, int) {
        for (unsigned i = thread_index(); i < kRows * OneTile::kChunks; i += kThreads)
          store16(out.data + 16 * i, load16(tile.chunk(i / OneTile::kChunks, i % OneTile::kChunks)));
      });
}
template <int kRows, int kBytes, int kGroupRows>
int launch_grouped(const uint8_t* rows, uint8_t* out, int num_rows) {
  return launch(grouped<kRows, kBytes, kGroupRows>, {1, 1, 1}, kThreads, 2 * sizeof(Tile<kRows, kBytes>), nullptr,
                In<uint8_t>(rows, kRows * kBytes), Out<uint8_t>(out, kRows * kBytes), num_rows);
}

}  // namespace

// a: [32, k], b: [num_columns, k], out: [32, 16].
FD_EXPORT int fd_test_bf16(const uint8_t* a, const uint8_t* b, float* out, int k, int num_columns) {
  return launch(plain<float>, {1, 1, 1}, kThreads, sizeof(Shared), nullptr, In<uint8_t>(a, size_t(64 * k)),
                In<uint8_t>(b, size_t(2 * num_columns * k)), Out<float>(out, 32 * kColumns), 2 * k, num_columns);
}
FD_EXPORT int fd_test_s8(const uint8_t* a, const uint8_t* b, int32_t* out, int k, int num_columns) {
  return launch(plain<int32_t>, {1, 1, 1}, kThreads, sizeof(Shared), nullptr, In<uint8_t>(a, size_t(32 * k)),
                In<uint8_t>(b, size_t(num_columns * k)), Out<int32_t>(out, 32 * kColumns), k, num_columns);
}
// a: [32, 128] unsigned, b: [8, 128]; of out, 8 columns are written.
FD_EXPORT int fd_test_u8(const uint8_t* a, const uint8_t* b, int32_t* out) {
  return launch(unsigned_bytes, {1, 1, 1}, 32, sizeof(Shared), nullptr, In<uint8_t>(a, 32 * 128),
                In<uint8_t>(b, 8 * 128), Out<int32_t>(out, 32 * kColumns));
}
// b: [8, k]; of out, 8 columns are written.
FD_EXPORT int fd_test_narrow(const uint8_t* a, const uint8_t* b, float* out, int k) {
  return launch(narrow, {1, 1, 1}, 32, sizeof(Shared), nullptr, In<uint8_t>(a, size_t(64 * k)),
                In<uint8_t>(b, size_t(16 * k)), Out<float>(out, 32 * kColumns), 2 * k);
}
// a, b: [k, 64], out: [16, 16].
FD_EXPORT int fd_test_transposed(const uint16_t* a, const uint16_t* b, float* out, int k) {
  return launch(transposed, {1, 1, 1}, 32, sizeof(TransposedShared), nullptr, In<uint16_t>(a, size_t(64 * k)),
                In<uint16_t>(b, size_t(64 * k)), Out<float>(out, 256), k / 16);
}
// rows, out: [32, row_bytes], of which 2, 8 or 16 rows are copied at a time.
FD_EXPORT int fd_test_grouped(const uint8_t* rows, const uint8_t* unused, uint8_t* out, int row_bytes, int num_rows) {
  static_cast<void>(unused);
  if (row_bytes == 512) return launch_grouped<32, 512, 16>(rows, out, num_rows);
  if (row_bytes == 128) return launch_grouped<32, 128, 16>(rows, out, num_rows);
  return launch_grouped<32, 64, 8>(rows, out, num_rows);
}
// rows, out: [8, 64], copied at once by half of the threads.
FD_EXPORT int fd_test_grouped_few(const uint8_t* rows, const uint8_t* unused, uint8_t* out, int num_rows) {
  static_cast<void>(unused);
  return launch_grouped<8, 64, 1>(rows, out, num_rows);
}
