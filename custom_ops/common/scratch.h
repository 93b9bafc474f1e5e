// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace fd {

// Scratch memory that kernels reuse from call to call.

// The scratch areas of a thread: rows packed for all tiles of a launch, intermediate results of one tile, and rows or
// sums of a mixture of experts.
enum class Scratch { kRows = 0, kTile = 1, kExperts = 2 };

// Returns at least `bytes` of 64-byte aligned memory that belongs to the calling thread. It is valid until the thread's
// next call for the same area. An area only grows, so that nothing is allocated after warm-up.
void* thread_scratch(size_t bytes, Scratch use = Scratch::kRows);

}  // namespace fd
