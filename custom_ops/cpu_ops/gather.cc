// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/threads.h"
#include "common/vec.h"
#include "cpu_ops/families.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace FD_ISA {
namespace {

// Copies the weights of one output from its panel, where they are interleaved in units of four bytes with those of the
// other fifteen outputs.
void copy_from_panel(const char* panel, int64_t lane, int64_t row_bytes, char* out) {
  constexpr int64_t unit = 4;
  const char* source = panel + lane * unit;
  const int64_t whole = row_bytes / unit * unit;
  for (int64_t byte = 0; byte < whole; byte += unit) std::memcpy(out + byte, source + byte * kPanel, unit);
  std::memcpy(out + whole, source + whole * kPanel, static_cast<size_t>(row_bytes - whole));
}

// Writes the codes of one output for a piece of inputs as bytes, given the blocks of the piece (quant_units.h).
template <bool kFourBits>
FD_INLINE void load_piece_codes(const uint8_t* blocks, int64_t lane, uint8_t (&codes)[kPiece]) {
  constexpr int64_t block_inputs = kFourBits ? 8 : 4;
  for (int64_t i = 0; i < kPiece; i += block_inputs) {
    uint32_t word;
    std::memcpy(&word, blocks + i / block_inputs * kBlockBytes + 4 * lane, 4);
    const uint32_t first = kFourBits ? word & 0x0f0f0f0fu : word, second = word >> 4 & 0x0f0f0f0fu;
    std::memcpy(codes + i, &first, 4);
    if (kFourBits) std::memcpy(codes + i + 4, &second, 4);
  }
}

// Returns the bits of a number rounded to bf16, of which subnormal ones are kept on every path; it is no NaN.
FD_INLINE uint16_t bf16_bits(float x) {
  const uint32_t bits = ScalarLanes::bits(x);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Writes the weights of one output in bf16, given its panel.
template <bool kFourBits>
void widen_output(const QuantizedForm& form, const uint8_t* panel, int64_t lane, int64_t k, uint16_t* out) {
  const auto* scales = reinterpret_cast<const uint16_t*>(panel + kFactorBytes) + lane;
  const auto* minimums = reinterpret_cast<const uint16_t*>(panel + kFactorBytes + scale_bytes(form, k)) + lane;
  const uint8_t* blocks = panel + header_bytes(form, k);
  const int32_t offset = form.code_offset();
  float factor;
  std::memcpy(&factor, panel + 4 * lane, 4);
  for (int64_t begin = 0; begin < k; begin += kPiece, blocks += kPiece / block_k(form.quantization) * kBlockBytes) {
    const int64_t group = (begin / kPiece >> form.group_shift()) * kPanel;
    const float scale = form.has_scales() ? half_to_float(scales[group]) : 1.0f;
    const float minimum = form.has_minimum ? half_to_float(minimums[group]) : -0.0f;
    uint8_t codes[kPiece];
    uint16_t values[kPiece];
    load_piece_codes<kFourBits>(blocks, lane, codes);
    for (int64_t i = 0; i < kPiece; ++i) values[i] = bf16_bits(weight_value(codes[i] - offset, scale, minimum, factor));
    std::memcpy(out + begin, values, static_cast<size_t>(k - begin < kPiece ? k - begin : kPiece) * 2);
  }
}

}  // namespace

void gather_quantized(const QuantizedGatherArgs& a) {
  const auto widen = has_four_bits(a.form.quantization) ? widen_output<true> : widen_output<false>;
  parallel_for(a.rows, a.rows * a.row_bytes >= kMinParallelCopyBytes, [&](int64_t row) {
    const int64_t id = a.ids[row];
    const uint8_t* panel = static_cast<const uint8_t*>(a.table) + id / kPanel * a.panel_bytes;
    widen(a.form, panel, id % kPanel, a.inputs, static_cast<uint16_t*>(a.out) + row * a.inputs);
  });
}

void gather(const GatherArgs& a) {
  const char* table = static_cast<const char*>(a.table);
  parallel_for(a.rows, a.rows * a.row_bytes >= kMinParallelCopyBytes, [&](int64_t row) {
    char* out = static_cast<char*>(a.out) + row * a.row_bytes;
    const int64_t id = a.ids[row];
    if (a.panel_bytes == 0) {
      std::memcpy(out, table + id * a.row_bytes, static_cast<size_t>(a.row_bytes));
    } else {
      copy_from_panel(table + id / kPanel * a.panel_bytes, id % kPanel, a.row_bytes, out);
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
