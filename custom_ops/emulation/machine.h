// SPDX-License-Identifier: Apache-2.0
// Executes GPU kernels on a CPU. The threads of a block are fibers of one host thread, which switch only at barriers
// and operations of a warp. Blocks run in a random order, and the next fiber is drawn, both from FD_EMULATION_SEED:
// results must have the same bits for every seed. A fault ends the launch and is described in one line.
//
// With checks (kernels compiled with -fsanitize=thread, see hooks.cc) each access to memory is compared with those
// before it: see memory_check.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu_ops/device_types.h"

namespace fd::gpu::emulation {

constexpr size_t kMaxParameterBytes = 4096;

// Where a kernel calls an operation.
struct Location {
  const char* file = "";
  int line = 0;
};

enum class Access { kRead, kWrite, kScratch };

// An array in global memory that a kernel may use.
struct Buffer {
  uintptr_t begin, end;
  Access access;
};

// What is counted from one `reset_counters` to the next. Bytes only with checks, sectors and wavefronts of ordinary
// accesses only while `count_accesses`, because that takes time.
struct Counters {
  int64_t launches = 0, blocks = 0, barriers = 0, mma = 0;
  int64_t global_read_bytes = 0, global_written_bytes = 0;
  int64_t read_sectors = 0, written_sectors = 0;               // of 32 bytes, once per access of a warp
  int64_t matrix_wavefronts = 0, least_matrix_wavefronts = 0;  // of load_matrix_x4 in shared memory
  int64_t shared_wavefronts = 0, least_shared_wavefronts = 0;  // of all other loads and stores there
};

// One launch with its arguments.
class Launch {
 public:
  using Entry = void (*)(const void* call);

  // `kernel` is its address, from which faults find its name.
  Launch(const void* kernel, Dim3 grid, unsigned block_size, size_t shared_bytes, Entry entry, const void* call,
         size_t call_bytes);
  void add_buffer(const void* data, size_t bytes, Access access);

  const void* kernel;
  Dim3 grid;
  unsigned block_size;
  size_t shared_bytes;
  Entry entry;
  std::vector<unsigned char> call;
  std::vector<Buffer> buffers;
};

// The limits of the card that is emulated.
struct Card {
  size_t max_shared_bytes = 99 * 1024;
  unsigned max_block_size = 1024;
  unsigned max_grid_yz = 65535;
};

// Runs a launch now; returns 0, or 1 after a fault.
int run(const Launch& launch);
// Runs a launch in the order of its stream; a stream of null runs it now.
int submit(const Launch& launch, void* stream);

// Describes the last fault of this host thread in one line: kernel, block, thread, file:line, what.
const std::string& last_fault();
Counters& counters();
// Sets the seed of the order, and whether accesses are checked.
void configure(uint64_t seed, bool checks);
// Sets whether sectors and wavefronts are counted.
void count_accesses(bool enabled);

// For `device_emulated.h`: what a running kernel calls.
unsigned thread_index();
unsigned block_size();
Dim3 block_index();
Dim3 grid_size();
void* shared_memory(size_t bytes, Location at);
void sync_block(Location at);
void sync_warp(Location at);
uint32_t shuffle_xor(uint32_t value, unsigned mask, Location at);
uint32_t shuffle(uint32_t value, unsigned lane, Location at);
unsigned warp_ballot(bool predicate, Location at);
Bytes16 load16(const void* address, bool is_readonly, Location at);
void store16(void* address, Bytes16 value, Location at);
void copy_async16(void* shared, const void* global, bool is_valid, Location at);
void copy_async_commit();
void copy_async_wait(int num_pending);
Matrices4 load_matrix_x4(const void* row, bool is_transposed, Location at);
void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at);
void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at);
void mma_u8_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at);
void atomic_add(int32_t* counter, int32_t value, Location at);
void atomic_add(uint64_t* counter, uint64_t value, Location at);
void atomic_or(uint32_t* word, uint32_t bits, Location at);
bool last_block(int32_t* counter, int32_t count, Location at);

}  // namespace fd::gpu::emulation
