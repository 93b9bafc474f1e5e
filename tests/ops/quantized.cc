// SPDX-License-Identifier: Apache-2.0
// Linear layers with quantized weights as common/quant.h defines them, one step after the other.
#include <vector>

#include "common/export.h"
#include "cpu_ops/kernels.h"

namespace {

using fd::Quantization;

constexpr int64_t kBlockBytes = 64;

float from_bf16(uint16_t bits) { return fd::ScalarLanes::from_bits(static_cast<uint32_t>(bits) << 16); }

// One layer, packed by pack_linear on the CPU.
struct Layer {
  Quantization quantization;
  int64_t n, k;
  const uint8_t* packed;
  bool is_gated;

  const uint8_t* panel(int64_t output) const {
    const int64_t half = output >= n, panel = (output - half * n) / fd::kPanel;
    return packed + (is_gated ? 2 * panel + half : panel) * fd::quantized_panel_bytes(quantization, k);
  }
  int64_t lane(int64_t output) const { return (output >= n ? output - n : output) % fd::kPanel; }
  int32_t code(int64_t output, int64_t i) const {
    const int64_t per_block = fd::block_k(quantization);
    const uint8_t* block = panel(output) + fd::scale_bytes(quantization, k) + i / per_block * kBlockBytes;
    const int byte = block[lane(output) * 4 + i % 4];
    return has_four_bits(quantization) ? (byte >> (i % per_block / 4 * 4) & 15) - 8 : byte - 128;
  }
  float scale(int64_t output, int64_t i) const {
    if (!has_four_bits(quantization)) return reinterpret_cast<const float*>(panel(output))[lane(output)];
    return from_bf16(reinterpret_cast<const uint16_t*>(panel(output))[i / fd::kGroup * fd::kPanel + lane(output)]);
  }
};

template <bool kIs16Bit>
float quantize(const uint16_t* x, int64_t k, int32_t* codes) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < k; ++i) largest = (x[i] & 0x7fffu) > largest ? x[i] & 0x7fffu : largest;
  const fd::RowScale row = fd::row_scale<kIs16Bit>(largest);
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t bits = fd::code_bits<kIs16Bit>(from_bf16(x[i]), row.factor);
    const auto low = static_cast<int8_t>(fd::low_limb(bits)), high = static_cast<int8_t>(fd::high_limb(bits));
    codes[i] = row.factor == 0 ? 0 : kIs16Bit ? 256 * high + low : low;
  }
  return row.scale;
}

}  // namespace

// out[r, o] = total of row r and output o times the scale of the row; x: [rows, k] bf16, out: [rows, n], or [rows, 2 n]
// if gated.
FD_EXPORT void fd_quantized_sums(const uint16_t* x, const uint8_t* packed, int64_t quantization, int64_t rows,
                                 int64_t n, int64_t k, int64_t is_gated, float* out) {
  const Layer layer{static_cast<Quantization>(quantization), n, k, packed, is_gated != 0};
  const int64_t outputs = is_gated != 0 ? 2 * n : n, length = fd::sum_length(layer.quantization);
  std::vector<int32_t> weights(static_cast<size_t>(outputs * k)), codes(static_cast<size_t>(k));
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t i = 0; i < k; ++i) weights[static_cast<size_t>(o * k + i)] = layer.code(o, i);
  for (int64_t r = 0; r < rows; ++r) {
    const auto quantize_row = has_16_bit_rows(layer.quantization) ? quantize<true> : quantize<false>;
    const float row_scale = quantize_row(x + r * k, k, codes.data());
    for (int64_t o = 0; o < outputs; ++o) {
      float total = 0.0f;
      for (int64_t first = 0; first < k; first += length) {
        int32_t sum = 0;
        for (int64_t i = first; i < first + length && i < k; ++i)
          sum += weights[static_cast<size_t>(o * k + i)] * codes[static_cast<size_t>(i)];
        total = fd::add_group(sum, layer.scale(o, first), total);
      }
      out[r * outputs + o] = fd::ScalarLanes::mul(total, row_scale);
    }
  }
}
