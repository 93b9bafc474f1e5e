// SPDX-License-Identifier: Apache-2.0
// What linear layers share whatever holds their weights: how rows are cut into blocks and work into tiles, and what
// happens to a finished sum.
#pragma once

#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kMaxTilePanels = 16;         // outputs / 16 that a thread takes at a time, at most
constexpr int64_t kTileBlocks = 16;            // blocks of rows that it takes with them, at most
constexpr int64_t kTilesPerThread = 8;         // tiles per thread to aim at: a late thread holds back one of them
constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds below which waking a thread costs more than it saves
constexpr int64_t kMinParallelPack = 1 << 16;  // the same in inputs to pack
constexpr int64_t kFetchBytes = 1 << 14;       // how far ahead weights are fetched, all streams together

// The rows, cut into blocks of nearly equal height. The rows of a block share each load of a weight, so that the
// weights of up to kColumnRows rows are read once.
struct Blocks {
  int64_t rows, count;
  explicit Blocks(int64_t num_rows) : rows(num_rows), count((num_rows + kColumnRows - 1) / kColumnRows) {}
  int64_t begin(int64_t block) const { return block * rows / count; }
};

// Panels [panel, last) of blocks [block, end).
struct Tile {
  int64_t panel, last, block, end;
};

// Calls body(tile) for tiles that together cover all panels and blocks, on all threads if that is worth it.
template <class Body>
static inline void for_each_tile(const LinearArgs& a, const Blocks& blocks, Body&& body) {
  const int64_t num_panels = (a.n + kPanel - 1) / kPanel;
  const int64_t share = num_panels / (num_threads() * kTilesPerThread);
  const int64_t tile_panels = share < 1 ? 1 : share < kMaxTilePanels ? share : kMaxTilePanels;
  const int64_t row_tiles = (blocks.count + kTileBlocks - 1) / kTileBlocks;
  const int64_t tiles = (num_panels + tile_panels - 1) / tile_panels * row_tiles;
  parallel_for(tiles, a.rows * a.n * a.k >= kMinParallelWork, [&](int64_t index) {
    const int64_t panel = index / row_tiles * tile_panels, block = index % row_tiles * kTileBlocks;
    const int64_t last = panel + tile_panels < num_panels ? panel + tile_panels : num_panels;
    const int64_t end = block + kTileBlocks < blocks.count ? block + kTileBlocks : blocks.count;
    body(Tile{panel, last, block, end});
  });
}

template <class T, class Out>
FD_INLINE void finish_as(const LinearArgs& a, F16 acc, int64_t row, int64_t column) {
  const T* bias = static_cast<const T*>(a.bias);
  const int64_t at = row * a.n + column;
  const Out* residual = static_cast<const Out*>(a.residual);
  Out* out = static_cast<Out*>(a.out) + at;
  const int width = static_cast<int>(a.n - column < kPanel ? a.n - column : kPanel);
  if (width == kPanel) {
    if (bias != nullptr) acc = add(acc, load_as_float(bias + column));
    if (residual != nullptr) acc = add(acc, load_as_float(residual + at));
    store_rounded(out, acc);
  } else {
    if (bias != nullptr) acc = add(acc, load_first(bias + column, width));
    if (residual != nullptr) acc = add(acc, load_first(residual + at, width));
    store_first(out, acc, width);
  }
}

// Adds bias and residual in fp32 and rounds once: the 16 outputs from `column` of one row. T is the type of the bias.
template <class T>
FD_INLINE void finish(const LinearArgs& a, F16 acc, int64_t row, int64_t column) {
  a.out_dtype == DType::kFloat32 ? finish_as<T, float>(a, acc, row, column)
                                 : finish_as<T, uint16_t>(a, acc, row, column);
}

}  // namespace FD_ISA
}  // namespace fd
