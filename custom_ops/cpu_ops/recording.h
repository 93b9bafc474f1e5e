// SPDX-License-Identifier: Apache-2.0
// A list of kernel launches that is made once and replayed by one call: the CPU's counterpart of a CUDA graph. A call
// through Paddle costs about 10 us, a hundred calls of a step more than the arithmetic of a small model.
//
// Bindings hand their checked arguments to launch(). On a thread that is recording, launch() keeps them; otherwise it
// performs them. perform() checks what lies in the tensors (ids, positions, slots, ranges of rows and lists) each time,
// recorded or not.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "cpu_ops/kernels.h"
#include "cpu_ops/sampling.h"
#include "cpu_ops/verify.h"
#include "cpu_ops/virtual_padding.h"

namespace fd {

constexpr int64_t kAsScheduled = -1;

// The index arrays of a step.
struct VirtualPaddingArgs {
  StepShape shape;
  StepIndex out;
  int64_t rows;  // that num_scheduled must add up to, or kAsScheduled
};

struct SampleArgs {
  float* logits;  // [rows, vocab_size]
  int64_t rows, vocab_size;
  SamplingInputs in;
  SamplingOutputs out;
  bool keep_processed, stop_at_rejections;
};

// The walk over the drafts of num_seqs requests, whose rows lie among the first `rows`.
struct VerifyDraftsArgs {
  VerifyRule rule;
  const int32_t* target;
  const int32_t* drafts;      // or, where they are a column of SamplingInputs:
  const int64_t* int_params;  // null otherwise
  const uint8_t* survives;
  const int32_t* first_row;
  const int32_t* row_count;
  int32_t* num_accepted;
  int32_t* emitted;
  int64_t rows, num_seqs;
};

// out[ids[m], :] = x[m, :]
struct ScatterArgs {
  const int32_t* ids;
  const void* x;
  void* out;
  int64_t rows, row_bytes;
  int64_t out_rows;  // ids lie in 0..out_rows-1
};

using Launch = std::variant<LinearArgs, QuantizedLinearArgs, RmsNormArgs, GatherArgs, ScatterArgs, AttentionArgs,
                            VirtualPaddingArgs, SampleArgs, VerifyDraftsArgs>;

// Every launch is recorded with the most rows and sequences that a replay may ask for.
struct Recording {
  std::vector<Launch> launches;
  std::vector<std::unique_ptr<float[]>> block_maxima;  // of linear layers that tell them
};

// Lets the last launch, if it is a linear layer that writes these logits [rows, vocab_size], tell the largest of each
// block as it does so: sampling that follows at once does not read all logits again. Returns where (SamplingInputs), or
// null if it is not.
const float* tell_block_maxima(Recording& recording, const float* logits, int64_t vocab_size);

void perform(const Launch& launch);

// Keeps the launch if this thread records, otherwise performs it.
void launch(const Launch& launch);

// Returns the launch for other numbers of rows and sequences than those it was recorded with, which it refuses to
// exceed.
Launch resized(const Launch& launch, int64_t num_rows, int64_t num_seqs);

// Performs all launches for the first num_rows rows and num_seqs sequences.
void replay(const Recording& recording, int64_t num_rows, int64_t num_seqs);

// As replay, up to the last launch that writes keys and values: for rows whose outputs nobody reads.
void replay_caches(const Recording& recording, int64_t num_rows, int64_t num_seqs);

}  // namespace fd
