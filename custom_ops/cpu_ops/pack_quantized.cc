// SPDX-License-Identifier: Apache-2.0
// Quantizes bf16 weights and packs them into the panels that linear_quant.cc reads. 8 bits: codes -127..127 and the
// scale absmax / 127 per output. 4 bits: codes -8..7 and a scale per group of 128 k, the candidate with the least
// squared error.
#include <cstring>
#include <limits>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/pack_pieces.h"
#include "cpu_ops/quant_rows.h"

namespace fd {
namespace FD_ISA {
namespace {

// Candidates for the code of the weight of largest magnitude, before it is clamped to -8..7. They are negative, because
// -8 has no positive counterpart.
constexpr float kExtremeCodes[] = {-8.0f, -7.5f, -7.0f, -6.5f, -6.0f, -8.5f, -9.0f};
constexpr int kCandidates = sizeof(kExtremeCodes) / sizeof(float);
#if defined(FD_ISA_AVX512)
constexpr int kScalesAtOnce = kCandidates;  // whose sums fit the registers
#else
constexpr int kScalesAtOnce = 2;
#endif

template <Quantization q>
constexpr int kOffset = has_four_bits(q) ? 8 : 128;  // of stored codes

FD_INLINE float magnitude(float x) { return x < 0 ? -x : x; }
FD_INLINE uint32_t magnitude_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffffu;
}
FD_INLINE float nearest_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bf16_to_float(static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16));
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
  for (int64_t first = 0;; first += kLanes) {
    bool is_here = false;
    for (int lane = 0; lane < kLanes; ++lane) is_here |= magnitude_bits(w[first + lane]) == largest;
    if (!is_here) continue;
    while (magnitude_bits(w[first]) != largest) ++first;
    return w[first];
  }
}

FD_INLINE FP32Vec16 codes_of(FP32Vec16 w, float inverse, float smaller, float most) {
  return max(splat(smaller), min(splat(most), round_to_int(mul(w, splat(inverse)))));
}

// Writes the squared errors of a group of kGroup weights with each of the scales. They are summed in sixteen lanes and
// then over the lanes.
template <int kScales>
FD_INLINE void squared_errors(const float* w, const float* scales, float* errors) {
  FP32Vec16 totals[kScales];
  float inverses[kScales];
  for (int s = 0; s < kScales; ++s) totals[s] = zero(), inverses[s] = 1.0f / scales[s];
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const FP32Vec16 value = load(w + i);
#pragma GCC unroll 8
    for (int s = 0; s < kScales; ++s) {
      const FP32Vec16 error = sub(mul(codes_of(value, inverses[s], -8.0f, 7.0f), splat(scales[s])), value);
      totals[s] = add(totals[s], mul(error, error));
    }
  }
  for (int s = 0; s < kScales; ++s) errors[s] = reduce_sum(totals[s]);
}

float best_group_scale(const float* w) {
  const float extreme = extreme_of_group(w);
  float scales[kCandidates], errors[kCandidates];
  for (int i = 0; i < kCandidates; ++i) scales[i] = nearest_bf16(extreme / kExtremeCodes[i]);
  for (int i = 0; i + kScalesAtOnce <= kCandidates; i += kScalesAtOnce)
    squared_errors<kScalesAtOnce>(w, scales + i, errors + i);
  constexpr int kLeft = kCandidates % kScalesAtOnce;
  if constexpr (kLeft != 0) squared_errors<kLeft>(w, scales + kCandidates - kLeft, errors + kCandidates - kLeft);
  float best = 0, smaller = std::numeric_limits<float>::infinity();
  for (int i = 0; i < kCandidates; ++i) {
    if (magnitude(scales[i]) < kMinScaledAbsmax) continue;
    if (errors[i] < smaller) smaller = errors[i], best = scales[i];
  }
  return best;
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
void write_codes(const float* w, int64_t count, float scale, float smaller, float most, float offset, uint8_t* codes) {
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < count; i += kLanes)
    store_bytes(codes + i, add(codes_of(load(w + i), inverse, smaller, most), splat(offset)));
}

