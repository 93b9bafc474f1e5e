// SPDX-License-Identifier: Apache-2.0
// What linear layers share whatever holds their weights: how rows are cut into blocks and work into tiles, and what
// happens to rows before and to sums after.
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

constexpr int64_t kGroupPanels = 4;            // outputs / 16 that make four streams of weights
constexpr int64_t kMaxTilePanels = 16;         // panels that a thread takes at a time, at most
constexpr int64_t kTileBlocks = 16;            // blocks of rows that it takes with them, at most
constexpr int64_t kTilesPerThread = 8;         // tiles per thread to aim at: a late thread holds back one of them
constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds below which waking a thread costs more than it saves
constexpr int64_t kMinParallelPack = 1 << 16;  // the same in inputs to pack
constexpr int64_t kFetchBytes = 1 << 14;       // how far ahead weights are fetched, all streams together

// Inputs that every thread rather prepares for itself: to wait for others and to read what they have written would take
// it longer. Where its first weights come in meanwhile (fetch_first), that holds for more of them.
constexpr int64_t kMostOwn = kFetchesStreams ? 1 << 14 : 1 << 15;

// Where one stream of weights is read, asks for what a thread reads first, before it prepares its rows.
FD_INLINE void fetch_first(const void* weights) {
  if (kFetchesStreams) return;
  for (int64_t at = 0; at < kFetchBytes; at += 64) __builtin_prefetch(static_cast<const uint8_t*>(weights) + at, 0, 2);
}

// The rows, cut into blocks of nearly equal height. The rows of a block share each load of a weight, so that the
// weights of up to `most` rows are read once.
struct Blocks {
  int64_t rows, count;
  explicit Blocks(int64_t num_rows, int64_t most = kColumnRows) : rows(num_rows), count((num_rows + most - 1) / most) {}
  int64_t begin(int64_t block) const { return block * rows / count; }
};

// Panels [panel, last) of blocks [block, end).
struct Tile {
  int64_t panel, last, block, end;
};

// Calls body(made, i) for i in [0, count), on all threads if `parallel`, `made` being what make(first) has returned on
// the same thread. Each thread walks a stretch of neighbours from `first` on, so that what it fetches ahead is what it
// needs next; then it takes from the stretches of threads that are late.
template <class Make, class Body>
static inline void for_each_in_stretches(int64_t count, bool parallel, Make&& make, Body&& body) {
  constexpr int64_t most = 64;  // more threads share stretches
  struct alignas(64) Stretch {
    int64_t next, end;
  };
  const int64_t threads = num_threads() < most ? num_threads() : most, stretches = parallel ? threads : 1;
  Stretch all[most];
  for (int64_t i = 0; i < stretches; ++i) all[i] = {i * count / stretches, (i + 1) * count / stretches};
  parallel_for(stretches, parallel, [&](int64_t own) {
    const auto made = make(own * count / stretches);
    for (int64_t i = 0; i < stretches; ++i) {
      Stretch& stretch = all[(own + i) % stretches];
      for (int64_t at; (at = __atomic_fetch_add(&stretch.next, 1, __ATOMIC_RELAXED)) < stretch.end;) body(made, at);
    }
  });
}

template <class Body>
static inline void for_each_in_stretches(int64_t count, bool parallel, Body&& body) {
  for_each_in_stretches(count, parallel, [](int64_t) { return 0; }, [&](int, int64_t i) { body(i); });
}

// Whole groups of panels that a thread takes at a time; fewer only where there are not enough for all threads. Panels
// that stand `together`, a gate and its up, are not parted.
inline int64_t panels_of_tile(int64_t num_panels, int64_t together) {
  const int64_t each = num_panels / num_threads() / together * together;
  if (each < kGroupPanels) return each < together ? together : each;
  const int64_t groups = each / (kGroupPanels * kTilesPerThread), most = kMaxTilePanels / kGroupPanels;
  return (groups < 1 ? 1 : groups < most ? groups : most) * kGroupPanels;
}

// Fills a tile's part of `block_maxima` while its outputs lie in a near cache.
static inline void write_block_maxima(const LinearArgs& a, const Blocks& blocks, const Tile& tile) {
  const int64_t first = tile.panel * kPanel, end = tile.last * kPanel < a.n ? tile.last * kPanel : a.n;
  for (int64_t row = blocks.begin(tile.block); row < blocks.begin(tile.end); ++row) {
    const float* outputs = static_cast<const float*>(a.out) + row * a.n + first;
    float* maxima = a.block_maxima + row * num_blocks(a.n) + first / kBlock;
    kSamplingKernels.block_maxima(outputs, static_cast<int32_t>(end - first), maxima);
  }
}

