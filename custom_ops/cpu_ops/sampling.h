// SPDX-License-Identifier: Apache-2.0
// Samples tokens from rows of fp32 logits: logit_bias, then repetition, presence and frequency penalties, banned ids,
// mask, temperature, top_k, top_p, min_p, and finally argmax(logit + Gumbel noise) over the allowed set.
#pragma once

#include <cstdint>
#include <string>

#include "common/sampling.h"

namespace fd {

// The contents of a SamplingBatch: one row of parameters per row of logits, and lists of which rows use ranges.
struct SamplingInputs {
  const float* float_params;  // [num_rows, kNumFloatParams]
  const int64_t* int_params;  // [num_rows, kNumIntParams]
  const int32_t* history;     // [num_history] token ids of prompts and outputs
  const int32_t* bias_ids;    // [num_bias]
  const float* bias_values;   // [num_bias]
  const int32_t* banned_ids;  // [num_banned]
  const int32_t* mask_words;  // [num_mask_words] masks of 32 ids per word, lowest bit first: 1 allows an id
  int64_t num_history, num_bias, num_banned, num_mask_words;
  // [num_rows, num_blocks(vocab_size)] the largest logit of each block, or NaN if the block contains NaN, precomputed
  // by the kernel that wrote the logits; or null.
  const float* block_maxima = nullptr;
};

struct SamplingOutputs {
  int32_t* token_ids;         // [num_rows] -1 unless status is kRowOk
  int32_t* status;            // [num_rows] RowStatus
  uint8_t* draft_is_allowed;  // [num_rows] 1 if the draft of the row is in its allowed set
};

struct LogprobOutputs {
  float* chosen_logprob;  // [num_rows]
  int32_t* chosen_rank;   // [num_rows] 1 for the most probable id
  int32_t* top_ids;       // [num_rows, stride], of which the first top_n of each row are written
  float* top_logprobs;    // [num_rows, stride]
  int64_t stride;
};

// Returns "" or what is wrong with the ranges of a row.
std::string check_sampling_inputs(const SamplingInputs& in, int64_t num_rows, int64_t vocab_size);

// Samples every row of logits [num_rows, vocab_size]. Logits are restored afterwards or, with keep_processed, replaced
// by the processed logits: with biases, penalties and masks, divided by the temperature, -inf for ids outside the
// allowed set. In greedy rows only masked and banned ids and those from vocab_limit on become -inf.
//
// With `stop_at_rejections`, a row with a draft is followed by the row that verifies the next token. Rows after one
// whose token differs from its draft are not sampled (kRowSkipped); with keep_processed their logits are undefined.
void sample(float* logits, int64_t num_rows, int64_t vocab_size, const SamplingInputs& in, const SamplingOutputs& out,
            bool keep_processed, bool stop_at_rejections);

// Log-probabilities under softmax(logits[rows[i]]) of chosen[i] and of the top_n most probable ids.
void logprobs(const float* logits, int64_t vocab_size, const int32_t* rows, const int32_t* chosen, int64_t num_rows,
              int32_t top_n, const LogprobOutputs& out);

}  // namespace fd
