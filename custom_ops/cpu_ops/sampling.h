// SPDX-License-Identifier: Apache-2.0
// Choosing tokens from rows of fp32 logits by one rule: logit_bias, then repetition, presence and frequency penalties,
// then banned ids and the mask, temperature, top_k, top_p, min_p, then argmax(logit + noise) over the ids that survive.
#pragma once

#include <cstdint>
#include <string>

#include "common/sampling.h"

namespace fd {

// What SamplingBatch holds: one row of parameters per row of logits, and lists that rows point into.
struct SamplingInputs {
  const float* float_params;  // [num_rows, kNumFloatParams]
  const int64_t* int_params;  // [num_rows, kNumIntParams]
  const int32_t* history;     // [num_history] token ids of prompts and outputs
  const int32_t* bias_ids;    // [num_bias]
  const float* bias_values;   // [num_bias]
  const int32_t* banned_ids;  // [num_banned]
  const int32_t* mask_words;  // [num_mask_words] masks of 32 ids a word, lowest bit first: 1 for ids that may survive
  int64_t num_history, num_bias, num_banned, num_mask_words;
  // [num_rows, num_blocks(vocab_size)] the largest logit of each block, NaN where there is one, as whoever wrote the
  // logits has seen them; or null.
  const float* block_maxima = nullptr;
};

struct SamplingOutputs {
  int32_t* token_ids;       // [num_rows] -1 unless status is kRowOk
  int32_t* status;          // [num_rows] RowStatus
  uint8_t* draft_survives;  // [num_rows] 1 if the row's draft is in its surviving set
};

struct LogprobOutputs {
  float* chosen_logprob;  // [num_rows]
  int32_t* chosen_rank;   // [num_rows] 1 for the most probable id
  int32_t* top_ids;       // [num_rows, stride], the first top_n of each row are written
  float* top_logprobs;    // [num_rows, stride]
  int64_t stride;
};

// Returns what is wrong with a row's ranges, or "".
std::string check_sampling_inputs(const SamplingInputs& in, int64_t num_rows, int64_t vocab_size);

// Samples every row of logits [num_rows, vocab_size]. Logits come back as they were, or, with keep_processed, as the
// rule left them: biases, penalties and masks applied, divided by the temperature, -inf for ids that do not survive.
// A greedy row has no temperature and no filters: only its masked ids and those beyond vocab_limit become -inf.
//
// Where `stop_at_rejections`, a row with a draft is followed by the row that the draft would lead to. Rows behind one
// whose token is not its draft are nobody's: they are not chosen (kRowSkipped), and with keep_processed their logits
// may be anything.
void sample(float* logits, int64_t num_rows, int64_t vocab_size, const SamplingInputs& in, const SamplingOutputs& out,
            bool keep_processed, bool stop_at_rejections);

// Log-probabilities under softmax(logits[rows[i]]) of chosen[i] and of the top_n most probable ids.
void logprobs(const float* logits, int64_t vocab_size, const int32_t* rows, const int32_t* chosen, int64_t num_rows,
              int32_t top_n, const LogprobOutputs& out);

}  // namespace fd