// Calls body(made, tile) for tiles that together cover all panels and blocks, on all threads if that is worth it;
// `made` as above, of make(the first panel).
template <class Make, class Body>
static inline void for_each_tile(const LinearArgs& a, const Blocks& blocks, Make&& make, Body&& body) {
  const int64_t num_panels = fd::num_panels(a.n, a.gated);
  const int64_t together = a.block_maxima != nullptr ? kBlock / kPanel : a.gated ? 2 : 1;
  const int64_t tile_panels = panels_of_tile(num_panels, together);
  const int64_t row_tiles = (blocks.count + kTileBlocks - 1) / kTileBlocks;
  const int64_t tiles = (num_panels + tile_panels - 1) / tile_panels * row_tiles;
  const bool parallel = a.rows * num_panels * kPanel * a.k >= kMinParallelWork;
  const auto make_for_tile = [&](int64_t index) { return make(index / row_tiles * tile_panels); };
  for_each_in_stretches(tiles, parallel, make_for_tile, [&](const auto& made, int64_t index) {
    const int64_t panel = index / row_tiles * tile_panels, block = index % row_tiles * kTileBlocks;
    const int64_t last = panel + tile_panels < num_panels ? panel + tile_panels : num_panels;
    const int64_t end = block + kTileBlocks < blocks.count ? block + kTileBlocks : blocks.count;
    const Tile tile = {panel, last, block, end};
    body(made, tile);
    if (a.block_maxima != nullptr) write_block_maxima(a, blocks, tile);
  });
}

template <class Body>
static inline void for_each_tile(const LinearArgs& a, const Blocks& blocks, Body&& body) {
  for_each_tile(a, blocks, [](int64_t) { return 0; }, [&](int, const Tile& tile) { body(tile); });
}

// Returns `count` rows from `row` on, normalised into this thread's scratch if the layer asks for it.
template <class T>
const T* input_rows(const LinearArgs& a, int64_t row, int64_t count) {
  const T* x = static_cast<const T*>(a.x) + row * a.k;
  if (a.norm == nullptr) return x;
  T* normed = static_cast<T*>(thread_scratch(static_cast<size_t>(count * a.k) * sizeof(T), Scratch::kTile));
  norm_rows(x, static_cast<const T*>(a.norm), normed, count, a.k, a.eps);
  return normed;
}

// As store_rounded, of what arithmetic has made of bf16.
FD_INLINE void store_result(float* p, F16 x) { store(p, x); }
FD_INLINE void store_result(uint16_t* p, F16 x) {
#if defined(FD_ISA_AVX512) && !defined(FD_ISA_AVX512_BF16)
  const __m256i narrow = _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_high(x), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow);
#else
  store_bf16(p, x);
#endif
}

template <class Out>
FD_INLINE void write_as(const LinearArgs& a, F16 value, int64_t row, int64_t column) {
  const int64_t at = row * a.n + column;
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

// Adds the residual in fp32 and rounds once: the 16 outputs from `column` of one row.
FD_INLINE void write_out(const LinearArgs& a, F16 value, int64_t row, int64_t column) {
  a.out_dtype == DType::kFloat32 ? write_as<float>(a, value, row, column) : write_as<uint16_t>(a, value, row, column);
}

// A gate waits in `gate` [16] for its up. Not inlined: once per height of a block would be much code.
template <class T>
__attribute__((noinline)) void finish_gated(const LinearArgs& a, F16 sum, int64_t row, int64_t panel, float* gate) {
  if (panel % 2 == 0) return store(gate, sum);
  write_out(a, mul(silu(load(gate)), sum), row, panel / 2 * kPanel);
}

// Ends the sums of one row and panel. T is the type of the bias; `gate` is where the row's gates wait.
template <class T>
FD_INLINE void finish(const LinearArgs& a, F16 sum, int64_t row, int64_t panel, float* gate) {
  if (a.bias != nullptr) {
    const PanelRows outputs = rows_of_panel(panel, a.n, a.gated);
    const T* bias = static_cast<const T*>(a.bias) + outputs.first;
    sum = add(sum, outputs.count == kPanel ? load_as_float(bias) : load_first(bias, static_cast<int>(outputs.count)));
  }
  a.gated ? finish_gated<T>(a, sum, row, panel, gate) : write_out(a, sum, row, panel * kPanel);
}

}  // namespace FD_ISA
}  // namespace fd
