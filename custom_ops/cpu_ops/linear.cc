// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/families.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kTilePanels = 4;  // 64 outputs: what a thread takes at a time
constexpr int64_t kTileRows = 384;  // of so many rows at most; their inputs and the tile's weights fit the L2 cache
constexpr int64_t kMinParallelWork = 1 << 17;  // multiply-adds below which waking a thread costs more than it saves
constexpr int kPrefetchSteps = 24;

// A tile's view of the arguments: raw rows and panels.
template <class T, class Out>
struct Problem {
  const T* x;
  const T* packed;
  const T* bias;
  const Out* residual;
  Out* out;
  int64_t n, k, panel_size;

  explicit Problem(const LinearArgs& a)
      : x(static_cast<const T*>(a.x)),
        packed(static_cast<const T*>(a.packed)),
        bias(static_cast<const T*>(a.bias)),
        residual(static_cast<const Out*>(a.residual)),
        out(static_cast<Out*>(a.out)),
        n(a.n),
        k(a.k),
        panel_size((a.k + 1) / 2 * 2 * kPanel) {}
};

// Adds bias and residual in fp32 and rounds once: the first `width` of 16 outputs from `column` of one row.
template <class T, class Out>
FD_INLINE void finish(const Problem<T, Out>& p, F16 acc, int64_t row, int64_t column) {
  const int64_t at = row * p.n + column;
  const int width = static_cast<int>(p.n - column < kPanel ? p.n - column : kPanel);
  if (width == kPanel) {
    if (p.bias != nullptr) acc = add(acc, load_as_float(p.bias + column));
    if (p.residual != nullptr) acc = add(acc, load_as_float(p.residual + at));
    store_rounded(p.out + at, acc);
  } else {
    if (p.bias != nullptr) acc = add(acc, load_first(p.bias + column, width));
    if (p.residual != nullptr) acc = add(acc, load_first(p.residual + at, width));
    store_first(p.out + at, acc, width);
  }
}

// MR rows from `row` times NV panels from `panel`, the whole of k in order.
template <int MR, int NV, class T, class Out>
void row_block(const Problem<T, Out>& p, int64_t row, int64_t panel) {
  F16 acc[MR][NV];
  const T* panels[NV];
  for (int v = 0; v < NV; ++v) panels[v] = p.packed + (panel + v) * p.panel_size;
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  const T* x = p.x + row * p.k;
  const int64_t steps = p.k / Step<T>::kSize;
  dot_block<MR, NV, kPrefetchSteps>(acc, x, p.k, panels, kStepSize<T>, steps);
  if (steps * Step<T>::kSize < p.k) {  // an odd k in bf16: its partner is zero in the panel and must be zero here too
    for (int r = 0; r < MR; ++r) {
      T pair[2] = {x[r * p.k + p.k - 1], 0};
      for (int v = 0; v < NV; ++v)
        acc[r][v] =
            Step<T>::dot(acc[r][v], Step<T>::broadcast(pair), Step<T>::load_panel(panels[v] + steps * kStepSize<T>));
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) finish(p, acc[r][v], row + r, (panel + v) * kPanel);
}

// Rows [row, end) times NV panels, in blocks of nearly equal height so that none is left with a single row.
template <int NV, class T, class Out>
void row_blocks(const Problem<T, Out>& p, int64_t row, int64_t end, int64_t panel) {
  for (int64_t blocks = (end - row + kMaxRows - 1) / kMaxRows; blocks > 0; --blocks) {
    const int64_t rows = (end - row + blocks - 1) / blocks;
    with_rows(rows, [&](auto count) { row_block<decltype(count)::value, NV>(p, row, panel); });
    row += rows;
  }
}

template <class T, class Out>
void linear_typed(const LinearArgs& a) {
  const Problem<T, Out> p(a);
  const int64_t num_panels = (a.n + kPanel - 1) / kPanel;
  const int64_t row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  const int64_t tiles = (num_panels + kTilePanels - 1) / kTilePanels * row_tiles;
  parallel_for(tiles, a.rows * a.n * a.k >= kMinParallelWork, [&](int64_t tile) {
    const int64_t first = tile / row_tiles * kTilePanels, row = tile % row_tiles * kTileRows;
    const int64_t last = first + kTilePanels < num_panels ? first + kTilePanels : num_panels;
    const int64_t end = row + kTileRows < a.rows ? row + kTileRows : a.rows;
    int64_t panel = first;
    for (; panel + kMaxPanels <= last; panel += kMaxPanels) row_blocks<kMaxPanels>(p, row, end, panel);
    for (; panel < last; ++panel) row_blocks<1>(p, row, end, panel);
  });
}

// Element (output, k) of a weight goes to its panel, its step, its lane and its place in the pair.
template <class T>
void pack_typed(const PackArgs& a) {
  const T* weight = static_cast<const T*>(a.weight);
  T* packed = static_cast<T*>(a.packed);
  const int64_t padded_k = (a.k + 1) / 2 * 2, num_panels = (a.n + kPanel - 1) / kPanel;
  parallel_for(num_panels, a.n * a.k >= kMinParallelWork, [&](int64_t panel) {
    T* target = packed + panel * padded_k * kPanel;
    std::memset(target, 0, static_cast<size_t>(padded_k * kPanel) * sizeof(T));
    for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < a.n; ++lane) {
      const T* row = weight + (panel * kPanel + lane) * a.k;
      for (int64_t k = 0; k < a.k; ++k)
        target[k / Step<T>::kSize * kStepSize<T> + lane * Step<T>::kSize + k % Step<T>::kSize] = row[k];
    }
  });
}

}  // namespace

void pack_linear(const PackArgs& a) { a.dtype == DType::kBfloat16 ? pack_typed<uint16_t>(a) : pack_typed<float>(a); }

void linear(const LinearArgs& a) {
  if (a.dtype == DType::kFloat32) return linear_typed<float, float>(a);
  a.out_dtype == DType::kBfloat16 ? linear_typed<uint16_t, uint16_t>(a) : linear_typed<uint16_t, float>(a);
}

}  // namespace FD_ISA
}  // namespace fd
