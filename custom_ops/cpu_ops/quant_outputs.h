// SPDX-License-Identifier: Apache-2.0
// The epilogue of quantized linear layers: row scale, bias, gate and residual. In contrast to linear_tiles.h it
// processes several panels together, so that whole cache lines of outputs are written at once.
#pragma once

#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/swiglu.h"

namespace fd {
namespace FD_ISA {

constexpr int kOutputPanels = 4;  // panels that are written together, at most

// Sums of a block of rows and of panels from `panel` on.
struct BlockSums {
  const FP32Vec16 (*totals)[kOutputPanels];  // [rows]
  const float* scales;                       // [rows], or null: 1
  const uint8_t* factors;                    // of the first panel [16], or null: 1; panel_bytes from one to the next
  int64_t panel_bytes;
  int64_t row, rows, panel, panels;
};

// Prefetches the lines to which the outputs of a row and some panels of a layer without a gate are written. They may be
// in another core's cache, and a store that waits for its line delays all later stores.
FD_INLINE void prefetch_outputs(const LinearArgs& a, int64_t row, int64_t panel, int64_t panels) {
  const int64_t size = a.out_dtype == DType::kFloat32 ? 4 : 2;
  const char* out = static_cast<const char*>(a.out) + (row * a.out_stride + panel * kPanel) * size;
  for (int64_t at = 0; at < panels * kPanel * size; at += 64) __builtin_prefetch(out + at, 1);
}

// Returns the scaled sum of one row and panel plus the bias.
FD_INLINE FP32Vec16 biased_sum(const LinearArgs& a, const BlockSums& s, int64_t r, int64_t v) {
  FP32Vec16 sum = s.totals[r][v];
  if (s.factors != nullptr) sum = mul(sum, load(reinterpret_cast<const float*>(s.factors + v * s.panel_bytes)));
  if (s.scales != nullptr) sum = mul(sum, splat(s.scales[r]));
  if (a.bias == nullptr) return sum;
  const PanelRows outputs = rows_of_panel(s.panel + v, a.n, a.gated);
  const auto* bias = static_cast<const uint16_t*>(a.bias) + outputs.first;
  return add(sum, outputs.count == kPanel ? load_bf16(bias) : load_first(bias, static_cast<int>(outputs.count)));
}

template <class Out, bool kGated>
FD_INLINE void write_outputs_as(const LinearArgs& args, const BlockSums& sums) {
  const LinearArgs a = args;  // local copies, because the compiler must assume that stores change `args`
  const BlockSums s = sums;
  for (int64_t r = 0; r < s.rows; ++r)
    for (int64_t v = 0; v < s.panels; v += kGated ? 2 : 1) {
      FP32Vec16 value = biased_sum(a, s, r, v);
      if (kGated) value = mul(silu(value), biased_sum(a, s, r, v + 1));
      write_as<Out>(a, value, s.row + r, (s.panel + v) / (kGated ? 2 : 1) * kPanel);
    }
}

// Writes the outputs of these sums. In a gated layer they start at an even panel and are an even number of panels.
static inline void write_outputs(const LinearArgs& a, const BlockSums& sums) {
  if (a.out_dtype == DType::kFloat32)
    a.gated ? write_outputs_as<float, true>(a, sums) : write_outputs_as<float, false>(a, sums);
  else
    a.gated ? write_outputs_as<uint16_t, true>(a, sums) : write_outputs_as<uint16_t, false>(a, sums);
}

}  // namespace FD_ISA
}  // namespace fd
