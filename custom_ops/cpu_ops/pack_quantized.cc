// SPDX-License-Identifier: Apache-2.0
// Quantizes bf16 weights and packs them into the panels that linear_quant.cc reads. 8 bits: codes -127..127 and absmax
// / 127 as the factor of an output or the scale of a group. 4 bits: codes -8..7, or 0..15 with a minimum, and the
// candidate scale with the least squared error. Groups are 32 k, beside the power of two of the output's largest weight
// as the factor.
#include <cstring>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/pack_blocks.h"
#include "cpu_ops/pack_pieces.h"
#include "cpu_ops/quant_rows.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kGroup = 32;  // inputs that share a scale

// Candidates for the code of the weight of largest magnitude, before it is clamped to -8..7. They are negative, because
// -8 has no positive counterpart.
constexpr float kExtremeCodes[] = {-8.0f, -7.5f, -7.0f, -6.5f, -6.0f, -8.5f, -9.0f};
// Candidates for the codes of the smallest and of the largest weight, before they are clamped to 0..15.
constexpr float kEndCodes[][2] = {{0.0f, 15.0f},  {-0.5f, 14.75f}, {0.0f, 15.5f},   {-0.25f, 15.0f},
                                  {0.0f, 15.25f}, {0.25f, 15.25f}, {-0.25f, 15.25f}};
constexpr int kCandidates = 7;
static_assert(sizeof(kExtremeCodes) == kCandidates * sizeof(float) &&
              sizeof(kEndCodes) == 2 * kCandidates * sizeof(float));
#if defined(FD_ISA_AVX512)
constexpr int kCandidatesAtOnce = kCandidates;  // whose sums fit the registers
#else
constexpr int kCandidatesAtOnce = 2;
#endif

FD_INLINE uint32_t magnitude_bits(float x) { return ScalarLanes::bits(x) & 0x7fffffffu; }

