// SPDX-License-Identifier: Apache-2.0
#include "emulation/fibers.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace fd::gpu::emulation {

#ifdef __x86_64__

// Saves the registers that a call preserves on the running stack, and takes those of the other one from there.
extern "C" void fd_switch_stack(void** from, void* to);
extern "C" void fd_begin_fiber();
asm(R"(
.text
.globl fd_switch_stack
.type fd_switch_stack, @function
fd_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size fd_switch_stack, .-fd_switch_stack
.globl fd_begin_fiber
.type fd_begin_fiber, @function
fd_begin_fiber:
    movq %r12, %rdi
    callq *%r13
    ud2
.size fd_begin_fiber, .-fd_begin_fiber
)");

void prepare(Fiber& fiber, unsigned char* stack, size_t top_bytes, void (*entry)(void*), void* argument) {
  fiber.stack = stack;
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + kStackBytes - top_bytes) & ~uintptr_t{15};
  // r15, r14, r13, r12, rbx, rbp, then the address to return to; at that point the stack must be 16-byte aligned.
  void** frame = reinterpret_cast<void**>(top) - 7;
  std::memset(frame, 0, 7 * sizeof(void*));
  frame[2] = reinterpret_cast<void*>(entry);
  frame[3] = argument;
  frame[6] = reinterpret_cast<void*>(&fd_begin_fiber);
  fiber.stack_pointer = frame;
}

void switch_fiber(Fiber& from, Fiber& to) { fd_switch_stack(&from.stack_pointer, to.stack_pointer); }

#else
#error "The emulator has no way to switch stacks on this processor yet."
#endif

unsigned char* map_stacks(size_t count) {
  void* memory =
      mmap(nullptr, count * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return static_cast<unsigned char*>(memory);
}

}  // namespace fd::gpu::emulation
