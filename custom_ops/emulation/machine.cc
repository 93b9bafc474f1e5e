// SPDX-License-Identifier: Apache-2.0
#include "emulation/machine.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/export.h"
#include "emulation/block.h"

namespace fd::gpu::emulation {

Launch::Launch(const void* kernel, Dim3 grid, unsigned block_size, size_t shared_bytes, Entry entry, const void* call,
               size_t call_bytes)
    : kernel(kernel),
      grid(grid),
      block_size(block_size),
      shared_bytes(shared_bytes),
      entry(entry),
      call(static_cast<const unsigned char*>(call), static_cast<const unsigned char*>(call) + call_bytes) {}

void Launch::add_buffer(const void* data, size_t bytes, Access access) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  if (bytes > 0) buffers.push_back({begin, begin + bytes, access});
}

Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

std::string Machine::find_broken_limit(const Launch& launch) const {
  if (launch.block_size == 0 || launch.block_size % kWarpSize != 0 || launch.block_size > card_.max_block_size)
    return "a block has whole warps and at most " + std::to_string(card_.max_block_size) + " threads, got " +
           std::to_string(launch.block_size);
  if (launch.grid.x == 0 || launch.grid.y == 0 || launch.grid.z == 0) return "the grid is empty";
  if (launch.grid.x > 0x7FFFFFFFu || launch.grid.y > card_.max_grid_yz || launch.grid.z > card_.max_grid_yz)
    return "the y and z of a grid are at most " + std::to_string(card_.max_grid_yz) + ", and x less than 2^31, got (" +
           std::to_string(launch.grid.x) + ", " + std::to_string(launch.grid.y) + ", " + std::to_string(launch.grid.z) +
           ")";
  if (launch.shared_bytes > card_.max_shared_bytes)
    return "a block has at most " + std::to_string(card_.max_shared_bytes) + " bytes of shared memory, got " +
           std::to_string(launch.shared_bytes);
  return "";
}

int Machine::run(const Launch& launch) {
  launch_ = &launch;
  block_index_ = {0, 0, 0};
  if (const std::string broken = find_broken_limit(launch); !broken.empty()) {
    fault = function_of(launch.kernel) + ": " + broken;
    return 1;
  }
  if (num_stacks_ < launch.block_size) {
    stacks_ = map_stacks(card_.max_block_size);
    num_stacks_ = card_.max_block_size;
  }
  const uint64_t num_blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  random_.seed(seed + static_cast<uint64_t>(counters.launches));
  arrays_.clear();
  if (has_checks) {
    for (const Buffer& buffer : launch.buffers)
      arrays_.emplace_back(buffer.begin, buffer.end - buffer.begin, buffer.access);
    order_.begin(static_cast<uint32_t>(num_blocks));
  }
  shared_bytes_.resize(launch.shared_bytes + 128);
  shared_ = shared_bytes_.data() + (128 - reinterpret_cast<uintptr_t>(shared_bytes_.data()) % 128) % 128;
  shared_shadow_ =
      std::make_unique<Shadow>(reinterpret_cast<uintptr_t>(shared_), launch.shared_bytes, Access::kScratch);
  std::vector<uint64_t> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random_);
  ++counters.launches;
  LargestBlock& largest = largest_blocks[launch.kernel];
  largest.threads = std::max(largest.threads, launch.block_size);
  largest.shared_bytes = std::max(largest.shared_bytes, launch.shared_bytes);
  fault.clear();
  for (const uint64_t index : blocks) {
    begin_block(index);
    run_block();
    if (!fault.empty()) return 1;
  }
  return 0;
}

void Machine::begin_block(uint64_t index) {
  const Dim3 grid = launch_->grid;
  block_number_ = static_cast<uint32_t>(index);
  block_index_ = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                  static_cast<unsigned>(index / grid.x / grid.y)};
  ++counters.blocks;
  threads_.clear();
  threads_.resize(launch_->block_size);
  warps_.assign(launch_->block_size / kWarpSize, Warp{});
  runnable_.clear();
  barriers_ = num_at_barrier_ = num_ended_ = 0;
  std::memset(shared_, kPoison, launch_->shared_bytes);
  shared_shadow_->clear();
  for (unsigned i = 0; i < launch_->block_size; ++i) {
    // Stack tops lie apart by a few cache lines more than the stacks do, or all of them would share the same lines.
    const size_t top = (launch_->call.size() + 63) / 64 * 64 + 64 * (i % 64);
    unsigned char* stack = stacks_ + i * kStackBytes;
    prepare(threads_[i].fiber, stack, top, &Machine::enter, this);
    std::memcpy(stack + kStackBytes - top, launch_->call.data(), launch_->call.size());
    threads_[i].groups.emplace_back();
    runnable_.push_back(static_cast<uint16_t>(i));
  }
}

