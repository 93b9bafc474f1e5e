// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace fd {

// Returns 64-byte aligned memory of at least `bytes`, owned by the calling thread and kept until its next call: it
// grows during warm-up and is then handed out again and again.
void* thread_scratch(size_t bytes);

}  // namespace fd
