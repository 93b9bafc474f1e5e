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

using Launch = std::variant<LinearArgs, QuantizedLinearArgs, RmsNormArgs, GatherArgs, AttentionArgs>;

// Every launch is recorded with the most rows and sequences that a replay may ask for.
struct Recording {
  std::vector<Launch> launches;
};

void perform(const Launch& launch);

// Keeps the launch if this thread records, otherwise performs it.
void launch(const Launch& launch);

}  // namespace fd
