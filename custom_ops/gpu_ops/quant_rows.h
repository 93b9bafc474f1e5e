// SPDX-License-Identifier: Apache-2.0
// Rows of a linear layer, after its norm, as integer codes (common/quant.h): a block for each row.
//
// Codes: [rows * limbs][stride] signed bytes; a row of 16 bits is two, its high limbs first. stride is K filled up with
// zeros to a multiple of 128. Each row of codes lies in the order in which products of a weight of four bits take it:
// of 64 inputs, which are eight times eight, first the first four of each eight, then the last four. With weights of
// eight bits the order is that of the inputs.
#pragma once

#include "common/quant.h"
#include "gpu_ops/norm.h"

namespace fd::gpu {

struct QuantRowsShared {
  float sums[kNormGroups];
  uint32_t largest[kNormGroups];  // of each warp
};

// Returns the largest of a value's sixteen-bit halves and `largest`, signs excepted.
FD_DEVICE uint32_t max_magnitude(uint32_t pair, uint32_t largest) {
  const uint32_t low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu, larger = low < high ? high : low;
  return largest < larger ? larger : largest;
}

// Returns the largest value of all threads of a block.
FD_DEVICE uint32_t block_max(uint32_t value, uint32_t (&of_warps)[kNormGroups]) {
  FD_UNROLL
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) {
    const uint32_t other = shuffle_xor(value, mask);
    value = value < other ? other : value;
  }
  if (lane_index() == 0) of_warps[warp_index()] = value;
  sync_block();
  for (unsigned warp = 0; warp < block_size() / kWarpSize; ++warp)
    value = value < of_warps[warp] ? of_warps[warp] : value;
  return value;
}

// Writes the codes of four inputs, of which `pairs` holds two each, to one row or to those of both limbs.
template <bool kIs16Bit>
FD_DEVICE void write_codes(const uint32_t (&pairs)[2], float factor, uint8_t* codes, int stride) {
  uint32_t high = 0, low = 0;
  FD_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float value = i % 2 == 0 ? low_bf16(pairs[i / 2]) : high_bf16(pairs[i / 2]);
    const uint32_t bits = factor == 0.0f ? 0 : code_bits<kIs16Bit>(value, factor);
    high |= high_limb(bits) << 8 * i;
    low |= low_limb(bits) << 8 * i;
  }
  if (kIs16Bit) *reinterpret_cast<uint32_t*>(codes) = high;
  *reinterpret_cast<uint32_t*>(codes + (kIs16Bit ? stride : 0)) = low;
}

template <Quantization kQuantization>
FD_KERNEL void quantize_rows(In<uint16_t> x, In<uint16_t> norm, Out<uint8_t> codes, Out<float> scales,
                             In<int32_t> device_rows, int num_rows, int k, int stride, float eps) {
  constexpr bool kFourBits = has_four_bits(kQuantization), kIs16Bit = has_16_bit_rows(kQuantization);
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  auto& shared = shared_memory<QuantRowsShared>();
  const uint16_t* from = x.data + int64_t{row} * k;
  const float norm_factor = norm.data == nullptr ? 0.0f : block_norm_factor(from, k, eps, shared.sums);
  const auto chunk_at = [&](int i) {
    const Bytes16 chunk = load16(from + i);
    return norm.data == nullptr ? chunk : normalise_chunk(chunk, load16_readonly(norm.data + i), norm_factor);
  };
  const int first = static_cast<int>(thread_index()) * kNormChunk, step = static_cast<int>(block_size()) * kNormChunk;
  uint32_t largest = 0;
  for (int i = first; i < k; i += step)
    for (const uint32_t pair : chunk_at(i).word) largest = max_magnitude(pair, largest);
  const RowScale scale = row_scale<kIs16Bit>(block_max(largest, shared.largest));
  if (thread_index() == 0) scales.data[row] = scale.scale;
  uint8_t* to = codes.data + int64_t{row} * stride * (kIs16Bit ? 2 : 1);
  for (int i = first; i < stride; i += step) {
    const Bytes16 chunk = i < k ? chunk_at(i) : Bytes16{{0, 0, 0, 0}};
    uint8_t* begin = to + (kFourBits ? i / 64 * 64 + i % 64 / 2 : i);
    write_codes<kIs16Bit>({chunk.word[0], chunk.word[1]}, scale.factor, begin, stride);
    write_codes<kIs16Bit>({chunk.word[2], chunk.word[3]}, scale.factor, begin + (kFourBits ? 32 : 4), stride);
  }
}

}  // namespace fd::gpu
