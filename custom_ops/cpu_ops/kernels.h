// SPDX-License-Identifier: Apache-2.0
// The arguments of the CPU kernels: raw pointers and sizes, without Paddle. The sources of the kernels are compiled
// once per instruction-set path; kernels() returns the table of the path that this process runs.
//
// `Float` tensors are bf16 (stored as uint16_t) or fp32, according to `dtype`. Only the first `rows` rows are read and
// written.
#pragma once

#include <cstdint>

#include "common/quant.h"

namespace fd {

enum class DType { kFloat32, kBfloat16, kInt8 };  // kInt8 for KV caches only

// Returns the number of panels of a layer of `n` outputs. Its weight is [n, k] or, if gated, [2 * n, k]: the rows of
// gate, then those of up. Panels of gate and up alternate, so that a tile holds both.
constexpr int64_t num_panels(int64_t n, bool gated) { return (n + kPanel - 1) / kPanel * (gated ? 2 : 1); }

// The rows of the weight, and the elements of the bias, that belong to a panel.
struct PanelRows {
  int64_t first, count;
};
constexpr PanelRows rows_of_panel(int64_t panel, int64_t n, bool gated) {
  const int64_t column = (gated ? panel / 2 : panel) * kPanel;
  return {gated && panel % 2 == 1 ? n + column : column, n - column < kPanel ? n - column : kPanel};
}

// Returns the elements of a packed weight: [panels][k rounded up to 2][16], in pairs of k for bf16 and one k for fp32.
constexpr int64_t packed_size(int64_t n, int64_t k, bool gated) {
  return num_panels(n, gated) * kPanel * ((k + 1) / 2 * 2);
}

// A range of outputs of a stored weight: rows of k elements, or columns if the matrix is transposed.
struct PackPiece {
  const void* data;    // Float; the first element of the first output
  int64_t stride;      // elements from one stored row to the next
  int64_t count;       // number of outputs
  bool is_transposed;  // the matrix is stored as [in, out]
};

// The pieces that form the weight [n, k], or [2 * n, k] if gated, in order.
struct PackPieces {
  const PackPiece* data;
  int64_t count;
};

struct PackArgs {
  PackPieces pieces;
  void* packed;  // Float [packed_size(n, k, gated)], 64-byte aligned
  int64_t n, k;
  bool gated;
  DType dtype;
};

// y[m, n] = bias[n] + sum of x[m, k] * w[n, k] over k in order;  out[m, n] = round(y[m, n] + residual[m, n])
// With `norm`, rows of x are first normalised and rounded as rms_norm does. If gated, silu(y[m, n]) * y[m, N + n] in
// fp32 replaces y[m, n].
struct LinearArgs {
  const void* x;         // Float [rows, k]; x_stride elements from one row to the next
  const void* packed;    // the result of pack_linear
  const void* bias;      // Float [n], gated [2 * n], or null
  const void* residual;  // shape and dtype of out, or null; may be out itself
  const void* norm;      // Float [k] or null
  void* out;             // [rows, n] of out_dtype; out_stride elements from one row to the next
  int64_t rows, n, k;
  int64_t x_stride, out_stride;  // out_stride is that of residual, too
  bool gated;
  float eps;  // of the norm
  DType dtype, out_dtype;
  float* block_maxima;  // for fp32 outputs without a gate: receives SamplingInputs::block_maxima; or null
};

constexpr int64_t quantized_size(const QuantizedForm& form, int64_t n, int64_t k, bool gated) {
  return num_panels(n, gated) * quantized_panel_bytes(form, k);
}

struct PackQuantizedArgs {
  PackPieces pieces;  // bf16
  uint8_t* packed;    // [quantized_size(form, n, k, gated)], 64-byte aligned
  int64_t n, k;
  bool gated;
  QuantizedForm form;  // without groups, or with groups of 32; minimums are for 4 bits
};

// A range of outputs of a weight that is quantized already.
struct CodedPiece {
  const uint8_t* codes;      // [count, k]: signed, or unsigned where there are minimums
  const float* factors;      // [count], or null: 1
  const uint16_t* scales;    // fp16 [count, groups], or null: 1
  const uint16_t* minimums;  // fp16 [count, groups], or null: 0
  int64_t count;
  int64_t group_size;  // a multiple of that of the packed weight; 0: one group
};

struct PackCodedArgs {
  const CodedPiece* pieces;  // that form the weight [n, k], or [2 * n, k] if gated, in order
  uint8_t* packed;           // [quantized_size(form, n, k, gated)], 64-byte aligned
  int64_t n, k;
  bool gated;
  QuantizedForm form;  // has scales if a piece has them, and minimums if a piece has them
};

enum class PackError { kNone, kNotFinite, kCodeTooLarge };

// LinearArgs with bf16 rows and bias, and `packed` from pack_quantized.
struct QuantizedLinearArgs : LinearArgs {
  QuantizedForm form;
};

// Packed matrices of one size, one after the other, in any format of linear layers.
struct PackedMatrices {
  const uint8_t* packed;
  int64_t count, outputs, inputs;  // outputs of a gated matrix are those after the gate
  bool gated;
  DType dtype;  // of the rows, and of the weights unless they are quantized
  bool is_quantized;
  QuantizedForm form;

