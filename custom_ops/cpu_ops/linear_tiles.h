// SPDX-License-Identifier: Apache-2.0
// What all linear layers share: how rows are divided into blocks and work into tiles, the preparation of rows, and the
// epilogue of sums.
#pragma once

#include "common/scratch.h"
#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/kernels.h"
#include "cpu_ops/norm.h"
#include "cpu_ops/sampling_kernels.h"
#include "cpu_ops/swiglu.h"

namespace fd {
namespace FD_ISA {

constexpr int64_t kGroupPanels = 4;     // panels of a group; tiles consist of whole groups where possible
constexpr int64_t kMaxTilePanels = 16;  // panels of a tile
constexpr int64_t kTileBlocks = 16;     // blocks of rows of a tile
constexpr int64_t kTilesPerThread = 8;  // aimed at: a late thread delays at most one of them
static_assert(kGroupPanels % kTuning.weight_streams == 0, "a group is read in whole sets of streams");

// If weights are read as one stream, prefetches the first weights of a thread before it prepares its rows.
FD_INLINE void prefetch_start(const void* weights) {
  if (kTuning.weight_streams > 1) return;
  for (int64_t at = 0; at < kPrefetchBytes; at += 64)
    __builtin_prefetch(static_cast<const uint8_t*>(weights) + at, 0, 2);
}

// Rows divided into blocks of nearly equal size, at most max_rows each. The rows of a block share each load of a
// weight.
struct RowBlocks {
  int64_t rows, count;
  explicit RowBlocks(int64_t num_rows, int64_t max_rows = kColumnRows)
      : rows(num_rows), count((num_rows + max_rows - 1) / max_rows) {}
  int64_t begin(int64_t block) const { return block * rows / count; }
};

// Panels [panel, last) for blocks [block, end).
struct Tile {
  int64_t panel, last, block, end;
};

// Calls body(prepared, i) for i in [0, count), on all threads if `parallel`. Each thread processes a range of
// neighbouring indices, so that its prefetches are for what it needs next; then it processes indices of other threads'
// ranges. `prepared` is the result of prepare(first index of the range), called once on each thread.
template <class Prepare, class Body>
static inline void for_each_in_ranges(int64_t count, bool parallel, Prepare&& prepare, Body&& body) {
  constexpr int64_t max_ranges = 64;  // more threads share ranges
  struct alignas(64) ThreadRange {
    int64_t next, end;
  };
  const int64_t threads = num_threads() < max_ranges ? num_threads() : max_ranges, ranges = parallel ? threads : 1;
  ThreadRange all[max_ranges];
  for (int64_t i = 0; i < ranges; ++i) all[i] = {i * count / ranges, (i + 1) * count / ranges};
  parallel_for(ranges, parallel, [&](int64_t own) {
    auto prepared = prepare(own * count / ranges);
    for (int64_t i = 0; i < ranges; ++i) {
      ThreadRange& range = all[(own + i) % ranges];
      for (int64_t at; (at = __atomic_fetch_add(&range.next, 1, __ATOMIC_RELAXED)) < range.end;) body(prepared, at);
    }
  });
}

template <class Body>
static inline void for_each_in_ranges(int64_t count, bool parallel, Body&& body) {
  for_each_in_ranges(count, parallel, [](int64_t) { return 0; }, [&](int, int64_t i) { body(i); });
}

// Returns the panels of a tile: whole groups, or fewer panels if there are not enough groups for all threads. It is a
// multiple of `alignment`, so that a gate panel and its up panel are in one tile.
inline int64_t panels_per_tile(int64_t num_panels, int64_t alignment) {
  const int64_t each = num_panels / num_threads() / alignment * alignment;
  if (each < kGroupPanels) return each < alignment ? alignment : each;
  const int64_t groups = each / (kGroupPanels * kTilesPerThread);
  constexpr int64_t max_groups = kMaxTilePanels / kGroupPanels;
  return (groups < 1 ? 1 : groups < max_groups ? groups : max_groups) * kGroupPanels;
}

// Writes the part of `block_maxima` that belongs to a tile while its outputs are still in the caches.
static inline void write_block_maxima(const LinearArgs& a, const RowBlocks& blocks, const Tile& tile) {
  if (a.block_maxima == nullptr) return;
  const int64_t first = tile.panel * kPanel, end = tile.last * kPanel < a.n ? tile.last * kPanel : a.n;
  for (int64_t row = blocks.begin(tile.block); row < blocks.begin(tile.end); ++row) {
    const float* outputs = static_cast<const float*>(a.out) + row * a.out_stride + first;
    float* maxima = a.block_maxima + row * num_blocks(a.n) + first / kBlock;
    kSamplingKernels.block_maxima(outputs, static_cast<int32_t>(end - first), maxima);
  }
}

// Calls body(prepared, tile) for tiles that cover all panels and blocks, on all threads if there is enough work.
// `prepared` is the result of prepare(first panel), as above.
template <class Prepare, class Body>
static inline void for_each_tile(const LinearArgs& a, const RowBlocks& blocks, Prepare&& prepare, Body&& body) {
  const int64_t num_panels = fd::num_panels(a.n, a.gated);
  const int64_t alignment = a.block_maxima != nullptr ? kBlock / kPanel : a.gated ? 2 : 1;
  const int64_t tile_panels = panels_per_tile(num_panels, alignment);
  const int64_t row_tiles = (blocks.count + kTileBlocks - 1) / kTileBlocks;
  const int64_t tiles = (num_panels + tile_panels - 1) / tile_panels * row_tiles;
  const bool parallel = a.rows * num_panels * kPanel * a.k >= kMinParallelProducts;
  const auto prepare_from = [&](int64_t index) { return prepare(index / row_tiles * tile_panels); };
  for_each_in_ranges(tiles, parallel, prepare_from, [&](const auto& prepared, int64_t index) {
    const int64_t panel = index / row_tiles * tile_panels, block = index % row_tiles * kTileBlocks;
    const int64_t last = panel + tile_panels < num_panels ? panel + tile_panels : num_panels;
    const int64_t end = block + kTileBlocks < blocks.count ? block + kTileBlocks : blocks.count;
    body(prepared, Tile{panel, last, block, end});
  });
}

template <class Body>
static inline void for_each_tile(const LinearArgs& a, const RowBlocks& blocks, Body&& body) {
  for_each_tile(a, blocks, [](int64_t) { return 0; }, [&](int, const Tile& tile) { body(tile); });
}

// Rows, `stride` elements apart.
template <class T>
struct StridedRows {
  const T* data;
  int64_t stride;
  const T* from(int64_t row) const { return data + row * stride; }
};

// Returns `count` rows from `row` on; a layer with a norm normalises them into this thread's scratch memory.
template <class T>
StridedRows<T> input_rows(const LinearArgs& a, int64_t row, int64_t count) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  if (a.norm == nullptr) return {x, a.x_stride};
  T* normed = static_cast<T*>(thread_scratch(static_cast<size_t>(count * a.k) * sizeof(T), Scratch::kTile));
  norm_rows(x, a.x_stride, static_cast<const T*>(a.norm), normed, count, a.k, a.eps);
  return {normed, a.k};
}

// Does the same as store_rounded for results of arithmetic, whose NaN need no special handling (vec_pairs.h).
FD_INLINE void store_result(float* p, FP32Vec16 x) { store(p, x); }
FD_INLINE void store_result(uint16_t* p, FP32Vec16 x) {
#if defined(FD_ISA_AVX512) && !defined(FD_ISA_AVX512_BF16)
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_high(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
#else
  store_bf16(p, x);
#endif
}

template <class Out>
FD_INLINE void write_as(const LinearArgs& a, FP32Vec16 value, int64_t row, int64_t column) {
  const int64_t at = row * a.out_stride + column;
  const Out* residual = static_cast<const Out*>(a.residual);
  Out* out = static_cast<Out*>(a.out) + at;
  const int width = static_cast<int>(a.n - column < kPanel ? a.n - column : kPanel);
  if (width == kPanel) {
    if (residual != nullptr) value = add(value, load_as_float(residual + at));
    store_result(out, value);
  } else {
    if (residual != nullptr) value = add(value, load_first(residual + at, width));
    store_first(out, value, width);
  }
}

// Adds the residual in fp32, rounds once and writes the sixteen outputs from `column` on of one row.
FD_INLINE void write_out(const LinearArgs& a, FP32Vec16 value, int64_t row, int64_t column) {
  a.out_dtype == DType::kFloat32 ? write_as<float>(a, value, row, column) : write_as<uint16_t>(a, value, row, column);
}

// Keeps the outputs of a gate panel in `gate` [16] until its up panel follows. It is not inlined, because a copy for
// each number of rows would be too much code.
template <class T>
__attribute__((noinline)) void write_gated(const LinearArgs& a, FP32Vec16 sum, int64_t row, int64_t panel,
                                           float* gate) {
  if (panel % 2 == 0) return store(gate, sum);
  write_out(a, mul(silu(load(gate)), sum), row, panel / 2 * kPanel);
}

// Applies bias, gate and residual to the sums of one row and panel, and writes the outputs. T is the type of the bias.
template <class T>
FD_INLINE void write_sums(const LinearArgs& a, FP32Vec16 sum, int64_t row, int64_t panel, float* gate) {
  if (a.bias != nullptr) {
    const PanelRows outputs = rows_of_panel(panel, a.n, a.gated);
    const T* bias = static_cast<const T*>(a.bias) + outputs.first;
    sum = add(sum, outputs.count == kPanel ? load_as_float(bias) : load_first(bias, static_cast<int>(outputs.count)));
  }
  a.gated ? write_gated<T>(a, sum, row, panel, gate) : write_out(a, sum, row, panel * kPanel);
}

}  // namespace FD_ISA
}  // namespace fd