void Machine::enter(void* argument) {
  Machine& self = *static_cast<Machine*>(argument);
  const unsigned index = self.thread_index();
  const size_t top = (self.launch_->call.size() + 63) / 64 * 64 + 64 * (index % 64);
  self.launch_->entry(self.stacks_ + index * kStackBytes + kStackBytes - top);
  for (const auto& group : self.current_->groups)
    if (!group.empty()) self.fail("ends with asynchronous copies that nobody waits for", {});
  if (self.num_at_barrier_ > 0) self.fail("ends while other threads wait at a barrier", {});
  ++self.num_ended_;
  self.pause(Wait::kEnded, {});
  __builtin_unreachable();
}

Thread* Machine::choose() {
  if (runnable_.empty()) return nullptr;
  const size_t chosen = random_() % runnable_.size();
  Thread& thread = threads_[runnable_[chosen]];
  runnable_[chosen] = runnable_.back();
  runnable_.pop_back();
  return &thread;
}

void Machine::run_block() {
  while (fault.empty()) {
    Thread* thread = choose();
    if (thread == nullptr) {
      if (num_ended_ < threads_.size()) fault = describe_deadlock();
      break;
    }
    resume(*thread);
  }
  groups_.finish(counters);
}

void Machine::resume(Thread& thread) {
  thread.wait = Wait::kNothing;
  current_ = &thread;
  switch_fiber(host_, thread.fiber);
  current_ = nullptr;
}

void Machine::pause(Wait wait, Location at) {
  Thread& thread = *current_;
  thread.wait = wait;
  thread.at = at;
  switch_fiber(thread.fiber, host_);
}

void Machine::fail(const std::string& what, const Location& at) {
  const Dim3 b = block_index_;
  fault = function_of(launch_->kernel) + ": block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
          std::to_string(b.z) + "), thread " + std::to_string(thread_index()) +
          (at.line ? std::string(", ") + at.file + ":" : "") + (at.line ? std::to_string(at.line) : "") + ": " + what;
  pause(Wait::kEnded, at);
  __builtin_unreachable();  // nothing resumes the threads of a launch that has failed
}

std::string Machine::describe_deadlock() const {
  std::string text = function_of(launch_->kernel) + ": block (" + std::to_string(block_index_.x) + ", " +
                     std::to_string(block_index_.y) + ", " + std::to_string(block_index_.z) +
                     "): threads wait forever:";
  for (unsigned i = 0; i < threads_.size(); ++i) {
    const Thread& thread = threads_[i];
    if (thread.wait == Wait::kEnded) continue;
    text += " thread " + std::to_string(i) + " at " + thread.at.file + ":" + std::to_string(thread.at.line);
    text += thread.wait == Wait::kBlock ? " for its block" : " for its warp";
    break;
  }
  return text + ", " + std::to_string(num_ended_) + " of " + std::to_string(threads_.size()) + " threads have ended";
}

void* Machine::shared_memory(size_t bytes, Location at) {
  if (bytes > launch_->shared_bytes)
    fail("needs " + std::to_string(bytes) + " bytes of shared memory, the launch has " +
             std::to_string(launch_->shared_bytes),
         at);
  return shared_;
}

