// SPDX-License-Identifier: Apache-2.0
// RMSNorm of a row of bfloat16, for the operator and for linear layers that apply it to their inputs: the bits are the
// same for every number of rows and of warps.
//
// Order of the sum of squares: chain c of 256 adds the chunks of 8 elements c, c + 256, c + 512, …, element by element.
// The chains are 8 groups of 32: the sums of a group are added as `shuffle_xor` pairs lanes, by 1, 2, 4, 8 and 16, and
// the groups' sums in ascending order.
#pragma once

#include "gpu_ops/bf16.h"

namespace fd::gpu {

constexpr int kNormChunk = 8;   // elements that are loaded at once
constexpr int kNormGroups = 8;  // each is the work of one warp
constexpr int kNormChains = kNormGroups * static_cast<int>(kWarpSize);

// Returns the sum of squares of one group of chains, in all lanes of the warp that calls it. The row of `size`
// elements, a multiple of 8, may be in global or in shared memory.
FD_DEVICE float group_square_sum(const uint16_t* row, int size, int group) {
  float sum = 0.0f;
  const int first = (group * static_cast<int>(kWarpSize) + static_cast<int>(lane_index())) * kNormChunk;
  for (int i = first; i < size; i += kNormChains * kNormChunk) {
    float x[kNormChunk];
    unpack_bf16(load16(row + i), x);
    for (float value : x) sum = fused_multiply_add(value, value, sum);
  }
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

// Returns 1 / sqrt(mean of squares + eps), given the sum of squares.
FD_DEVICE float norm_factor(float square_sum, int size, float eps) {
  const float mean = divide(square_sum, static_cast<float>(size));
  return divide(1.0f, square_root(mean + eps));
}

// Returns the factor of a row, in all lanes of the warp that calls it. The groups' loads and shuffles do not wait for
// each other.
FD_DEVICE float warp_norm_factor(const uint16_t* row, int size, float eps) {
  float sums[kNormGroups];
  FD_UNROLL
  for (float& sum : sums) sum = 0.0f;
  for (int begin = static_cast<int>(lane_index()) * kNormChunk; begin < size; begin += kNormChains * kNormChunk) {
    FD_UNROLL
    for (int group = 0; group < kNormGroups; ++group) {
      const int i = begin + group * static_cast<int>(kWarpSize) * kNormChunk;
      float x[kNormChunk];
      unpack_bf16(i < size ? load16(row + i) : Bytes16{{0, 0, 0, 0}}, x);
      for (float value : x) sums[group] = fused_multiply_add(value, value, sums[group]);
    }
  }
  float total = 0.0f;
  FD_UNROLL
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) {
    FD_UNROLL
    for (float& sum : sums) sum += shuffle_xor(sum, mask);
  }
  FD_UNROLL
  for (const float sum : sums) total += sum;
  return norm_factor(total, size, eps);
}

// Returns the factor of a row, in all threads of the block that calls it, which has at most 8 warps. `sums` is shared
// memory; it may be written again after the next barrier.
FD_DEVICE float block_norm_factor(const uint16_t* row, int size, float eps, float (&sums)[kNormGroups]) {
  const int num_warps = static_cast<int>(block_size() / kWarpSize);
  for (int group = static_cast<int>(warp_index()); group < kNormGroups; group += num_warps) {
    const float sum = group_square_sum(row, size, group);
    if (lane_index() == 0) sums[group] = sum;
  }
  sync_block();
  float sum = 0.0f;
  for (float group_sum : sums) sum += group_sum;
  return norm_factor(sum, size, eps);
}

// Returns round(x * factor * weight) for eight elements.
FD_DEVICE Bytes16 normalise_chunk(const Bytes16& x, const Bytes16& weight, float factor) {
  float values[kNormChunk], weights[kNormChunk];
  unpack_bf16(x, values);
  unpack_bf16(weight, weights);
  for (int i = 0; i < kNormChunk; ++i) values[i] = values[i] * factor * weights[i];
  return pack_bf16(values);
}

}  // namespace fd::gpu
