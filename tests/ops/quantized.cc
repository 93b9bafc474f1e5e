// SPDX-License-Identifier: Apache-2.0
// Linear layers with quantized weights as common/quant.h defines them, one step after the other.
#include <vector>

#include "common/export.h"
#include "cpu_ops/kernels.h"

namespace {

using fd::QuantizedForm;

float from_bf16(uint16_t bits) { return fd::ScalarLanes::from_bits(static_cast<uint32_t>(bits) << 16); }

// One layer, packed by pack_linear on the CPU.
struct Layer {
  QuantizedForm form;
  int64_t n, k;
  const uint8_t* packed;
  bool is_gated;

  bool has_four_bits() const { return fd::has_four_bits(form.quantization); }
  const uint8_t* panel(int64_t output) const {
    const int64_t half = output >= n, panel = (output - half * n) / fd::kPanel;
    return packed + (is_gated ? 2 * panel + half : panel) * fd::quantized_panel_bytes(form, k);
  }
  int64_t lane(int64_t output) const { return (output >= n ? output - n : output) % fd::kPanel; }
  int32_t code(int64_t output, int64_t i) const {
    const int64_t per_block = fd::block_k(form.quantization);
    const uint8_t* block = panel(output) + fd::header_bytes(form, k) + i / per_block * fd::kBlockBytes;
    const int byte = block[lane(output) * 4 + i % 4];
    return (has_four_bits() ? byte >> (i % per_block / 4 * 4) & 15 : byte) - form.code_offset();
  }
  float factor(int64_t output) const { return reinterpret_cast<const float*>(panel(output))[lane(output)]; }
  float scale(int64_t output, int64_t i) const { return form.has_scales() ? half(output, i, fd::kFactorBytes) : 1.0f; }
  float minimum(int64_t output, int64_t i) const {
    return half(output, i, fd::kFactorBytes + fd::scale_bytes(form, k));
  }

 private:
  float half(int64_t output, int64_t i, int64_t at) const {
    const int64_t group = form.group_size == 0 ? 0 : i / form.group_size;
    return fd::half_to_float(reinterpret_cast<const uint16_t*>(panel(output) + at)[group * fd::kPanel + lane(output)]);
  }
};

// Quantizes `count` inputs with one scale, which it returns.
template <bool kIs16Bit>
float quantize(const uint16_t* x, int64_t count, int32_t* codes) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = (x[i] & 0x7fffu) > largest ? x[i] & 0x7fffu : largest;
  const fd::RowScale row = fd::row_scale<kIs16Bit>(largest);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = fd::code_bits<kIs16Bit>(from_bf16(x[i]), row.factor);
    const auto low = static_cast<int8_t>(fd::low_limb(bits)), high = static_cast<int8_t>(fd::high_limb(bits));
    codes[i] = row.factor == 0 ? 0 : kIs16Bit ? 256 * high + low : low;
  }
  return row.scale;
}

// The codes of a row, and the scale of each piece; with 16 bits the pieces have the scale 1, and the row has one.
struct Row {
  std::vector<int32_t> codes;
  std::vector<float> piece_scales;
  float scale = 1.0f;

  Row(const uint16_t* x, int64_t k, bool is_16_bit)
      : codes(static_cast<size_t>(k)), piece_scales(static_cast<size_t>((k + fd::kPiece - 1) / fd::kPiece), 1.0f) {
    if (is_16_bit) {
      scale = quantize<true>(x, k, codes.data());
      return;
    }
    for (int64_t i = 0; i < k; i += fd::kPiece)
      piece_scales[static_cast<size_t>(i / fd::kPiece)] =
          quantize<false>(x + i, k - i < fd::kPiece ? k - i : fd::kPiece, codes.data() + i);
  }
};

struct PieceSums {
  int32_t products, codes;
};

