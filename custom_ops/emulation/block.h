// SPDX-License-Identifier: Apache-2.0
// One block while it runs: its threads as fibers, its shared memory, its copies under way. Included by the emulator
// only.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "emulation/fibers.h"
#include "emulation/machine.h"
#include "emulation/memory_check.h"

namespace fd::gpu::emulation {

constexpr unsigned char kPoison = 0xFF;  // NaN as a float, -1 as an integer

enum class Wait : uint8_t { kNothing, kBlock, kWarp, kEnded };

// An asynchronous copy of 16 bytes.
struct Copy {
  void* shared;
  const void* global;
  bool is_valid;
};

struct Thread {
  Fiber fiber;
  Wait wait = Wait::kNothing;
  Location at;                            // of the operation that it waits in
  uint32_t in[12] = {}, out[4] = {};      // of an operation of its warp
  std::vector<std::vector<Copy>> groups;  // committed and not waited for; the last one is still open
};

// An operation of all lanes of a warp: it is carried out when the last one arrives.
using WarpOperation = void (*)(Thread* lanes);

struct Warp {
  unsigned num_arrived = 0;
  Location at;  // where the lanes that have arrived wait
  WarpOperation operation = nullptr;
  uint32_t barriers = 0;
};

// Counts sectors of global memory and wavefronts of shared memory per access of a warp: the n-th access of each lane at
// one place belongs together.
class AccessGroups {
 public:
  void add(unsigned thread, const void* place, bool is_write, bool is_shared, uintptr_t address, size_t bytes);
  // Adds what was accessed to the counters, and forgets it.
  void finish(Counters& counters);

 private:
  struct Key {
    const void* place;
    uint32_t who, turn;  // thread or warp, with the kind of access
    bool operator==(const Key& other) const { return place == other.place && who == other.who && turn == other.turn; }
  };
  struct Hash {
    size_t operator()(const Key& key) const {
      return reinterpret_cast<size_t>(key.place) * 31 + key.who * 1000003u + key.turn * 65537u;
    }
  };
  struct Part {
    unsigned lane;
    uintptr_t address;
    size_t bytes;
  };
  static int64_t count_sectors(const std::vector<Part>& parts);
  static void count_wavefronts(const std::vector<Part>& parts, Counters& counters);

  std::unordered_map<Key, std::vector<Part>, Hash> groups_;
  std::unordered_map<Key, uint32_t, Hash> turns_;
};

// The largest block that a kernel was launched with.
struct LargestBlock {
  unsigned threads = 0;
  size_t shared_bytes = 0;
};

// Runs the blocks of one launch after the other. There is one machine per host thread.
class Machine {
 public:
  int run(const Launch& launch);
  bool is_running() const { return current_ != nullptr; }

  // What the running thread asks for.
  const Launch& launch() const { return *launch_; }
  Dim3 block_index() const { return block_index_; }
  Thread& thread() { return *current_; }
  unsigned thread_index() const { return static_cast<unsigned>(current_ - threads_.data()); }
  void* shared_memory(size_t bytes, Location at);
  void sync_block(Location at);
  Thread& warp_operation(WarpOperation operation, Location at);
  void sync_warp(Location at);
  void copy_async(const Copy& copy, Location at);
  void commit_copies();
  void wait_copies(int num_pending);
  bool last_block(int32_t* counter, int32_t count, Location at);
  // Checks an atomic change of memory, which the caller carries out.
  void check_atomic(const void* counter, size_t bytes, Location at);
  // Checks and counts an access; `place` is where the kernel makes it: a code address, or a Location's file with its
  // line.
  void access(uintptr_t address, size_t bytes, bool is_write, bool is_readonly, const void* place, const Location* at);
  // Only checks it; returns what is known of the array, or null for a constant.
  Shadow* check(uintptr_t address, size_t bytes, bool is_write, bool is_readonly, const void* place,
                const Location* at);
  [[noreturn]] void fail(const std::string& what, const Location& at);

  bool has_checks = false, counts_accesses = false;
  uint64_t seed = 0;
  std::string fault;
  Counters counters;
  std::map<const void*, LargestBlock> largest_blocks;  // of each kernel

 private:
  std::string find_broken_limit(const Launch& launch) const;
  void begin_block(uint64_t index);
  void run_block();
  Thread* choose();
  void resume(Thread& thread);
  void pause(Wait wait, Location at);
  void release_block();
  std::string describe_deadlock() const;
  Accessor accessor() const;
  Shadow* find_shadow(uintptr_t address);
  bool is_private(uintptr_t address) const;
  void land(const Copy& copy);
  static void enter(void* thread);

  const Launch* launch_ = nullptr;
  Fiber host_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<uint16_t> runnable_;
  Thread* current_ = nullptr;
  unsigned char* stacks_ = nullptr;
  size_t num_stacks_ = 0;
  Dim3 block_index_;
  uint32_t block_number_ = 0;
  uint32_t barriers_ = 0;
  unsigned num_at_barrier_ = 0, num_ended_ = 0;
  Location barrier_at_;  // where threads wait at a barrier
  std::mt19937_64 random_;
  std::vector<unsigned char> shared_bytes_;
  unsigned char* shared_ = nullptr;
  std::vector<Shadow> arrays_;
  std::unique_ptr<Shadow> shared_shadow_;
  BlockOrder order_;
  AccessGroups groups_;
  Card card_;
};

Machine& machine();

// Returns whether an address is in a library's constants.
bool is_constant(uintptr_t address);

// Returns "file:line" of a code address, by addr2line.
std::string source_of(const void* code);
// Returns the function at an address with its namespaces and parameters, by addr2line.
std::string signature_of(const void* code);
// Returns only its name, with template arguments.
std::string function_of(const void* code);

}  // namespace fd::gpu::emulation