// Returns the nearest fp16 number, ties to even, of a number below 2^15.
FD_INLINE float nearest_half(float x) {
  constexpr float kSmallestNormal = 0x1p-14f, kSubnormalShift = 0.75f;  // adding it leaves multiples of 2^-24
  if (magnitude(x) < kSmallestNormal) return (x + kSubnormalShift) - kSubnormalShift;
  const uint32_t bits = ScalarLanes::bits(x);
  return ScalarLanes::from_bits((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// Returns the bits of the largest magnitude.
uint32_t largest_magnitude_bits(const float* w, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude_bits(w[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Returns the first weight of the largest magnitude in a group.
float extreme_of_group(const float* w) {
  const uint32_t largest = largest_magnitude_bits(w, kGroup);
  for (int64_t i = 0;; ++i)
    if (magnitude_bits(w[i]) == largest) return w[i];
}

// What a group's codes stand for: code * scale + minimum.
struct GroupValues {
  float scale, minimum;
};

// Returns the nearest codes, which are limited to smaller .. most.
template <bool kHasMinimum>
FD_INLINE FP32Vec16 codes_of(FP32Vec16 w, float inverse, float minimum, float smaller, float most) {
  if (kHasMinimum) w = sub(w, splat(minimum));
  return max(splat(smaller), min(splat(most), round_to_int(mul(w, splat(inverse)))));
}

template <bool kHasMinimum>
constexpr float kSmallestCode = kHasMinimum ? 0.0f : -8.0f;
FD_INLINE float inverse_of(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

// Writes the squared errors of a group of kGroup weights with each of the candidates. They are summed in sixteen lanes
// and then over the lanes.
template <bool kHasMinimum, int kCount>
FD_INLINE void squared_errors(const float* w, const GroupValues* values, float* errors) {
  FP32Vec16 totals[kCount];
  float inverses[kCount];
  for (int c = 0; c < kCount; ++c) totals[c] = zero(), inverses[c] = inverse_of(values[c].scale);
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const FP32Vec16 weight = load(w + i);
#pragma GCC unroll 8
    for (int c = 0; c < kCount; ++c) {
      const FP32Vec16 code = codes_of<kHasMinimum>(weight, inverses[c], values[c].minimum, kSmallestCode<kHasMinimum>,
                                                   kSmallestCode<kHasMinimum> + 15.0f);
      FP32Vec16 value = mul(code, splat(values[c].scale));
      if (kHasMinimum) value = add(value, splat(values[c].minimum));
      const FP32Vec16 error = sub(value, weight);
      totals[c] = add(totals[c], mul(error, error));
    }
  }
  for (int c = 0; c < kCount; ++c) errors[c] = reduce_sum(totals[c]);
}

template <bool kHasMinimum>
void list_candidates(const float* w, GroupValues* candidates) {
  if constexpr (!kHasMinimum) {
    const float extreme = extreme_of_group(w);
    for (int c = 0; c < kCandidates; ++c) candidates[c] = {nearest_half(extreme / kExtremeCodes[c]), 0.0f};
  } else {
    float smallest = w[0], largest = w[0];
    for (int64_t i = 1; i < kGroup; ++i) {
      smallest = w[i] < smallest ? w[i] : smallest;
      largest = w[i] > largest ? w[i] : largest;
    }
    for (int c = 0; c < kCandidates; ++c) {
      const float low = kEndCodes[c][0], high = kEndCodes[c][1];
      const float scale = nearest_half((largest - smallest) / (high - low));
      candidates[c] = {scale, nearest_half(smallest - low * scale)};
    }
  }
}

// Returns the candidate with the least squared error, the first of equal ones.
template <bool kHasMinimum>
GroupValues best_group_values(const float* w) {
  GroupValues candidates[kCandidates];
  float errors[kCandidates];
  list_candidates<kHasMinimum>(w, candidates);
  for (int c = 0; c + kCandidatesAtOnce <= kCandidates; c += kCandidatesAtOnce)
    squared_errors<kHasMinimum, kCandidatesAtOnce>(w, candidates + c, errors + c);
  constexpr int kLeft = kCandidates % kCandidatesAtOnce, kDone = kCandidates - kLeft;
  if constexpr (kLeft != 0) squared_errors<kHasMinimum, kLeft>(w, candidates + kDone, errors + kDone);
  int best = 0;
  for (int c = 1; c < kCandidates; ++c) best = errors[c] < errors[best] ? c : best;
  return candidates[best];
}

// Returns the values of a group of codes of 8 bits.
GroupValues values_of_8_bits(const float* w) {
  return {nearest_half(ScalarLanes::from_bits(largest_magnitude_bits(w, kGroup)) / 127.0f), 0.0f};
}

FD_INLINE void store_bytes(uint8_t* to, FP32Vec16 x) {
#if defined(FD_ISA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
#else
  float values[kLanes];
  store(values, x);
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<uint8_t>(static_cast<int32_t>(values[lane]));
#endif
}

// Writes codes plus `offset` as bytes.
template <bool kHasMinimum>
void write_codes(const float* w, int64_t count, GroupValues values, float smaller, float most, float offset,
                 uint8_t* codes) {
  const float inverse = inverse_of(values.scale);
  for (int64_t i = 0; i < count; i += kLanes)
    store_bytes(codes + i,
                add(codes_of<kHasMinimum>(load(w + i), inverse, values.minimum, smaller, most), splat(offset)));
}

// Quantizes the weights [padded_k] of one output to 8 bits without groups; writes its factor to the panel and its codes
// to `codes`.
void quantize_without_groups(const float* w, int64_t k, int64_t padded_k, int64_t lane, uint8_t* codes,
                             uint8_t* panel) {
  float factor = ScalarLanes::from_bits(largest_magnitude_bits(w, k)) / 127.0f;
  if (factor < kMinScaledAbsmax) factor = 0;
  write_codes<false>(w, padded_k, {factor, 0.0f}, -127.0f, 127.0f, 128.0f, codes);
  std::memcpy(panel + 4 * lane, &factor, 4);
}

// Does the same with groups. The weights are divided by the factor in place, and words of four-bit codes are written.
template <bool kFourBits, bool kHasMinimum>
void quantize_groups(float* w, const QuantizedForm& form, int64_t k, int64_t padded_k, int64_t lane, uint8_t* codes,
                     uint8_t* panel) {
  constexpr float kSmallest = kFourBits ? kSmallestCode<kHasMinimum> : -127.0f;
  constexpr float kLargest = kFourBits ? kSmallest + 15.0f : 127.0f;
  float factor = ScalarLanes::from_bits(largest_magnitude_bits(w, k) & 0x7f800000u);
  if (factor < kMinScaledAbsmax) factor = 0;
  const float inverse = inverse_of(factor), padding = kHasMinimum ? w[k - 1] : 0.0f;
  for (int64_t i = 0; i < padded_k; ++i) w[i] = (i < k ? w[i] : padding) * inverse;
  auto* scales = reinterpret_cast<uint16_t*>(panel + kFactorBytes) + lane;
  auto* minimums = reinterpret_cast<uint16_t*>(panel + kFactorBytes + scale_bytes(form, k)) + lane;
  for (int64_t group = 0; group * kGroup < k; ++group) {
    const float* weights = w + group * kGroup;
    const GroupValues values = kFourBits ? best_group_values<kHasMinimum>(weights) : values_of_8_bits(weights);
    write_codes<kHasMinimum>(weights, kGroup, values, kSmallest, kLargest, static_cast<float>(form.code_offset()),
                             codes + group * kGroup);
    scales[group * kPanel] = half_bits(values.scale);
    if (kHasMinimum) minimums[group * kPanel] = half_bits(values.minimum);
  }
  if (kFourBits) join_nibbles(codes, padded_k);
  std::memcpy(panel + 4 * lane, &factor, 4);
}

void quantize_output(float* w, const QuantizedForm& form, int64_t k, int64_t padded_k, int64_t lane, uint8_t* codes,
                     uint8_t* panel) {
  if (!form.has_scales()) return quantize_without_groups(w, k, padded_k, lane, codes, panel);
  const auto quantize = !has_four_bits(form.quantization) ? quantize_groups<false, false>
                        : form.has_minimum                ? quantize_groups<true, true>
                                                          : quantize_groups<true, false>;
  quantize(w, form, k, padded_k, lane, codes, panel);
}

// Converts the weights of one output to fp32 in wide[padded_k], padded with zeros; returns whether all are finite.
bool widen_output(const uint16_t* w, int64_t k, int64_t padded_k, float* wide) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    wide[i] = bf16_to_float(w[i]);
    const uint16_t bits = w[i] & 0x7fff;
    largest = bits > largest ? bits : largest;
  }
  std::memset(wide + k, 0, static_cast<size_t>(padded_k - k) * 4);
  return largest < 0x7f80;
}

}  // namespace

// The packed weights do not depend on how rows are quantized.
bool pack_quantized(const PackQuantizedArgs& a) {
  const Quantization q = a.form.quantization;
  const int64_t panel_bytes = quantized_panel_bytes(a.form, a.k), header = header_bytes(a.form, a.k);
  const int64_t padded_k = (a.k + kGroup - 1) / kGroup * kGroup;
  bool all_finite = true;
  parallel_for(num_panels(a.n, a.gated), a.n * a.k >= kMinParallelProducts, [&](int64_t index) {
    uint8_t* panel = a.packed + index * panel_bytes;
    auto* wide =
        static_cast<float*>(thread_scratch(static_cast<size_t>(padded_k * (4 + kPanel + 2 * kPanel)), Scratch::kTile));
    auto* codes = reinterpret_cast<uint8_t*>(wide + padded_k);
    auto* transposed = reinterpret_cast<uint16_t*>(codes + kPanel * padded_k);
    std::memset(codes, a.form.code_offset() * (has_four_bits(q) ? 0x11 : 1), static_cast<size_t>(padded_k * kPanel));
    std::memset(panel, 0, static_cast<size_t>(header));
    const uint16_t* weights[kPanel];
    const PanelRows rows = rows_of_panel(index, a.n, a.gated);
    panel_row_pointers(a.pieces, rows.first, rows.count, a.k, transposed, weights);
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      if (!widen_output(weights[lane], a.k, padded_k, wide))
        return __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
      quantize_output(wide, a.form, a.k, padded_k, lane, codes + lane * padded_k, panel);
    }
    write_blocks(codes, num_code_blocks(q, a.k), padded_k, panel + header);
  });
  return all_finite;
}

}  // namespace FD_ISA
}  // namespace fd
