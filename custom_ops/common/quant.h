// SPDX-License-Identifier: Apache-2.0
// The definition of linear layers with quantized weights, in scalar steps. Every accelerator computes its bits, and so
// does every CPU path with a fused multiply-add (cpu_ops/linear_quant.cc), except wint8 on AVX-512.
//
//   weight  integer codes of 8 or 4 bits. A group of 32, 64 or 128 consecutive inputs, or all inputs of an output, has
//           a scale and perhaps a minimum, both fp16; each output has a factor in fp32. A weight is
//             (code * scale + minimum) * factor
//           In 8 bits with neither groups nor a minimum there is only the factor.
//   row     codes of 16 bits with a power of two as the scale of the row (wint8, wint4), or codes of 8 bits with the
//           scale absmax / 127 for each piece of the row (w8a8, w4a8). A code of 16 bits is two limbs of signed bytes,
//           256 * high + low. Where heads have matrices of their own, a row is one head of one token.
//
// A piece is 32 consecutive inputs, a part is four pieces; the last of each may be shorter.
//
//   part    0; for each piece in order, where s is the exact integer sum of code times code, which is rounded to fp32:
//             part = fma(s, scale of the weight, part)                              with rows of 16 bits
//             part = fma(s, round(scale of the weight * scale of the piece), part)  with rows of 8 bits
//           and then, if the weight has a minimum, with the sum of the row's codes:
//             part = fma(sum of codes [* scale of the piece, rounded], minimum, part)
//           A weight that has only factors has the scale 1.
//   total   0; for each part in order: total = total + part
//   output  round(total * factor [* scale of the row] + bias + residual), each step in fp32
//
// Only wint8 with neither groups nor a minimum differs: its pieces are 256 inputs, total = fma(s, factor, total) for
// each of them, and the output is round(total * scale of the row + bias + residual).
//
// Sums are exact, so they can be computed in any order, and limbs can be summed apart.
//
// A row of an embedding is an output of a packed weight, whose weights are computed in fp32 and rounded to bf16:
//   weight  round(round(code * scale + minimum) * factor), then to bf16, to the nearest, ties to even
// The product of a code and a scale is exact, so that the first sum is rounded once, fused or not. Without scales it is
// round(code * factor), without minimums round(code * scale * factor). Nothing is flushed to zero.
#pragma once

#include "common/scalar_lanes.h"

namespace fd {

// The first four are in the order of QUANTIZATIONS in fastdeploy/ops/linear.py.
enum class Quantization { kWint8, kWint4, kW8a8, kW4a8, kWint8Pieces };  // the last one: wint8 with scales for groups

FD_RULE constexpr bool has_four_bits(Quantization q) { return q == Quantization::kWint4 || q == Quantization::kW4a8; }
FD_RULE constexpr bool has_16_bit_rows(Quantization q) { return q != Quantization::kW8a8 && q != Quantization::kW4a8; }

constexpr int64_t kPiece = 32;               // consecutive inputs whose products are added as integers
constexpr int64_t kPart = 4 * kPiece;        // consecutive inputs whose pieces are joined
constexpr int64_t kWint8Piece = 8 * kPiece;  // of wint8 without groups
constexpr int64_t kPanel = 16;               // outputs of one panel of packed weights

// How the weight and the rows of a layer are quantized.
struct QuantizedForm {
  Quantization quantization;
  int32_t group_size;  // inputs that share a scale: 32, 64 or 128; 0: all inputs of an output
  bool has_minimum;    // codes are 0 and above

