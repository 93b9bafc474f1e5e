// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace fd {

// Who uses a thread's scratch: rows packed for all tiles of a launch, or what one tile makes for itself.
enum class Scratch { kRows = 0, kTile = 1 };

// Returns 64-byte aligned memory of at least `bytes`, owned by the calling thread and kept until its next call for the
// same use: it grows during warm-up and is then handed out again and again.
void* thread_scratch(size_t bytes, Scratch use = Scratch::kRows);

}  // namespace fd
