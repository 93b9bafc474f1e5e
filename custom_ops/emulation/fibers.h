// SPDX-License-Identifier: Apache-2.0
// Stacks that one host thread switches between.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fd::gpu::emulation {

constexpr size_t kStackBytes = 64 * 1024;

// One stack of execution; the host's own is a Fiber without a stack.
struct Fiber {
  void* stack_pointer = nullptr;
  unsigned char* stack = nullptr;
};

// Maps memory for the stacks of `count` fibers; it is never returned, because blocks reuse it.
unsigned char* map_stacks(size_t count);

// Prepares a fiber whose first switch calls `entry(argument)`, which must not return. `top_bytes` at the top of the
// stack are left to the caller, who finds them at `fiber.stack + kStackBytes - top_bytes`.
void prepare(Fiber& fiber, unsigned char* stack, size_t top_bytes, void (*entry)(void*), void* argument);

// Saves the running fiber in `from` and continues `to`.
void switch_fiber(Fiber& from, Fiber& to);

}  // namespace fd::gpu::emulation