  // Returns whether groups have scales, or factors only.
  FD_RULE constexpr bool has_scales() const { return has_four_bits(quantization) || group_size != 0 || has_minimum; }
  // The kernel that multiplies this form.
  FD_RULE constexpr Quantization kernel() const {
    return quantization == Quantization::kWint8 && has_scales() ? Quantization::kWint8Pieces : quantization;
  }
  // Group (i >> group_shift()) holds piece i.
  FD_RULE constexpr int group_shift() const {
    return group_size == 0 ? 30 : group_size == 128 ? 2 : group_size == 64 ? 1 : 0;
  }
  FD_RULE constexpr int64_t num_groups(int64_t k) const {
    return !has_scales() ? 0 : group_size == 0 ? 1 : (k + group_size - 1) / group_size;
  }
  // What is added to codes when they are stored as unsigned integers.
  FD_RULE constexpr int32_t code_offset() const { return has_minimum ? 0 : has_four_bits(quantization) ? 8 : 128; }
};

// A panel of packed weights starts with sixteen factors. The scales [groups][16] follow, then the minimums
// [groups][16], each filled up to 64 bytes. Then follow the codes of whole pieces, in blocks of 64 bytes, which hold
// four k of 8 bits or eight k of 4 bits for sixteen outputs (cpu_ops/quant_units.h).
constexpr int64_t kFactorBytes = 4 * kPanel, kBlockBytes = 64;
FD_RULE constexpr int64_t block_k(Quantization q) { return has_four_bits(q) ? 8 : 4; }
FD_RULE constexpr int64_t num_code_blocks(Quantization q, int64_t k) {
  return (k + kPiece - 1) / kPiece * (kPiece / block_k(q));
}
// Bytes of the scales of a panel, or of its minimums.
FD_RULE constexpr int64_t scale_bytes(const QuantizedForm& form, int64_t k) {
  return (form.num_groups(k) * 2 * kPanel + 63) / 64 * 64;
}
// Bytes before the codes of a panel.
FD_RULE constexpr int64_t header_bytes(const QuantizedForm& form, int64_t k) {
  return kFactorBytes + scale_bytes(form, k) * (form.has_minimum ? 2 : 1);
}
FD_RULE constexpr int64_t quantized_panel_bytes(const QuantizedForm& form, int64_t k) {
  return header_bytes(form, k) + num_code_blocks(form.quantization, k) * kBlockBytes;
}

constexpr float kRoundingShift = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
constexpr float kMinScaledAbsmax = 0x1p-112f;  // smaller rows become zero, because the inverse scale would overflow
constexpr float kMax16BitCode = 32639.0f;      // both of its limbs are 127

struct RowScale {
  float factor;  // codes are inputs times this
  float scale;   // inputs are codes times this
};

// Returns the scale of a row, or of a piece of one, whose largest magnitude is the bf16 number with the bits `largest`
// (a NaN exceeds all others). With 8 bits, absmax becomes 127. With 16 bits, the scale is the power of two that brings
// absmax to 2^14 .. 2^15, so that all bits of bf16 are kept down to absmax / 128. The scale is NaN if there is a NaN or
// infinity.
template <bool kIs16Bit>
FD_RULE RowScale row_scale(uint32_t largest) {
  constexpr uint32_t kInfinity = 0x7f80u;
  const float absmax = ScalarLanes::from_bits(largest << 16),
              power = ScalarLanes::from_bits((largest & kInfinity) << 16);
  if (largest >= kInfinity) return {0.0f, ScalarLanes::from_bits(0x7fc00000u)};
  if (absmax < kMinScaledAbsmax) return {0.0f, 0.0f};
  return {kIs16Bit ? 0x1p14f / power : 127.0f / absmax, kIs16Bit ? power * 0x1p-14f : absmax / 127.0f};
}

// Returns bits whose low sixteen are the code of an input: the nearest integer, ties to even. With a factor of 0 and an
// infinite input they are arbitrary.
template <bool kIs16Bit>
FD_RULE uint32_t code_bits(float x, float factor) {
  const float value = ScalarLanes::mul(x, factor);
  return ScalarLanes::bits(ScalarLanes::add(kIs16Bit && value > kMax16BitCode ? kMax16BitCode : value, kRoundingShift));
}

// Return the limbs of a 16-bit code, given its bits, as bytes.
FD_RULE uint32_t high_limb(uint32_t bits) { return (bits + 128) >> 8 & 255u; }
FD_RULE uint32_t low_limb(uint32_t bits) { return bits & 255u; }

// Returns the value of a finite fp16 number, exactly.
FD_RULE float half_to_float(uint32_t half) {
  const float magnitude = ScalarLanes::mul(ScalarLanes::from_bits((half & 0x7fffu) << 13), 0x1p112f);
  return ScalarLanes::from_bits(ScalarLanes::bits(magnitude) | (half & 0x8000u) << 16);
}

// Returns a weight, of which scale and minimum are 1 and -0 where there are none: adding -0 keeps the sign of a zero.
FD_RULE float weight_value(int32_t code, float scale, float minimum, float factor) {
  const float scaled = ScalarLanes::mul(static_cast<float>(code), scale);
  return ScalarLanes::mul(ScalarLanes::add(scaled, minimum), factor);
}

// Adds an integer sum times a scale.
FD_RULE float add_product(int32_t sum, float scale, float total) {
  return ScalarLanes::fma(static_cast<float>(sum), scale, total);
}

}  // namespace fd
