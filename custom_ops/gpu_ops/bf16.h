// SPDX-License-Identifier: Apache-2.0
// Bfloat16 numbers in pairs, as memory and `mma_bf16` hold them.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

FD_DEVICE float low_bf16(uint32_t pair) { return bit_cast<float>(pair << 16); }
FD_DEVICE float high_bf16(uint32_t pair) { return bit_cast<float>(pair & 0xFFFF0000u); }

// Sixteen bytes as eight numbers.
FD_DEVICE void unpack_bf16(const Bytes16& bytes, float (&values)[8]) {
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_bf16(bytes.word[i]);
    values[2 * i + 1] = high_bf16(bytes.word[i]);
  }
}

// Rounds eight numbers to sixteen bytes.
FD_DEVICE Bytes16 pack_bf16(const float (&values)[8]) {
  Bytes16 bytes;
  for (int i = 0; i < 4; ++i) bytes.word[i] = round_bf16x2(values[2 * i], values[2 * i + 1]);
  return bytes;
}

}  // namespace fd::gpu
