// SPDX-License-Identifier: Apache-2.0
// Virtual padding: the rows of a step are packed request after request, and index arrays say which request each row
// belongs to.
#pragma once

#include <cstdint>
#include <string>

namespace fd {

struct StepShape {
  const int32_t* num_scheduled;  // [num_seqs] rows of each request
  const int32_t* num_computed;   // [num_seqs] tokens of each request that are in the cache
  const int32_t* num_logits;     // [num_seqs] how many of its last rows need logits
  const int32_t* num_blocks;     // [num_seqs] entries of its block table
  const int32_t* block_tables;   // [num_seqs, table_stride]
  int64_t num_seqs, table_stride, block_size, max_rows;
};

struct StepIndex {
  int32_t* totals;            // [2] number of rows, number of rows with logits
  int32_t* cu_seqlens_q;      // [num_seqs + 1]
  int32_t* cu_logits_rows;    // [num_seqs + 1]
  int32_t* kv_lens;           // [num_seqs] num_computed + num_scheduled
  int32_t* batch_id_per_row;  // [rows]
  int32_t* positions;         // [rows]
  int32_t* slot_mapping;      // [rows] block id * block_size + offset
  int32_t* logits_rows;       // [rows with logits]
};

// Returns "" or what is inconsistent: "<field>: expected ..., got ...".
std::string check_step_shape(const StepShape& shape);

void virtual_padding(const StepShape& shape, const StepIndex& out);

}  // namespace fd
