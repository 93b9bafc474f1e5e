// SPDX-License-Identifier: Apache-2.0
// What a device can do at most: copies of memory, and products of matrices that lie in registers. Benchmarks compare
// operators with both.

#include "common/export.h"
#include "gpu_ops/tiles.h"

namespace {

using namespace fd::gpu;

constexpr int kMTiles = 2, kNTiles = 4, kThreads = 256;

FD_KERNEL void copy_chunks(In<uint8_t> from, Out<uint8_t> to, int64_t num_chunks) {
  const int64_t stride = int64_t{grid_size().x} * block_size();
  for (int64_t i = int64_t{block_index().x} * block_size() + thread_index(); i < num_chunks; i += stride)
    store16(to.data + i * 16, load16_readonly(from.data + i * 16));
}

// Every warp adds up `num_steps` times the same 32 x 32 products over 16 elements each.
FD_KERNEL void multiply_registers(Out<float> sums, int num_steps) {
  using Product = TileProduct<float, kMTiles, kNTiles>;
  Product product;
  typename Product::A rows[kMTiles];
  typename Product::B columns[kNTiles];
  FD_UNROLL
  for (int m = 0; m < kMTiles; ++m) FD_UNROLL
  for (int i = 0; i < 4; ++i) rows[m].word[i] = 0x3f803f80u + lane_index() + static_cast<unsigned>(m);  // about 1
  FD_UNROLL
  for (int n = 0; n < kNTiles; ++n) FD_UNROLL
  for (int i = 0; i < 2; ++i) columns[n].word[i] = 0x3f803f80u + static_cast<unsigned>(n);
  for (int step = 0; step < num_steps; ++step) FD_UNROLL
  for (int m = 0; m < kMTiles; ++m) FD_UNROLL
  for (int n = 0; n < kNTiles; ++n) product.multiply(m, n, rows[m], columns[n]);
  float sum = 0.0f;
  FD_UNROLL
  for (int m = 0; m < kMTiles; ++m) FD_UNROLL
  for (int n = 0; n < kNTiles; ++n) FD_UNROLL
  for (int i = 0; i < 4; ++i) sum += product.sums[m][n][i];
  sums.data[block_index().x * block_size() + thread_index()] = sum;
}

}  // namespace

// from, to: [16 num_chunks] bytes.
FD_EXPORT int fd_copy_chunks(const uint8_t* from, uint8_t* to, int64_t num_chunks, int64_t num_blocks, void* stream) {
  const size_t bytes = static_cast<size_t>(num_chunks) * 16;
  return launch(copy_chunks, {static_cast<unsigned>(num_blocks), 1, 1}, kThreads, 0, stream, In<uint8_t>(from, bytes),
                Out<uint8_t>(to, bytes), num_chunks);
}

// sums: [256 num_blocks] fp32; a block executes 8 * 8 * num_steps products of 16 x 8 x 16.
FD_EXPORT int fd_multiply_registers(float* sums, int64_t num_blocks, int64_t num_steps, void* stream) {
  const unsigned blocks = static_cast<unsigned>(num_blocks);
  return launch(multiply_registers, {blocks, 1, 1}, kThreads, 0, stream, Out<float>(sums, size_t{blocks} * kThreads),
                static_cast<int>(num_steps));
}
