// SPDX-License-Identifier: Apache-2.0
// Codes of linear layers that are packed into words of 32 bits and stored with the inputs first, as AWQ and GPTQ do.
// The caller has checked that they lie in memory as described.
#pragma once

#include <cstdint>

namespace fd::codes {

// Where the codes of a word belong. The numbers are those of fastdeploy/ops/code_words.py.
enum Order : int64_t {
  kAlongInputs = 0,   // words [inputs / codes of a word, outputs], the first input in the lowest bits
  kAlongOutputs = 1,  // words [inputs, outputs / codes of a word], the first output in the lowest bits
  kAwq = 2,           // the same with four bits and the outputs in the order 0, 2, 4, 6, 1, 3, 5, 7
};

// The fields are in the order of fastdeploy/ops/code_words.py.
struct CodeWords {
  const uint32_t* data;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t row_words;  // words from a row to the next one
  int64_t num_bits;   // of a code: 4 or 8
  int64_t order;
};

}  // namespace fd::codes