PieceSums sum_piece(const Row& row, const int32_t* weights, int64_t first, int64_t end) {
  PieceSums sums{0, 0};
  for (int64_t i = first; i < end; ++i) {
    sums.products += weights[i] * row.codes[static_cast<size_t>(i)];
    sums.codes += row.codes[static_cast<size_t>(i)];
  }
  return sums;
}

float total_of_pieces(const Layer& layer, const Row& row, const int32_t* weights, int64_t o) {
  float total = 0.0f;
  for (int64_t begin = 0; begin < layer.k; begin += fd::kPart) {
    float part = 0.0f;
    for (int64_t first = begin; first < begin + fd::kPart && first < layer.k; first += fd::kPiece) {
      const int64_t end = first + fd::kPiece < layer.k ? first + fd::kPiece : layer.k;
      const float piece_scale = row.piece_scales[static_cast<size_t>(first / fd::kPiece)];
      const PieceSums sums = sum_piece(row, weights, first, end);
      part = fd::add_product(sums.products, fd::ScalarLanes::mul(layer.scale(o, first), piece_scale), part);
      if (!layer.form.has_minimum) continue;
      const float codes = fd::ScalarLanes::mul(static_cast<float>(sums.codes), piece_scale);
      part = fd::ScalarLanes::fma(codes, layer.minimum(o, first), part);
    }
    total = fd::ScalarLanes::add(total, part);
  }
  return fd::ScalarLanes::mul(total, layer.factor(o));
}

float total_of_wint8(const Layer& layer, const Row& row, const int32_t* weights, int64_t o) {
  float total = 0.0f;
  for (int64_t first = 0; first < layer.k; first += fd::kWint8Piece) {
    const int64_t end = first + fd::kWint8Piece < layer.k ? first + fd::kWint8Piece : layer.k;
    total = fd::add_product(sum_piece(row, weights, first, end).products, layer.factor(o), total);
  }
  return total;
}

}  // namespace

// out[r, o] = total of row r and output o times the scales of both; x: [rows, k] bf16, out: [rows, n], or [rows, 2 n]
// if gated.
FD_EXPORT void fd_quantized_sums(const uint16_t* x, const uint8_t* packed, int64_t quantization, int64_t group_size,
                                 int64_t has_minimum, int64_t rows, int64_t n, int64_t k, int64_t is_gated,
                                 float* out) {
  const QuantizedForm form{static_cast<fd::Quantization>(quantization), static_cast<int32_t>(group_size),
                           has_minimum != 0};
  const Layer layer{form, n, k, packed, is_gated != 0};
  const int64_t outputs = is_gated != 0 ? 2 * n : n;
  std::vector<int32_t> weights(static_cast<size_t>(outputs * k));
  for (int64_t o = 0; o < outputs; ++o)
    for (int64_t i = 0; i < k; ++i) weights[static_cast<size_t>(o * k + i)] = layer.code(o, i);
  const auto total_of = form.kernel() == fd::Quantization::kWint8 ? total_of_wint8 : total_of_pieces;
  for (int64_t r = 0; r < rows; ++r) {
    const Row row(x + r * k, k, has_16_bit_rows(form.quantization));
    for (int64_t o = 0; o < outputs; ++o)
      out[r * outputs + o] = fd::ScalarLanes::mul(total_of(layer, row, weights.data() + o * k, o), row.scale);
  }
}

// codes[o, i] = code of the weight of output o and input i, [n, k], or [2 n, k] if gated.
FD_EXPORT void fd_quantized_codes(const uint8_t* packed, int64_t quantization, int64_t group_size, int64_t has_minimum,
                                  int64_t n, int64_t k, int64_t is_gated, int32_t* codes) {
  const QuantizedForm form{static_cast<fd::Quantization>(quantization), static_cast<int32_t>(group_size),
                           has_minimum != 0};
  const Layer layer{form, n, k, packed, is_gated != 0};
  for (int64_t o = 0; o < (is_gated != 0 ? 2 * n : n); ++o)
    for (int64_t i = 0; i < k; ++i) codes[o * k + i] = layer.code(o, i);
}
