// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <utility>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"

namespace fd {
namespace FD_ISA {
namespace {

// A tile's view of the arguments: raw rows and panels.
template <class T>
struct Problem {
  const LinearArgs& a;
  const T* packed;
  int64_t steps;

  explicit Problem(const LinearArgs& args)
      : a(args), packed(static_cast<const T*>(args.packed)), steps((args.k + Step<T>::kSize - 1) / Step<T>::kSize) {}

  int64_t panel_size() const { return (a.k + 1) / 2 * 2 * kPanel; }
};

// The panels that a block of rows meets at a time. A single row has too few accumulators to hide the latency of its
// additions; more rows share the loads of their elements.
constexpr int panels_at_a_time(int rows) {
  if (rows == 1) return kMaxPanels;
  return kMaxPanels == 1 || !kFetchesStreams || rows > 12 ? 1 : rows <= 4 ? kMaxPanels : 2;
}

// Weights come in faster in four streams than in one. So neighbouring panels are met in groups, a strip of k after the
// other, while lines of all their next strips are asked for by turns: into L1, where a strip's elements and the sums
// wait too. Where one stream comes in faster than several (not kFetchesStreams), panels are met whole, and only a
// single one is fetched; so they are by the blocks of long prompts, which find their weights in the cache and have no
// load to spare.
constexpr int64_t kStripSteps = 64;
constexpr int kMostGroupRows = 20;
template <int64_t kPanels>
constexpr int64_t kStreams = kPanels == 1 ? 1 : (kFetchesStreams ? kPanels : 0);

// sums[v][r] += `count` steps of NV panels times their elements of MR rows; meanwhile lines are asked for, of kNum
// panels by turns, from `fetched` on.
template <int MR, int NV, int64_t kNum, class T>
FD_INLINE void dot_strip(F16* sums, const Element<T>* x, const T* weights, const T* fetched, int64_t panel_size,
                         int64_t count) {
  F16 acc[MR][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = sums[v * MR + r];
  for (int64_t step = 0; step < count; ++step) {
    typename Step<T>::Panel panel[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      if constexpr (kNum > 0) {
        const int64_t line = step * NV + v, at = line % kNum * panel_size + line / kNum * kStepSize<T>;
        __builtin_prefetch(fetched + at, 0, kNum == 1 && kFetchesStreams ? 2 : 3);
      }
      panel[v] = Step<T>::load_panel(weights + v * panel_size + step * kStepSize<T>);
    }
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = Step<T>::dot(acc[r][v], x[step * MR + r], panel[v]);
  }
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[v * MR + r] = acc[r][v];
}

// One block of MR packed rows, the first of which is `row`, times a group of panels, NV at a time: the whole of k in
// order. `gates` [MR][16] lasts from a gate's panel to its up's.
template <int MR, int NV, int64_t kPanels, class T>
void group_block(const Problem<T>& p, const Element<T>* x, int64_t row, int64_t panel, float* gates) {
  constexpr int64_t streams = kStreams<kPanels>;
  const int64_t size = p.panel_size(), strips = streams > 1 ? (p.steps + kStripSteps - 1) / kStripSteps : 1;
  const T* weights = p.packed + panel * size;
  F16 sums[kPanels * MR];
  for (F16& sum : sums) sum = zero();
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t step = strip * p.steps / strips, end = (strip + 1) * p.steps / strips, count = end - step;
    const T* next = end < p.steps ? weights + end * kStepSize<T> : weights + kPanels * size;
    for (int64_t v = 0; v < kPanels; v += NV) {
      const T* from = weights + v * size + step * kStepSize<T>;
      const T* fetched = streams > 1 ? next + v * count / kPanels * kStepSize<T> : from + kFetchBytes / sizeof(T);
      dot_strip<MR, NV, streams>(sums + v * MR, x + step * MR, from, fetched, size, count);
    }
  }
  for (int64_t v = 0; v < kPanels; ++v)
    for (int r = 0; r < MR; ++r) finish<T>(p.a, sums[v * MR + r], row + r, panel + v, gates + r * kPanel);
}

// A block times panels [panel, last).
template <int MR, class T>
void tile_block(const Problem<T>& p, const Element<T>* x, int64_t row, int64_t panel, int64_t last) {
  float gates[MR * kPanel];
  constexpr int NV = panels_at_a_time(MR);
  constexpr int64_t group = kFetchesStreams && MR <= kMostGroupRows ? kGroupPanels : NV;
  for (; panel + group <= last; panel += group) group_block<MR, NV, group>(p, x, row, panel, gates);
  for (; panel < last; ++panel) group_block<MR, 1, 1>(p, x, row, panel, gates);
}

// As tile_block for a height known at run time.
template <class T, int... kHeight>
FD_INLINE void any_tile_block(std::integer_sequence<int, kHeight...>, int64_t height, const Problem<T>& p,
                              const Element<T>* x, int64_t row, int64_t panel, int64_t last) {
  using TileBlock = void (*)(const Problem<T>&, const Element<T>*, int64_t, int64_t, int64_t);
  constexpr TileBlock by_height[] = {tile_block<kHeight + 1, T>...};
  by_height[height - 1](p, x, row, panel, last);
}

// Returns the rows in the kernel's order, in this thread's scratch.
template <class T>
const Element<T>* packed_rows(const Problem<T>& p, const Blocks& blocks) {
  auto* packed = static_cast<Element<T>*>(thread_scratch(static_cast<size_t>(p.a.rows * p.steps) * sizeof(Element<T>)));
  parallel_for(blocks.count, p.a.rows * p.a.k >= kMinParallelPack, [&](int64_t block) {
    const int64_t row = blocks.begin(block), count = blocks.begin(block + 1) - row;
    interleave_rows(input_rows<T>(p.a, row, count), count, p.a.k, packed + row * p.steps);
  });
  return packed;
}

template <class T>
void linear_typed(const LinearArgs& a) {
  if (a.rows == 0) return;
  const Problem<T> p(a);
  const Blocks blocks(a.rows);
  // Every thread for itself as in linear_quant.cc, but not tried where several streams are fetched.
  const bool is_shared = kFetchesStreams || a.rows * a.k > kMostOwn || a.x == a.out;
  const Element<T>* shared = is_shared ? packed_rows(p, blocks) : nullptr;
  const auto rows_of_thread = [&](int64_t first_panel) {
    if (is_shared) return shared;
    fetch_first(p.packed + first_panel * p.panel_size());
    return packed_rows(p, blocks);
  };
  for_each_tile(a, blocks, rows_of_thread, [&](const Element<T>* x, const Tile& tile) {
    for (int64_t b = tile.block; b < tile.end; ++b) {
      const int64_t row = blocks.begin(b);
      any_tile_block(std::make_integer_sequence<int, kColumnRows>(), blocks.begin(b + 1) - row, p, x + row * p.steps,
                     row, tile.panel, tile.last);
    }
  });
}

}  // namespace

void linear(const LinearArgs& a) { a.dtype == DType::kBfloat16 ? linear_typed<uint16_t>(a) : linear_typed<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
