// SPDX-License-Identifier: Apache-2.0
// Rows of tensors as GGUF files store them. The caller has checked that they lie in memory as described.
#pragma once

#include <cstdint>

namespace fd::ggml {

// The fields are in the order of fastdeploy/ops/ggml_blocks.py.
struct StoredRows {
  const uint8_t* data;
  const int64_t* rows;  // which rows are read, in order; null: all of them
  int64_t num_rows;
  int64_t row_stride;  // bytes from a row to the next one
  int64_t num_inputs;  // values of a row
  int64_t type_id;     // ggml's number of the type

  const uint8_t* row(int64_t index) const { return data + (rows == nullptr ? index : rows[index]) * row_stride; }
};

}  // namespace fd::ggml
