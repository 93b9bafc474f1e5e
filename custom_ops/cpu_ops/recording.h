// SPDX-License-Identifier: Apache-2.0
// A list of kernel launches that is made once and replayed by one call: the CPU's counterpart of a CUDA graph. A call
// through Paddle costs about 10 us, a hundred calls of a step more than the arithmetic of a small model.
//
// Bindings hand their checked arguments to launch(). On a thread that is recording, launch() keeps them; otherwise it
// performs them. perform() checks what lies in the tensors (ids, positions, slots) each time, recorded or not.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "cpu_ops/kernels.h"

namespace fd {

// out[ids[m], :] = x[m, :]
struct ScatterArgs {
  const int32_t* ids;
  const void* x;
  void* out;
  int64_t rows, row_bytes;
  int64_t out_rows;  // ids lie in 0..out_rows-1
};

using Launch = std::variant<LinearArgs, QuantizedLinearArgs, RmsNormArgs, GatherArgs, ScatterArgs, AttentionArgs>;

// Every launch is recorded with the most rows and sequences that a replay may ask for.
struct Recording {
  std::vector<Launch> launches;
};

void perform(const Launch& launch);

// Keeps the launch if this thread records, otherwise performs it.
void launch(const Launch& launch);

// Performs all launches for the first num_rows rows and num_seqs sequences.
void replay(const Recording& recording, int64_t num_rows, int64_t num_seqs);

// As replay, up to the last launch that writes keys and values: for rows whose outputs nobody reads.
void replay_caches(const Recording& recording, int64_t num_rows, int64_t num_seqs);

}  // namespace fd