static bool is_same(Location a, Location b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

void Machine::sync_block(Location at) {
  if (num_ended_ > 0) fail("waits at a barrier after other threads have ended", at);
  if (num_at_barrier_ == 0) barrier_at_ = at;
  if (!is_same(barrier_at_, at))
    fail(std::string("waits at another barrier than other threads, which wait at ") + barrier_at_.file + ":" +
             std::to_string(barrier_at_.line),
         at);
  if (++num_at_barrier_ < threads_.size()) {
    pause(Wait::kBlock, at);
    return;
  }
  ++barriers_;
  ++counters.barriers;
  num_at_barrier_ = 0;
  for (unsigned i = 0; i < threads_.size(); ++i)
    if (threads_[i].wait == Wait::kBlock) {
      threads_[i].wait = Wait::kNothing;
      runnable_.push_back(static_cast<uint16_t>(i));
    }
}

Thread& Machine::warp_operation(WarpOperation operation, Location at) {
  const unsigned first = thread_index() / kWarpSize * kWarpSize;
  Warp& warp = warps_[first / kWarpSize];
  Thread& self = *current_;
  if (warp.num_arrived == 0) {
    warp.operation = operation;
    warp.at = at;
  }
  for (unsigned i = first; i < first + kWarpSize && num_ended_ > 0; ++i)
    if (threads_[i].wait == Wait::kEnded)
      fail("takes part in an operation of its warp after other lanes have ended", at);
  if (warp.operation != operation || !is_same(warp.at, at))
    fail(std::string("takes part in another operation than lanes of its warp, which wait at ") + warp.at.file + ":" +
             std::to_string(warp.at.line),
         at);
  if (++warp.num_arrived < kWarpSize) {
    pause(Wait::kWarp, at);
    return self;
  }
  warp.num_arrived = 0;
  for (unsigned i = first; i < first + kWarpSize; ++i)
    if (threads_[i].wait == Wait::kWarp) {
      threads_[i].wait = Wait::kNothing;
      runnable_.push_back(static_cast<uint16_t>(i));
    }
  operation(&threads_[first]);
  return self;
}

void Machine::sync_warp(Location at) {
  warp_operation(
      [](Thread* lanes) {
        Machine& self = machine();
        ++self.warps_[static_cast<size_t>(lanes - self.threads_.data()) / kWarpSize].barriers;
      },
      at);
}

int run(const Launch& launch) { return machine().run(launch); }
const std::string& last_fault() { return machine().fault; }
Counters& counters() { return machine().counters; }
void configure(uint64_t seed, bool checks) {
  machine().seed = seed;
  machine().has_checks = checks;
}
void count_accesses(bool enabled) { machine().counts_accesses = enabled; }

unsigned thread_index() { return machine().thread_index(); }
unsigned block_size() { return machine().launch().block_size; }
Dim3 block_index() { return machine().block_index(); }
Dim3 grid_size() { return machine().launch().grid; }
void* shared_memory(size_t bytes, Location at) { return machine().shared_memory(bytes, at); }
void sync_block(Location at) { machine().sync_block(at); }
void sync_warp(Location at) { machine().sync_warp(at); }
void copy_async16(void* shared, const void* global, bool is_valid, Location at) {
  machine().copy_async({shared, global, is_valid}, at);
}
void copy_async_commit() { machine().commit_copies(); }
void copy_async_wait(int num_pending) { machine().wait_copies(num_pending); }
void atomic_add(int32_t* counter, int32_t value, Location at) {
  machine().check_atomic(counter, sizeof(*counter), at);
  *counter += value;
}
void atomic_add(uint64_t* counter, uint64_t value, Location at) {
  machine().check_atomic(counter, sizeof(*counter), at);
  *counter += value;
}
void atomic_or(uint32_t* word, uint32_t bits, Location at) {
  machine().check_atomic(word, sizeof(*word), at);
  *word |= bits;
}
bool last_block(int32_t* counter, int32_t count, Location at) { return machine().last_block(counter, count, at); }

}  // namespace fd::gpu::emulation

FD_EXPORT void fd_emulation_configure(uint64_t seed, int checks) { fd::gpu::emulation::configure(seed, checks != 0); }
FD_EXPORT const char* fd_emulation_fault() { return fd::gpu::emulation::last_fault().c_str(); }
// Writes the first `count` counters, in the order of struct Counters.
FD_EXPORT void fd_emulation_counters(int64_t* into, int64_t count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(int64_t);
  std::memcpy(into, &fd::gpu::emulation::counters(), std::min(bytes, sizeof(fd::gpu::emulation::Counters)));
}
FD_EXPORT void fd_emulation_count_accesses(int enabled) { fd::gpu::emulation::count_accesses(enabled != 0); }
FD_EXPORT void fd_emulation_reset_counters() { fd::gpu::emulation::counters() = {}; }
// Returns a line per kernel that this host thread has launched: the largest numbers of threads and of bytes of shared
// memory that a block had, and the kernel's signature.
FD_EXPORT const char* fd_emulation_launches() {
  static thread_local std::string text;
  text.clear();
  for (const auto& [kernel, block] : fd::gpu::emulation::machine().largest_blocks)
    text += std::to_string(block.threads) + " " + std::to_string(block.shared_bytes) + " " +
            fd::gpu::emulation::signature_of(kernel) + "\n";
  return text.c_str();
}
