// SPDX-License-Identifier: Apache-2.0
// The index arrays of one step: rows are packed request after request, and these arrays say whose they are.
#pragma once

#include <cstdint>
#include <string>

namespace fd {

struct StepShape {
  const int32_t* num_scheduled;  // [num_seqs] rows of each request
  const int32_t* num_computed;   // [num_seqs] its tokens that are in the cache already
  const int32_t* num_logits;     // [num_seqs] how many of its last rows are wanted as logits
  const int32_t* num_blocks;     // [num_seqs] blocks of its table
  const int32_t* block_tables;   // [num_seqs, table_stride]
  int64_t num_seqs, table_stride, block_size, max_rows;
};

struct StepIndex {
  int32_t* totals;            // [2] rows, rows wanted as logits
  int32_t* cu_seqlens_q;      // [num_seqs + 1]
  int32_t* cu_logits_rows;    // [num_seqs + 1]
  int32_t* kv_lens;           // [num_seqs] num_computed + num_scheduled
  int32_t* batch_id_per_row;  // [rows]
  int32_t* positions;         // [rows]
  int32_t* slot_mapping;      // [rows] block id * block_size + offset
  int32_t* logits_rows;       // [logits rows]
};

// Returns what does not fit together ("<field>: expected ..., got ..."), or "".
std::string check_step_shape(const StepShape& shape);

void virtual_padding(const StepShape& shape, const StepIndex& out);

}  // namespace fd
