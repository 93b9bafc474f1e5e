// SPDX-License-Identifier: Apache-2.0
// Where the KV cache of a GPU holds keys or values: blocks of [kv_heads][block_size][head_dim] in bfloat16; in int8 the
// codes of a block and head are followed by a scale of four bytes for each position.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

template <int kHeadDim, bool kIsInt8>
struct CacheLayout {
  static constexpr int kRowBytes = kHeadDim * (kIsInt8 ? 1 : 2);
  static constexpr int kScaleBytes = kIsInt8 ? 4 : 0;

  int32_t block_size, kv_heads;

  FD_DEVICE int64_t head_bytes() const { return int64_t{block_size} * (kRowBytes + kScaleBytes); }
  FD_DEVICE int64_t head_begin(int64_t block, int kv_head) const { return (block * kv_heads + kv_head) * head_bytes(); }
  FD_DEVICE int64_t scale_begin(int64_t head_begin, int offset) const {
    return head_begin + int64_t{block_size} * kRowBytes + int64_t{offset} * kScaleBytes;
  }
};

}  // namespace fd::gpu
