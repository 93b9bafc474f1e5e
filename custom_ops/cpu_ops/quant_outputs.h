// SPDX-License-Identifier: Apache-2.0
// What happens to the sums of a block of rows: the row's scale, bias, gate and residual, as in linear_tiles.h, but for
// several panels at a time, so that a line of outputs is written at once.
#pragma once

#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/swiglu.h"

namespace fd {
namespace FD_ISA {

constexpr int kFinished = 4;  // panels whose sums leave together, at most

// Sums of a block of rows and of panels from `panel` on.
struct FinishedSums {
  const F16 (*totals)[kFinished];  // [rows]
  const float* scales;             // [rows]
  int64_t row, rows, panel, panels;
};

// Asks for the lines that the outputs of a row and of some panels of a layer without gate are written to. They come
// from other caches, and stores that wait for them hold up all that is stored after them.
FD_INLINE void fetch_outputs(const LinearArgs& a, int64_t row, int64_t panel, int64_t panels) {
  const int64_t size = a.out_dtype == DType::kFloat32 ? 4 : 2;
  const char* out = static_cast<const char*>(a.out) + (row * a.n + panel * kPanel) * size;
  for (int64_t at = 0; at < panels * kPanel * size; at += 64) __builtin_prefetch(out + at, 1);
}

// The sum of one row and panel, scaled and with the bias of its outputs.
FD_INLINE F16 biased_sum(const LinearArgs& a, const FinishedSums& s, int64_t r, int64_t v) {
  const F16 sum = mul(s.totals[r][v], splat(s.scales[r]));
  if (a.bias == nullptr) return sum;
  const PanelRows outputs = rows_of_panel(s.panel + v, a.n, a.gated);
  const auto* bias = static_cast<const uint16_t*>(a.bias) + outputs.first;
  return add(sum, outputs.count == kPanel ? load_bf16(bias) : load_first(bias, static_cast<int>(outputs.count)));
}

template <class Out, bool kGated>
FD_INLINE void finish_as(const LinearArgs& args, const FinishedSums& sums) {
  const LinearArgs a = args;  // copies, which no store can change
  const FinishedSums s = sums;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t v = 0; v < s.panels; v += kGated ? 2 : 1) {
      F16 value = biased_sum(a, s, r, v);
      if (kGated) value = mul(silu(value), biased_sum(a, s, r, v + 1));
      write_as<Out>(a, value, s.row + r, (s.panel + v) / (kGated ? 2 : 1) * kPanel);
    }
}

// Writes the outputs of these sums. A gated layer's come with their gates: an even number of panels from an even one
// on.
static inline void finish_sums(const LinearArgs& a, const FinishedSums& sums) {
  if (a.out_dtype == DType::kFloat32)
    a.gated ? finish_as<float, true>(a, sums) : finish_as<float, false>(a, sums);
  else
    a.gated ? finish_as<uint16_t, true>(a, sums) : finish_as<uint16_t, false>(a, sums);
}

}  // namespace FD_ISA
}  // namespace fd
