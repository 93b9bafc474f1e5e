// SPDX-License-Identifier: Apache-2.0
// A list of kernel launches that is captured once and replayed by one call: the CPU counterpart of a CUDA graph. A call
// through Paddle costs about 10 us, and the hundred calls of a step take longer than the arithmetic of a small model.
//
// Bindings pass their checked arguments to launch(). On a thread that captures, launch() stores them; otherwise it runs
// the kernel. perform() runs a kernel; it checks the contents of tensors (ids, positions, slots, ranges) every time.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "cpu_ops/experts.h"
#include "cpu_ops/latent_attention.h"
#include "cpu_ops/sampling.h"
#include "cpu_ops/verify.h"
#include "cpu_ops/virtual_padding.h"

namespace fd {

constexpr int64_t kAsScheduled = -1;

// Computes the index arrays of a step.
struct VirtualPaddingArgs {
  StepShape shape;
  StepIndex out;
  int64_t rows;  // must be the sum of num_scheduled, unless it is kAsScheduled
};

struct SampleArgs {
  float* logits;  // [rows, vocab_size]
  int64_t rows, vocab_size;
  SamplingInputs in;
  SamplingOutputs out;
  bool keep_processed, stop_at_rejections;
};

// Verifies the drafts of num_seqs requests, whose rows are among the first `rows`.
struct VerifyDraftsArgs {
  VerifyRule rule;
  const int32_t* target;
  const int64_t* int_params;  // [rows, kNumIntParams], as in SamplingInputs
  const uint8_t* draft_is_allowed;
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
  int64_t out_rows;  // ids must be in 0..out_rows-1
};

// out[m, ids[i]] = x[m, i], and minus infinity in the other columns of out
struct ScatterLogitsArgs {
  const float* x;  // [rows, num_ids]
  const int32_t* ids;
  float* out;  // [rows, vocab_size]
  int64_t rows, num_ids, vocab_size;
};

// out = GELU(x / sqrt(mean(x^2) + eps) * weight + bias) of rows, with the error function
struct NormGeluArgs {
  const void* x;       // Float [rows, size]
  const void* weight;  // Float [size]
  const void* bias;    // Float [size]
  void* out;           // Float [rows, size], may be x
  int64_t rows, size;
  float eps;
  DType dtype;
};

using Launch =
    std::variant<LinearArgs, QuantizedLinearArgs, RmsNormArgs, NormGeluArgs, GatherArgs, QuantizedGatherArgs,
                 ScatterArgs, ScatterLogitsArgs, AttentionArgs, VirtualPaddingArgs, SampleArgs, VerifyDraftsArgs,
                 LatentAttentionArgs, RouteArgs, ExpertsUpArgs, ExpertsDownArgs, ProjectHeadsArgs>;

// Each launch is captured with the maximum numbers of rows and sequences of a replay.
struct OpGraph {
  std::vector<Launch> launches;
  std::vector<std::unique_ptr<float[]>> block_maxima;  // memory for LinearArgs::block_maxima of the launches
};

// If the last launch is a linear layer that writes these logits [rows, vocab_size], makes it write the block maxima as
// well, so that sampling need not read all logits again. Returns where it writes them, or null.
const float* attach_block_maxima(OpGraph& graph, const float* logits, int64_t vocab_size);

// Runs the kernel of a launch.
void perform(const Launch& launch);

// Captures the launch if this thread is capturing; otherwise performs it.
void launch(const Launch& launch);

// Returns the launch with other numbers of rows and sequences. Raises if they exceed the captured ones.
Launch resized(const Launch& launch, int64_t num_rows, int64_t num_seqs);

// Performs all launches for the first num_rows rows and num_seqs sequences.
void replay(const OpGraph& graph, int64_t num_rows, int64_t num_seqs);

// Performs the launches up to the last one that writes a cache: for rows whose outputs are not needed.
void replay_caches(const OpGraph& graph, int64_t num_rows, int64_t num_seqs);

}  // namespace fd
