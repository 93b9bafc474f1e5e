// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/virtual_padding.h"

namespace fd {
namespace {

std::string error_text(const char* field, const std::string& expected, int64_t got, int64_t seq) {
  return std::string(field) + ": expected " + expected + ", got " + std::to_string(got) + " for request " +
         std::to_string(seq);
}

// Writes the entries of request b, whose first row is `row`.
void write_rows(const StepShape& shape, const StepIndex& out, int64_t b, int32_t row) {
  const int32_t* table = shape.block_tables + b * shape.table_stride;
  const int32_t block_size = static_cast<int32_t>(shape.block_size), first = shape.num_computed[b];
  for (int32_t i = 0; i < shape.num_scheduled[b]; ++i) {
    const int32_t position = first + i;
    out.batch_id_per_row[row + i] = static_cast<int32_t>(b);
    out.positions[row + i] = position;
    out.slot_mapping[row + i] = table[position / block_size] * block_size + position % block_size;
  }
}

}  // namespace

std::string check_step_shape(const StepShape& shape) {
  int64_t rows = 0;
  for (int64_t b = 0; b < shape.num_seqs; ++b) {
    const int64_t scheduled = shape.num_scheduled[b], kv_len = shape.num_computed[b] + scheduled;
    const int64_t num_logits = shape.num_logits[b];
    rows += scheduled;
    if (scheduled < 0) return error_text("num_scheduled", "at least 0", scheduled, b);
    if (shape.num_computed[b] < 0) return error_text("num_computed", "at least 0", shape.num_computed[b], b);
    if (num_logits < 0 || num_logits > scheduled)
      return error_text("num_logits", "0.." + std::to_string(scheduled), num_logits, b);
    if (shape.num_blocks[b] * shape.block_size < kv_len)
      return error_text("block_tables", "blocks for " + std::to_string(kv_len) + " tokens", shape.num_blocks[b], b);
    if (rows > shape.max_rows)
      return error_text("num_scheduled", "at most " + std::to_string(shape.max_rows) + " rows", rows, b);
  }
  return "";
}

void virtual_padding(const StepShape& shape, const StepIndex& out) {
  int32_t row = 0, logits_row = 0;
  for (int64_t b = 0; b < shape.num_seqs; ++b) {
    out.cu_seqlens_q[b] = row;
    out.cu_logits_rows[b] = logits_row;
    out.kv_lens[b] = shape.num_computed[b] + shape.num_scheduled[b];
    write_rows(shape, out, b, row);
    row += shape.num_scheduled[b];
    for (int32_t i = shape.num_logits[b]; i > 0; --i) out.logits_rows[logits_row++] = row - i;
  }
  out.cu_seqlens_q[shape.num_seqs] = row;
  out.cu_logits_rows[shape.num_seqs] = logits_row;
  out.totals[0] = row;
  out.totals[1] = logits_row;
}

}  // namespace fd
