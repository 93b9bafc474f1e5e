// SPDX-License-Identifier: Apache-2.0
// Quantizes bf16 weights and packs them into the panels that linear_quant.cc reads. 8 bits: codes -127..127 and the
// scale absmax / 127 per output. 4 bits: codes -8..7 and a scale per group of 128 k, the candidate with the least
// squared error.
#include <cstring>
#include <limits>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/pack_pieces.h"
#include "cpu_ops/quant_rows.h"

namespace fd {
namespace FD_ISA {
namespace {

// Candidates for the code of the weight of largest magnitude, before it is clamped to -8..7. They are negative, because
// -8 has no positive counterpart.
constexpr float kExtremeCodes[] = {-8.0f, -7.5f, -7.0f, -6.5f, -6.0f, -8.5f, -9.0f};

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

// Returns the first weight of the largest magnitude. Magnitudes are compared by their bits.
float extreme_of(const float* w, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude_bits(w[i]);
    largest = bits > largest ? bits : largest;
  }
  int64_t first = 0;
  while (first + 1 < count && magnitude_bits(w[first]) != largest) ++first;
  return w[first];
}

FD_INLINE FP32Vec16 codes_of(FP32Vec16 w, float inverse, float smaller, float most) {
  return max(splat(smaller), min(splat(most), round_to_int(mul(w, splat(inverse)))));
}

// Returns the squared error of a group of kGroup weights with a scale, summed in sixteen lanes and then over the lanes.
float squared_error(const float* w, float scale) {
  FP32Vec16 total = zero();
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const FP32Vec16 value = load(w + i),
                    error = sub(mul(codes_of(value, 1.0f / scale, -8.0f, 7.0f), splat(scale)), value);
    total = add(total, mul(error, error));
  }
  return reduce_sum(total);
}

float best_group_scale(const float* w) {
  const float extreme = extreme_of(w, kGroup);
  float best = 0, smaller = std::numeric_limits<float>::infinity();
  for (float code : kExtremeCodes) {
    const float scale = nearest_bf16(extreme / code);
    if (magnitude(scale) < kMinScaledAbsmax) continue;
    const float error = squared_error(w, scale);
    if (error < smaller) smaller = error, best = scale;
  }
  return best;
}

void write_codes(const float* w, int64_t count, float scale, float smaller, float most, int8_t* codes) {
  const float inverse = scale == 0 ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < count; i += kLanes) {
    float rounded[kLanes];
    store(rounded, codes_of(load(w + i), inverse, smaller, most));
    for (int lane = 0; lane < kLanes; ++lane) codes[i + lane] = static_cast<int8_t>(rounded[lane]);
  }
}

// Writes the codes of sixteen outputs [16][padded_k] as blocks of 64 bytes.
template <Quantization q>
void write_blocks(const int8_t* codes, int64_t k, int64_t padded_k, uint8_t* blocks) {
  constexpr int offset = has_four_bits(q) ? 8 : 128;
  for (int64_t first = 0; first < k; first += block_k(q), blocks += 64) {
    uint8_t block[64] = {};
    for (int64_t lane = 0; lane < kPanel; ++lane)
      for (int64_t i = 0; i < block_k(q); ++i) {
        const int code = codes[lane * padded_k + first + i] + offset;
        uint8_t& byte = block[lane * 4 + i % 4];
        byte = static_cast<uint8_t>(byte | code << (i / 4 * 4));
      }
    std::memcpy(blocks, block, 64);
  }
}

// Quantizes the weights [padded_k] of one output; writes its scales to the panel and its codes to `codes`.
template <Quantization q>
void quantize_output(const float* w, int64_t k, int64_t padded_k, int64_t lane, int8_t* codes, uint8_t* panel) {
  if constexpr (has_four_bits(q)) {
    auto* scales = reinterpret_cast<uint16_t*>(panel);
    for (int64_t first = 0; first < k; first += kGroup) {
      const float scale = best_group_scale(w + first);
      write_codes(w + first, kGroup, scale, -8.0f, 7.0f, codes + first);
      uint32_t bits;
      std::memcpy(&bits, &scale, 4);
      scales[first / kGroup * kPanel + lane] = static_cast<uint16_t>(bits >> 16);
    }
  } else {
    float scale = magnitude(extreme_of(w, k)) / 127.0f;
    if (scale < kMinScaledAbsmax) scale = 0;
    write_codes(w, padded_k, scale, -127.0f, 127.0f, codes);
    std::memcpy(panel + 4 * lane, &scale, 4);
  }
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
    auto* codes = reinterpret_cast<int8_t*>(wide + padded_k);
    auto* transposed = reinterpret_cast<uint16_t*>(codes + kPanel * padded_k);
    std::memset(codes, 0, static_cast<size_t>(padded_k * kPanel));
    std::memset(panel, 0, static_cast<size_t>(scale_bytes(q, a.k)));
    const uint16_t* weights[kPanel];
    const PanelRows rows = rows_of_panel(index, a.n, a.gated);
    panel_row_pointers(a.pieces, rows.first, rows.count, a.k, transposed, weights);
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      if (!widen_output(weights[lane], a.k, padded_k, wide))
        return __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
      quantize_output<q>(wide, a.k, padded_k, lane, codes + lane * padded_k, panel);
    }
    write_blocks<q>(codes, a.k, padded_k, panel + scale_bytes(q, a.k));
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
