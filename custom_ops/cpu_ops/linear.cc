// SPDX-License-Identifier: Apache-2.0
// Linear layers over packed bf16 and fp32 weights.
#include <cstring>
#include <utility>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_slice.h"
#include "cpu_ops/linear_tiles.h"

namespace fd {
namespace FD_ISA {
namespace {

// A typed view of the arguments.
template <class T>
struct Problem {
  const LinearArgs& a;
  const T* packed;
  int64_t units;  // k units of a row

  explicit Problem(const LinearArgs& args)
      : a(args), packed(static_cast<const T*>(args.packed)), units((args.k + KUnit<T>::kSize - 1) / KUnit<T>::kSize) {}

  int64_t panel_size() const { return (a.k + 1) / 2 * 2 * kPanel; }
};

// Returns the panels that a block of rows multiplies at a time. A single row needs several accumulators to hide the
// latency of additions; a few rows need them to share loads of row units.
constexpr int panels_at_a_time(int rows) {
  if (rows == 1) return kMaxPanels;
  return kMaxPanels == 1 || kTuning.weight_streams == 1 || rows > 12 ? 1 : rows <= 4 ? kMaxPanels : 2;
}

// How weights are read (Tuning::weight_streams). With several streams, a group of neighbouring panels is multiplied
// strip of k by strip of k, while lines of the next strip of every panel are prefetched into L1 in rotation. With one
// stream, panels are multiplied one after the other over all of k; only a single panel is prefetched. Row blocks of
// long prompts are multiplied in that way, too: their weights are already in the cache, and they have no load port to
// spare.
constexpr int kMaxGroupRows = 20;  // of a block that multiplies groups of panels
template <int64_t kPanels>
constexpr int64_t kPrefetchStreams = kPanels == 1 ? 1 : (kTuning.weight_streams > 1 ? kPanels : 0);

// sums[v][r] += `count` k units of NV panels times those of MR rows. Meanwhile it prefetches lines of kNum panels in
// rotation, starting at `prefetch_from`.
template <int MR, int NV, int64_t kNum, class T>
FD_INLINE void dot_strip(FP32Vec16* sums, const RowUnit<T>* x, const T* weights, const T* prefetch_from,
                         int64_t panel_size, int64_t count) {
  FP32Vec16 acc[MR][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = sums[v * MR + r];
  for (int64_t unit = 0; unit < count; ++unit) {
    typename KUnit<T>::WeightUnit units[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      if constexpr (kNum > 0) {
        const int64_t line = unit * NV + v, at = line % kNum * panel_size + line / kNum * kUnitSize<T>;
        __builtin_prefetch(prefetch_from + at, 0, kNum == 1 && kTuning.weight_streams > 1 ? 2 : 3);
      }
      units[v] = KUnit<T>::load_weights(weights + v * panel_size + unit * kUnitSize<T>);
    }
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = KUnit<T>::dot(acc[r][v], x[unit * MR + r], units[v]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[v * MR + r] = acc[r][v];
}

// Multiplies a block of MR packed rows, starting at `row`, by a group of panels, NV at a time. `gates` [MR][16] keeps
// the outputs of a gate panel for the up panel that follows it.
template <int MR, int NV, int64_t kPanels, class T>
void group_block(const Problem<T>& p, const RowUnit<T>* x, int64_t row, int64_t panel, float* gates) {
  constexpr int64_t streams = kPrefetchStreams<kPanels>;
  const int64_t size = p.panel_size(), strips = streams > 1 ? (p.units + kStripUnits - 1) / kStripUnits : 1;
  const T* weights = p.packed + panel * size;
  FP32Vec16 sums[kPanels * MR];
  for (FP32Vec16& sum : sums) sum = zero();
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t unit = strip * p.units / strips, end = (strip + 1) * p.units / strips, count = end - unit;
    const T* next = end < p.units ? weights + end * kUnitSize<T> : weights + kPanels * size;
    for (int64_t v = 0; v < kPanels; v += NV) {
      const T* from = weights + v * size + unit * kUnitSize<T>;
      const T* prefetch_from =
          streams > 1 ? next + v * count / kPanels * kUnitSize<T> : from + kPrefetchBytes / sizeof(T);
      dot_strip<MR, NV, streams>(sums + v * MR, x + unit * MR, from, prefetch_from, size, count);
    }
  }
  for (int64_t v = 0; v < kPanels; ++v)
    for (int r = 0; r < MR; ++r) write_sums<T>(p.a, sums[v * MR + r], row + r, panel + v, gates + r * kPanel);
}

// Multiplies a block of rows by panels [panel, last).
template <int MR, class T>
void tile_block(const Problem<T>& p, const RowUnit<T>* x, int64_t row, int64_t panel, int64_t last) {
  float gates[MR * kPanel];
  constexpr int NV = panels_at_a_time(MR);
  constexpr int64_t group = kTuning.weight_streams > 1 && MR <= kMaxGroupRows ? kTuning.weight_streams : NV;
  for (; panel + group <= last; panel += group) group_block<MR, NV, group>(p, x, row, panel, gates);
  for (; panel < last; ++panel) group_block<MR, 1, 1>(p, x, row, panel, gates);
}

// Calls tile_block for a number of rows that is known at run time.
template <class T, int... kHeight>
FD_INLINE void dispatch_tile_block(std::integer_sequence<int, kHeight...>, int64_t height, const Problem<T>& p,
                                   const RowUnit<T>* x, int64_t row, int64_t panel, int64_t last) {
  using TileBlock = void (*)(const Problem<T>&, const RowUnit<T>*, int64_t, int64_t, int64_t);
  constexpr TileBlock tile_blocks[] = {tile_block<kHeight + 1, T>...};
  tile_blocks[height - 1](p, x, row, panel, last);
}

// Returns the interleaved rows in this thread's scratch memory.
template <class T>
const RowUnit<T>* packed_rows(const Problem<T>& p, const RowBlocks& blocks) {
  auto* packed = static_cast<RowUnit<T>*>(thread_scratch(static_cast<size_t>(p.a.rows * p.units) * sizeof(RowUnit<T>)));
  parallel_for(blocks.count, p.a.rows * p.a.k >= kMinParallelInputs, [&](int64_t block) {
    const int64_t row = blocks.begin(block), count = blocks.begin(block + 1) - row;
    const StridedRows<T> rows = input_rows<T>(p.a, row, count);
    interleave_rows(rows.data, rows.stride, count, p.a.k, packed + row * p.units);
  });
  return packed;
}

// Multiplies the blocks of a tile by its panels.
template <class T>
void multiply_blocks(const Problem<T>& p, const RowUnit<T>* x, const RowBlocks& blocks, const Tile& tile) {
  for (int64_t b = tile.block; b < tile.end; ++b) {
    const int64_t row = blocks.begin(b);
    dispatch_tile_block(std::make_integer_sequence<int, kColumnRows>(), blocks.begin(b + 1) - row, p, x + row * p.units,
                        row, tile.panel, tile.last);
  }
}

template <class T>
void linear_typed(const LinearArgs& a) {
  if (a.rows == 0) return;
  const Problem<T> p(a);
  const RowBlocks blocks(a.rows);
  // Threads prepare rows for themselves as in linear_quant.cc; this was not measured with several streams.
  const bool is_shared = kTuning.weight_streams > 1 || a.rows * a.k > kTuning.max_private_inputs || a.x == a.out;
  const RowUnit<T>* shared = is_shared ? packed_rows(p, blocks) : nullptr;
  const auto prepare_rows = [&](int64_t first_panel) {
    if (is_shared) return shared;
    prefetch_start(p.packed + first_panel * p.panel_size());
    return packed_rows(p, blocks);
  };
  for_each_tile(a, blocks, prepare_rows, [&](const RowUnit<T>* x, const Tile& tile) {
    multiply_blocks(p, x, blocks, tile);
    write_block_maxima(a, blocks, tile);
  });
}

template <class T>
void multiply_panels_typed(const LinearArgs& a, const RowUnit<T>* x, int64_t first, int64_t last) {
  const Problem<T> p(a);
  multiply_blocks(p, x, RowBlocks(a.rows), {first, last, 0, RowBlocks(a.rows).count});
}

}  // namespace

PreparedRows prepare_rows(const LinearArgs& a) {
  const RowBlocks blocks(a.rows);
  if (a.dtype == DType::kBfloat16) return {packed_rows(Problem<uint16_t>(a), blocks), {}};
  return {packed_rows(Problem<float>(a), blocks), {}};
}

void multiply_panels(const LinearArgs& a, const PreparedRows& rows, int64_t first, int64_t last) {
  if (a.dtype == DType::kBfloat16)
    return multiply_panels_typed<uint16_t>(a, static_cast<const RowUnit<uint16_t>*>(rows.units), first, last);
  multiply_panels_typed<float>(a, static_cast<const RowUnit<float>*>(rows.units), first, last);
}

void linear(const LinearArgs& a) { a.dtype == DType::kBfloat16 ? linear_typed<uint16_t>(a) : linear_typed<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
