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

// One block of MR packed rows, the first of which is `row`, times NV panels: the whole of k in order. `gates` [MR][16]
// lasts from a gate's panel to its up's.
template <int MR, int NV, class T>
void row_block(const Problem<T>& p, const Element<T>* x, int64_t row, int64_t panel, float* gates) {
  F16 acc[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  constexpr int64_t reach = kFetchBytes / (NV * static_cast<int64_t>(sizeof(T)));
  const T *panels[NV], *ahead[NV];
  const auto dot = [&](int64_t step, int64_t end, int64_t distance) {
    for (int v = 0; v < NV; ++v) {
      panels[v] = p.packed + (panel + v) * p.panel_size() + step * kStepSize<T>;
      ahead[v] = panels[v] + distance;
    }
    dot_block<MR, NV, NV == 1 || kFetchesStreams>(acc, x + step * MR, 1, MR, panels, kStepSize<T>, end - step, ahead);
  };
  if constexpr (NV == 1 || !kFetchesStreams) {
    dot(0, p.steps, reach);
  } else {  // near their end the panels that come next are fetched, not these panels' neighbours
    const int64_t near = p.steps - reach / kStepSize<T>, split = near > 0 ? near : 0;
    dot(0, split, reach);
    dot(split, p.steps, NV * p.panel_size() - split * kStepSize<T>);
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) finish<T>(p.a, acc[r][v], row + r, panel + v, gates + r * kPanel);
}

// The panels that a block of rows meets at a time. A single row has too few accumulators to hide the latency of its
// additions; where several streams are fetched ahead, they come in faster than one.
constexpr int panels_at_a_time(int rows) {
  if (rows == 1) return kMaxPanels;
  return kMaxPanels == 1 || !kFetchesStreams || rows > 12 ? 1 : rows <= 4 ? kMaxPanels : 2;
}

// A block times panels [panel, last).
template <int MR, class T>
void tile_block(const Problem<T>& p, const Element<T>* x, int64_t row, int64_t panel, int64_t last) {
  float gates[MR * kPanel];
  constexpr int NV = panels_at_a_time(MR);
  for (; panel + NV <= last; panel += NV) row_block<MR, NV>(p, x, row, panel, gates);
  for (; panel < last; ++panel) row_block<MR, 1>(p, x, row, panel, gates);
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
  const Element<T>* x = packed_rows(p, blocks);
  for_each_tile(a, blocks, [&](const Tile& tile) {
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