// Joins the codes of eight k to a word, in place: bits 8 * i and 8 * i + 4 begin those of k = i and 4 + i.
void join_nibbles(uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    uint32_t low, high;
    std::memcpy(&low, codes + i, 4);
    std::memcpy(&high, codes + i + 4, 4);
    low |= high << 4;
    std::memcpy(codes + i / 2, &low, 4);
  }
}

// Quantizes the weights [padded_k] of one output; writes its scales to the panel and its words of codes to `codes`.
template <Quantization q>
void quantize_output(const float* w, int64_t k, int64_t padded_k, int64_t lane, uint8_t* codes, uint8_t* panel) {
  if constexpr (has_four_bits(q)) {
    auto* scales = reinterpret_cast<uint16_t*>(panel);
    for (int64_t first = 0; first < k; first += kGroup) {
      const float scale = best_group_scale(w + first);
      write_codes(w + first, kGroup, scale, -8.0f, 7.0f, kOffset<q>, codes + first);
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      scales[first / kGroup * kPanel + lane] = static_cast<uint16_t>(bits >> 16);
    }
    join_nibbles(codes, padded_k);
  } else {
    const uint32_t largest = largest_magnitude_bits(w, k);
    float scale;
    std::memcpy(&scale, &largest, 4);
    scale /= 127.0f;
    if (scale < kMinScaledAbsmax) scale = 0;
    write_codes(w, padded_k, scale, -127.0f, 127.0f, kOffset<q>, codes);
    std::memcpy(panel + 4 * lane, &scale, 4);
  }
}

// Writes the words of sixteen outputs [16][padded_k] as blocks of 64 bytes.
void write_blocks(const uint8_t* codes, int64_t num_words, int64_t padded_k, uint8_t* blocks) {
  const auto word = [=](int64_t lane, int64_t index) {
    uint32_t bits;
    std::memcpy(&bits, codes + lane * padded_k + 4 * index, 4);
    return bits;
  };
#if defined(FD_ISA_AVX512)
  const auto load = [=](int64_t lane, int64_t index) {
    return _mm512_loadu_si512(codes + lane * padded_k + 4 * index);
  };
#else
  const auto load = nullptr;
#endif
  interleave(kPanel, num_words, reinterpret_cast<uint32_t*>(blocks), load, word);
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

template <Quantization q>
bool pack_as(const PackQuantizedArgs& a) {
  const int64_t panel_bytes = quantized_panel_bytes(q, a.k);
  const int64_t padded_k = (a.k + kGroup - 1) / kGroup * kGroup;
  bool all_finite = true;
  parallel_for(num_panels(a.n, a.gated), a.n * a.k >= kMinParallelProducts, [&](int64_t index) {
    uint8_t* panel = a.packed + index * panel_bytes;
    auto* wide =
        static_cast<float*>(thread_scratch(static_cast<size_t>(padded_k * (4 + kPanel + 2 * kPanel)), Scratch::kTile));
    auto* codes = reinterpret_cast<uint8_t*>(wide + padded_k);
    auto* transposed = reinterpret_cast<uint16_t*>(codes + kPanel * padded_k);
    std::memset(codes, has_four_bits(q) ? 0x88 : 0x80, static_cast<size_t>(padded_k * kPanel));  // zero, plus kOffset
    std::memset(panel, 0, static_cast<size_t>(scale_bytes(q, a.k)));
    const uint16_t* weights[kPanel];
    const PanelRows rows = rows_of_panel(index, a.n, a.gated);
    panel_row_pointers(a.pieces, rows.first, rows.count, a.k, transposed, weights);
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      if (!widen_output(weights[lane], a.k, padded_k, wide))
        return __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
      quantize_output<q>(wide, a.k, padded_k, lane, codes + lane * padded_k, panel);
    }
    write_blocks(codes, (a.k + block_k(q) - 1) / block_k(q), padded_k, panel + scale_bytes(q, a.k));
  });
  return all_finite;
}

}  // namespace

// The packed weights do not depend on how rows are quantized.
bool pack_quantized(const PackQuantizedArgs& a) {
  return has_four_bits(a.quantization) ? pack_as<Quantization::kW4a8>(a) : pack_as<Quantization::kW8a8>(a);
}

}  // namespace FD_ISA
}  // namespace fd
