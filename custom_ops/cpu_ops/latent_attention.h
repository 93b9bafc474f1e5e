// SPDX-License-Identifier: Apache-2.0
// The arguments of latent attention (DeepSeek-AI, 2024), in which all heads of a position share one cached row: its
// first latent_dim values are the key and the value of every head, the others the rotated part of the key.
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {

constexpr int64_t kMaxLatentDim = 1024;  // the dimensions of latent attention are multiples of kLatentStep
constexpr int64_t kMaxRopeDim = 256;     // also of the part of a query that is not rotated
constexpr int64_t kLatentStep = 8;

// The cache of one layer: rows [num_blocks][block_size][width()], so that a slot is the index of a row.
struct LatentCacheView {
  void* rows;  // Float
  int64_t num_blocks, block_size, latent_dim, rope_dim;
  DType dtype;
  int64_t width() const { return latent_dim + rope_dim; }
};

// score = (absorbed . latent + rotated query . rotated key) * scale;  out = sum of softmax weights * latent
struct LatentAttentionArgs : PagedBatch {
  const void* absorbed;  // Float [rows, num_heads * latent_dim]
  const void* query;     // Float, query_stride elements per row; per head nope_dim values, then rope_dim to be rotated
  const void* latent;    // Float, latent_stride elements per row; the new row before its norm and its rotation
  void* out;             // Float [rows, num_heads * latent_dim]
  LatentCacheView cache;
  int64_t query_stride, latent_stride, num_heads, nope_dim;
  float scale;
  int64_t num_masked_prefix;  // leading positions that are masked for every row but their own
  const void* norm;           // Float [latent_dim], of the latent part of new rows
  float eps;
  RotaryView rotary;  // rotary_dim is rope_dim
};

}  // namespace fd
