// SPDX-License-Identifier: Apache-2.0
// The launchers of the CPU operators: raw pointers and sizes, no framework. Each family is one source of the same name,
// compiled once per instruction-set path; kernels() returns the table of the path that this process runs.
//
// `Float` tensors are bf16 (held as uint16_t) or fp32 as `dtype` says. Only the first num_rows rows are read and
// written.
#pragma once

#include <cstdint>

namespace fd {

enum class DType { kFloat32, kBfloat16, kInt8 };  // int8: of caches only

constexpr int64_t kPanel = 16;  // outputs of one panel of packed weights

// What a linear layer of `n` outputs is packed from: [n, k], or gated [2 * n, k], the rows of the gate before those of
// up. The panels of gate and up alternate, so that a tile has both.
constexpr int64_t num_panels(int64_t n, bool gated) { return (n + kPanel - 1) / kPanel * (gated ? 2 : 1); }

// The rows of the weight (and elements of the bias) that a panel holds.
struct PanelRows {
  int64_t first, count;
};
constexpr PanelRows rows_of_panel(int64_t panel, int64_t n, bool gated) {
  const int64_t column = (gated ? panel / 2 : panel) * kPanel;
  return {gated && panel % 2 == 1 ? n + column : column, n - column < kPanel ? n - column : kPanel};
}

// Elements of a packed weight: [panels][K rounded up to 2][16], as pairs of k for bf16 and single k for fp32.
constexpr int64_t packed_size(int64_t n, int64_t k, bool gated) {
  return num_panels(n, gated) * kPanel * ((k + 1) / 2 * 2);
}

// Some outputs of a stored weight: rows of k, or columns of k.
struct PackPiece {
  const void* data;    // Float; the first k of the first output
  int64_t stride;      // elements from a stored row to the next
  int64_t count;       // outputs
  bool is_transposed;  // stored [in, out]
};

// The weight [n, k], or [2 * n, k] when gated, that its pieces make in order.
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

// y[m, n] = sum over k, in order, of x[m, k] * w[n, k], + bias[n];  out[m, n] = round(y[m, n] + residual[m, n])
// With `norm`, the rows of x are first normalised and rounded as rms_norm does. Gated, silu(y[m, n]) * y[m, N + n]
// takes the place of y[m, n], in fp32.
struct LinearArgs {
  const void* x;         // Float [rows, k]
  const void* packed;    // from pack_linear
  const void* bias;      // Float [n], gated [2 * n], or null
  const void* residual;  // as out, or null; may be out itself
  const void* norm;      // Float [k] or null
  void* out;             // [rows, n] of out_dtype
  int64_t rows, n, k;
  bool gated;
  float eps;  // of the norm
  DType dtype, out_dtype;
  float* block_maxima;  // of fp32 outputs without a gate, for SamplingInputs, or null
};

// Weights held as integers of eight or four bits, times rows quantized to sixteen bits (wint8, wint4) or eight (w8a8,
// w4a8). The order is that of QUANTIZATIONS in ops/linear.py.
enum class Quantization { kWint8, kWint4, kW8a8, kW4a8 };

constexpr int64_t kGroup = 128;  // k that share a scale in the formats of four bits; in the others all do

constexpr bool has_four_bits(Quantization q) { return q == Quantization::kWint4 || q == Quantization::kW4a8; }
constexpr bool has_wide_rows(Quantization q) { return q == Quantization::kWint8 || q == Quantization::kWint4; }

// Bytes of the scales that open a panel, and of the panel: blocks of 64 bytes hold eight k of four bits or four k of
// eight, for sixteen outputs. A scale per group is bf16, a scale per output fp32.
constexpr int64_t scale_bytes(Quantization q, int64_t k) {
  return has_four_bits(q) ? ((k + kGroup - 1) / kGroup * 2 * kPanel + 63) / 64 * 64 : 4 * kPanel;
}
constexpr int64_t block_k(Quantization q) { return has_four_bits(q) ? 8 : 4; }
constexpr int64_t quantized_panel_bytes(Quantization q, int64_t k) {
  return scale_bytes(q, k) + (k + block_k(q) - 1) / block_k(q) * 64;
}
constexpr int64_t quantized_size(Quantization q, int64_t n, int64_t k, bool gated) {
  return num_panels(n, gated) * quantized_panel_bytes(q, k);
}

struct PackQuantizedArgs {
  PackPieces pieces;  // bf16
  uint8_t* packed;    // [quantized_size(quantization, n, k, gated)], 64-byte aligned
  int64_t n, k;
  bool gated;
  Quantization quantization;
};

// As LinearArgs, with bf16 rows and bias, and `packed` from pack_quantized.
struct QuantizedLinearArgs : LinearArgs {
  Quantization quantization;
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

// out[m, :] = table[ids[m], :]: embedding and gather of rows, any element size. Ids must be in range.
struct GatherArgs {
  const int32_t* ids;
  const void* table;
  void* out;
  int64_t rows, row_bytes;
  int64_t table_rows;       // ids lie in 0..table_rows-1
  const char* op;           // "embedding" or "gather_rows", for messages
  int64_t panel_bytes = 0;  // 0: the table's rows lie one after the other; else it is a packed weight of such panels
};

// What happens to every query and key head before attention: an optional norm over the head, then its first rotary_dim
// elements rotate.
struct RotaryView {
  const int32_t* positions;  // [rows], in 0..num_positions-1
  const float* cos_sin;      // [num_positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines; null: nothing
  const void* q_norm;        // Float [head_dim] or null
  const void* k_norm;
  int64_t rotary_dim, num_positions;
  bool interleaved;  // pairs (0, 1), (2, 3), ... instead of (0, d/2), (1, d/2 + 1), ...
  float eps;
};

// The cache of one layer. One block holds, per kv head, block_size positions:
//   key   [num_blocks][num_kv_heads][block_size / 16][head_dim / 2][16][2]   (fp32: [head_dim][16])
//   value [num_blocks][num_kv_heads][block_size / 2][padded_head_dim][2]    (fp32: [block_size][padded_head_dim])
// so that q k^T and p v read both as packed weights of a linear layer. In int8, beside rows of bf16, sixteen positions
// lie together, codes before an fp32 scale for each:
//   key   [num_blocks][num_kv_heads][block_size / 16] x ([head_dim][16] codes, [16] scales)
//   value [num_blocks][num_kv_heads][block_size / 16] x ([8][padded_head_dim / 16][2 positions][16] codes, [16] scales)
struct KvCacheView {
  void* key;
  void* value;
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
  DType dtype;
  int64_t padded_head_dim() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
  int64_t scale_width() const { return dtype == DType::kInt8 ? 4 : 0; }
  // Elements of one position of one kv head, and of a block.
  int64_t key_width() const { return head_dim + scale_width(); }
  int64_t value_width() const { return padded_head_dim() + scale_width(); }
  int64_t key_block() const { return num_kv_heads * block_size * key_width(); }
  int64_t value_block() const { return num_kv_heads * block_size * value_width(); }
};

struct AttentionArgs {
  void* qkv;  // Float [rows, (num_heads + 2 * num_kv_heads) * head_dim]; holds anything afterwards
  KvCacheView cache;
  const int32_t* cu_seqlens_q;  // [num_seqs + 1]
  const int32_t* kv_lens;       // [num_seqs], the new rows included
  const int32_t* block_tables;  // [num_seqs, max_blocks]
  const int32_t* slot_mapping;  // [rows]
  void* out;                    // Float [rows, num_heads * head_dim]
  int64_t rows, num_seqs, max_blocks, num_heads;
  float scale;
  int64_t hides_first;  // so many positions, the first ones, are seen by their own rows only
  RotaryView rotary;
};

struct Kernels {
  void (*pack_linear)(const PackArgs&);
  void (*linear)(const LinearArgs&);
  bool (*pack_quantized)(const PackQuantizedArgs&);  // false: a weight is not finite
  void (*linear_quantized)(const QuantizedLinearArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*gather)(const GatherArgs&);
  void (*append_attention)(const AttentionArgs&);
  float (*read_memory)(const void* data, int64_t bytes);  // all threads read `bytes`, a multiple of 256 KiB; their sum
  double (*multiply_registers)(int64_t steps);            // returns the bf16 operations done by all threads
  double (*multiply_integers)(int64_t steps);             // the same of int8 operations
};

const Kernels& kernels();

}  // namespace fd
