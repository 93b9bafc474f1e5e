// SPDX-License-Identifier: Apache-2.0
// Packs weights that are quantized already into the panels that linear_quant.cc reads, and keeps every code.
#include <cstring>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/pack_blocks.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr uint16_t kHalfInfinity = 0x7c00, kHalfOne = 0x3c00;
constexpr float kLargestHalf = 65504.0f;

bool is_finite(uint16_t half) { return (half & kHalfInfinity) != kHalfInfinity; }

// Returns -offset times a scale, where offset is a power of two; infinity if fp16 does not hold it.
uint16_t negative_multiple(uint16_t scale, int32_t offset) {
  const float product = half_to_float(scale) * static_cast<float>(-offset);
  return magnitude(product) > kLargestHalf ? kHalfInfinity : half_bits(product);
}

// One output of a coded piece in the form of the packed weight.
struct CodedOutput {
  const CodedPiece& piece;
  const QuantizedForm& form;
  int64_t index, k;

  // What is added to the piece's codes: those without a minimum get one if the packed weight has it.
  int32_t code_offset() const {
    const int32_t offset = QuantizedForm{form.quantization, 0, false}.code_offset();
    return form.has_minimum && piece.minimums != nullptr ? 0 : offset;
  }

  // Writes the output to a panel, and its codes [padded_k]; returns what is wrong with it.
  PackError write(int64_t lane, uint8_t* codes, uint8_t* panel) const {
    const float factor = piece.factors == nullptr ? 1.0f : piece.factors[index];
    if (!(factor - factor == 0)) return PackError::kNotFinite;
    std::memcpy(panel + 4 * lane, &factor, 4);
    if (!write_groups(lane, panel)) return PackError::kNotFinite;
    return write_codes(codes);
  }

 private:
  // Writes the scales and minimums, each as often as groups of the packed weight fit into one of the piece; returns
  // whether all are finite.
  bool write_groups(int64_t lane, uint8_t* panel) const {
    auto* scales = reinterpret_cast<uint16_t*>(panel + kFactorBytes) + lane;
    auto* minimums = reinterpret_cast<uint16_t*>(panel + kFactorBytes + scale_bytes(form, k)) + lane;
    const int64_t num_groups = form.num_groups(k), size = piece.group_size;
    const int64_t repeats = size == 0 ? num_groups : size / form.group_size;
    int64_t from = index * (size == 0 ? 1 : (k + size - 1) / size);
    bool all_finite = true;
    for (int64_t group = 0; group < num_groups; ++from) {
      const uint16_t scale = piece.scales == nullptr ? kHalfOne : piece.scales[from];
      const uint16_t minimum = !form.has_minimum           ? 0
                               : piece.minimums == nullptr ? negative_multiple(scale, code_offset())
                                                           : piece.minimums[from];
      all_finite = all_finite && is_finite(scale) && is_finite(minimum);
      const int64_t end = group + repeats < num_groups ? group + repeats : num_groups;
      for (; group < end; ++group) {
        scales[group * kPanel] = scale;
        if (form.has_minimum) minimums[group * kPanel] = minimum;
      }
    }
    return all_finite;
  }
  PackError write_codes(uint8_t* codes) const {
    const uint8_t* from = piece.codes + index * k;
    const auto offset = static_cast<uint8_t>(code_offset());
    uint8_t all = 0;
    for (int64_t i = 0; i < k; ++i) {
      codes[i] = static_cast<uint8_t>(from[i] + offset);
      all |= codes[i];
    }
    if (!has_four_bits(form.quantization)) return PackError::kNone;
    if (all > 15) return PackError::kCodeTooLarge;
    join_nibbles(codes, (k + kPiece - 1) / kPiece * kPiece);
    return PackError::kNone;
  }
};

}  // namespace

PackError pack_coded(const PackCodedArgs& a) {
  const int64_t panel_bytes = quantized_panel_bytes(a.form, a.k), header = header_bytes(a.form, a.k);
  const int64_t padded_k = (a.k + kPiece - 1) / kPiece * kPiece;
  const int zero = a.form.code_offset() * (has_four_bits(a.form.quantization) ? 0x11 : 1);
  auto error = PackError::kNone;
  parallel_for(num_panels(a.n, a.gated), a.n * a.k >= kMinParallelProducts, [&](int64_t index) {
    uint8_t* panel = a.packed + index * panel_bytes;
    auto* codes = static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(kPanel * padded_k), Scratch::kTile));
    std::memset(panel, 0, static_cast<size_t>(header));
    const PanelRows rows = rows_of_panel(index, a.n, a.gated);
    int64_t piece = 0, first = rows.first;  // of the piece's outputs
    for (; first >= a.pieces[piece].count; ++piece) first -= a.pieces[piece].count;
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      uint8_t* own = codes + lane * padded_k;
      const bool is_output = lane < rows.count;
      std::memset(own, is_output ? a.form.code_offset() : zero, static_cast<size_t>(padded_k));
      if (!is_output) continue;
      for (; first >= a.pieces[piece].count; ++piece) first = 0;
      const PackError found = CodedOutput{a.pieces[piece], a.form, first++, a.k}.write(lane, own, panel);
      if (found != PackError::kNone) __atomic_store(&error, &found, __ATOMIC_RELAXED);
    }
    write_blocks(codes, padded_k / 4 / (has_four_bits(a.form.quantization) ? 2 : 1), padded_k, panel + header);
  });
  return error;
}

}  // namespace FD_ISA
}  // namespace fd
