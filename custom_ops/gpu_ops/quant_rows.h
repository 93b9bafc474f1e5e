// SPDX-License-Identifier: Apache-2.0
// Rows of a linear layer, after its norm, as integer codes (common/quant.h): a block for each row.
//
//   codes   [rows * limbs][stride] signed bytes; a row of 16 bits is two, its high limbs first
//   scales  of rows of 16 bits [rows], of those of 8 bits [rows][pieces]
//   sums    [rows][pieces]: what a minimum is multiplied by, the sum of a piece's codes (in 8 bits times its scale)
//
// stride is K filled up with zeros to a multiple of 128, so that there are stride / 32 pieces.
#pragma once

#include "common/quant.h"
#include "gpu_ops/norm.h"

namespace fd::gpu {

struct QuantRowsShared {
  float sums[kNormGroups];
  uint32_t largest[kNormGroups];  // of each warp
};

constexpr unsigned kPieceLanes = kPiece / kNormChunk;  // lanes whose chunks form a piece

// Returns the largest magnitude of the eight values of a chunk, as bits of bf16.
FD_DEVICE uint32_t chunk_max(const Bytes16& chunk) {
  uint32_t largest = 0;
  for (const uint32_t pair : chunk.word) {
    const uint32_t low = pair & 0x7fffu, high = pair >> 16 & 0x7fffu, larger = low < high ? high : low;
    largest = largest < larger ? larger : largest;
  }
  return largest;
}

// Returns the largest value of `kLanes` neighbouring lanes, in all of them.
template <unsigned kLanes>
FD_DEVICE uint32_t lanes_max(uint32_t value) {
  FD_UNROLL
  for (unsigned mask = 1; mask < kLanes; mask *= 2) {
    const uint32_t other = shuffle_xor(value, mask);
    value = value < other ? other : value;
  }
  return value;
}

// Returns the largest value of all threads of a block.
FD_DEVICE uint32_t block_max(uint32_t value, uint32_t (&of_warps)[kNormGroups]) {
  value = lanes_max<kWarpSize>(value);
  if (lane_index() == 0) of_warps[warp_index()] = value;
  sync_block();
  for (unsigned warp = 0; warp < block_size() / kWarpSize; ++warp)
    value = value < of_warps[warp] ? of_warps[warp] : value;
  return value;
}

// The codes of a chunk: bytes of each limb, or low ones only; and their sum.
struct ChunkCodes {
  uint64_t high, low;
  int32_t sum;
};

template <bool kIs16Bit>
FD_DEVICE ChunkCodes codes_of(const Bytes16& chunk, float factor) {
  ChunkCodes codes{0, 0, 0};
  FD_UNROLL
  for (int i = 0; i < kNormChunk; ++i) {
    const float value = i % 2 == 0 ? low_bf16(chunk.word[i / 2]) : high_bf16(chunk.word[i / 2]);
    const uint32_t bits = factor == 0.0f ? 0 : code_bits<kIs16Bit>(value, factor);
    codes.high |= uint64_t{high_limb(bits)} << 8 * i;
    codes.low |= uint64_t{low_limb(bits)} << 8 * i;
    codes.sum += kIs16Bit ? 256 * static_cast<int8_t>(high_limb(bits)) : 0;
    codes.sum += static_cast<int8_t>(low_limb(bits));
  }
  return codes;
}

// `sums` is null for weights without a minimum.
template <bool kIs16Bit>
FD_KERNEL void quantize_rows(In<uint16_t> x, In<uint16_t> norm, Out<uint8_t> codes, Out<float> scales, Out<float> sums,
                             In<int32_t> device_rows, int num_rows, int k, int stride, float eps) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  auto& shared = shared_memory<QuantRowsShared>();
  const uint16_t* from = x.data + int64_t{row} * k;
  const float norm_factor = norm.data == nullptr ? 0.0f : block_norm_factor(from, k, eps, shared.sums);
  const auto chunk_at = [&](int i) {
    if (i >= k) return Bytes16{{0, 0, 0, 0}};
    const Bytes16 chunk = load16(from + i);
    return norm.data == nullptr ? chunk : normalise_chunk(chunk, load16_readonly(norm.data + i), norm_factor);
  };
  const int first = static_cast<int>(thread_index()) * kNormChunk, step = static_cast<int>(block_size()) * kNormChunk;
  RowScale scale{0.0f, 0.0f};
  if constexpr (kIs16Bit) {
    uint32_t largest = 0;
    for (int i = first; i < k; i += step) {
      const uint32_t of_chunk = chunk_max(chunk_at(i));
      largest = largest < of_chunk ? of_chunk : largest;
    }
    scale = row_scale<true>(block_max(largest, shared.largest));
    if (thread_index() == 0) scales.data[row] = scale.scale;
  }
  uint8_t* to = codes.data + int64_t{row} * stride * (kIs16Bit ? 2 : 1);
  const int64_t first_piece = int64_t{row} * (stride / static_cast<int>(kPiece));
  for (int i = first; i - first < stride; i += step) {  // lanes beyond the row take part in what a warp does together
    const Bytes16 chunk = chunk_at(i);
    if constexpr (!kIs16Bit) scale = row_scale<false>(lanes_max<kPieceLanes>(chunk_max(chunk)));
    const ChunkCodes of_chunk = codes_of<kIs16Bit>(chunk, scale.factor);
    int32_t sum = of_chunk.sum;
    for (unsigned mask = 1; sums.data != nullptr && mask < kPieceLanes; mask *= 2) sum += shuffle_xor(sum, mask);
    if (i >= stride) continue;
    if (kIs16Bit) *reinterpret_cast<uint64_t*>(to + i) = of_chunk.high;
    *reinterpret_cast<uint64_t*>(to + (kIs16Bit ? stride : 0) + i) = of_chunk.low;
    if (lane_index() % kPieceLanes != 0) continue;
    const int64_t piece = first_piece + i / static_cast<int>(kPiece);
    if (!kIs16Bit) scales.data[piece] = scale.scale;
    if (sums.data == nullptr) continue;
    sums.data[piece] = kIs16Bit ? static_cast<float>(sum) : static_cast<float>(sum) * scale.scale;
  }
}

}  // namespace fd::gpu