  int64_t panel_bytes() const {
    if (is_quantized) return quantized_panel_bytes(form, inputs);
    return packed_size(kPanel, inputs, false) * (dtype == DType::kBfloat16 ? 2 : 4);
  }
  int64_t matrix_bytes() const { return num_panels(outputs, gated) * panel_bytes(); }
};

// out[m, h * outputs + n] = round(sum of x[m, h * head_stride + k] * matrix h [n, k] over k) for all matrices h.
struct ProjectHeadsArgs {
  const void* x;  // Float [rows, x_stride], of which a head reads `inputs` columns; does not overlap out
  void* out;      // Float [rows, count * outputs]
  PackedMatrices matrices;
  int64_t rows, x_stride, head_stride;
};

// out[m, :] = x[m, :] / sqrt(mean(x[m, :]^2) + eps) * weight
struct RmsNormArgs {
  const void* x;
  const void* weight;  // Float [size]
  void* out;           // may be x
  int64_t rows, size;
  float eps;
  DType dtype;
};

// out[m, :] = table[ids[m], :], for embedding and gather_rows with any element size.
struct GatherArgs {
  const int32_t* ids;
  const void* table;
  void* out;
  int64_t rows, row_bytes;
  int64_t table_rows;       // ids must be in 0..table_rows-1
  const char* op;           // "embedding" or "gather_rows", for error messages
  int64_t panel_bytes = 0;  // not 0: the table is a packed weight whose panels have this size
};

// GatherArgs whose table is a packed quantized weight [table_rows, k]; out is bf16 [rows, k].
struct QuantizedGatherArgs : GatherArgs {
  QuantizedForm form;
  int64_t inputs;  // k
};

// Preparation of query and key heads before attention: an optional norm over the head, then a rotation of its first
// rotary_dim elements.
struct RotaryView {
  const int32_t* positions;  // [rows], in 0..num_positions-1
  const float*
      cos_sin;         // [num_positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines; null: no preparation
  const void* q_norm;  // Float [head_dim] or null
  const void* k_norm;
  int64_t rotary_dim, num_positions;
  bool interleaved;  // rotates pairs (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
  float eps;
};

// The KV cache of one layer. A block holds block_size positions for each KV head:
//   key   [num_blocks][num_kv_heads][block_size / 16][head_dim / 2][16][2]   (fp32: [head_dim][16])
//   value [num_blocks][num_kv_heads][block_size / 2][padded_head_dim][2]    (fp32: [block_size][padded_head_dim])
// so that q k^T and p v read it like the packed weights of a linear layer. An int8 cache, used with bf16 rows, stores
// sixteen positions together, their codes before an fp32 scale for each position:
//   key   [num_blocks][num_kv_heads][block_size / 16] x ([head_dim][16] codes, [16] scales)
//   value [num_blocks][num_kv_heads][block_size / 16] x ([8][padded_head_dim / 16][2 positions][16] codes, [16] scales)
struct KvCacheView {
  void* key;
  void* value;
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  DType dtype;
  int64_t padded_head_dim() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
  int64_t scale_width() const { return dtype == DType::kInt8 ? 4 : 0; }
  // Elements of one position of one KV head, and of a block.
  int64_t key_width() const { return head_dim + scale_width(); }
  int64_t value_width() const { return padded_head_dim() + scale_width(); }
  int64_t key_block() const { return num_kv_heads * block_size * key_width(); }
  int64_t value_block() const { return num_kv_heads * block_size * value_width(); }
};

// The new rows of a call to attention, and where the positions of their sequences are in a paged cache.
struct PagedBatch {
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  const int32_t* kv_lens;       // [num_seqs], including the new rows
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* slot_mapping;  // [rows]
  int64_t rows, num_seqs, max_blocks;
};

struct AttentionArgs : PagedBatch {
  void* qkv;  // Float [rows, (num_heads + 2 * num_kv_heads) * head_dim]; undefined afterwards
  KvCacheView cache;
  void* out;  // Float [rows, num_heads * head_dim]
  int64_t num_heads;
  float scale;
  int64_t num_masked_prefix;  // leading positions that are masked for every row but their own
  RotaryView rotary;
};

struct LatentAttentionArgs;  // latent_attention.h
struct RouteArgs;            // experts.h
struct ExpertsUpArgs;
struct ExpertsDownArgs;

struct Kernels {
  void (*pack_linear)(const PackArgs&);
  void (*linear)(const LinearArgs&);
  bool (*pack_quantized)(const PackQuantizedArgs&);  // returns false if a weight is not finite
  PackError (*pack_coded)(const PackCodedArgs&);
  void (*linear_quantized)(const QuantizedLinearArgs&);
  void (*project_heads)(const ProjectHeadsArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*gather)(const GatherArgs&);
  void (*gather_quantized)(const QuantizedGatherArgs&);
  void (*append_attention)(const AttentionArgs&);
  void (*append_latent_attention)(const LatentAttentionArgs&);
  void (*route)(const RouteArgs&);
  void (*experts_up)(const ExpertsUpArgs&);
  void (*experts_down)(const ExpertsDownArgs&);
};

const Kernels& kernels();

}  // namespace fd
