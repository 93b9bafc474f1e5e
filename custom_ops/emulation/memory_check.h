// SPDX-License-Identifier: Apache-2.0
// Compares each access to memory with those before it in the same launch.
//
// Two accesses to the same bytes, of which one writes, must be ordered: in one thread, by a barrier of the block
// between them, or by a `sync_warp` if both threads are of one warp. Accesses of two blocks are ordered only by
// `last_block`: what others did before they arrived comes before what the last block does after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulation/machine.h"

namespace fd::gpu::emulation {

// Who accesses memory, and when: barriers of its block, and of its warp, that it has passed.
struct Accessor {
  uint32_t block;
  uint16_t thread;
  uint32_t barriers, warp_barriers;
};

// Which blocks have arrived at which counters, in order. What block `earlier` did after `num_arrivals` arrivals comes
// before what block `later` does now if `earlier` arrived after that at a counter at which `later` was the last.
class BlockOrder {
 public:
  void begin(uint32_t num_blocks);
  // Notes that a block has arrived at a counter; the last one sees what the others did before.
  void arrive(uint32_t block, const void* counter, bool is_last);
  bool is_before(uint32_t earlier, uint32_t num_arrivals, uint32_t later) const;
  uint32_t num_arrivals(uint32_t block) const { return static_cast<uint32_t>(counters_[block].size()); }

 private:
  std::vector<std::vector<const void*>> counters_;  // at which each block has arrived
  std::vector<std::vector<const void*>> last_at_;   // at which it was the last one
};

// What is known of two bytes.
struct Cell {
  uint32_t write_block = 0, read_block = 0;  // block + 1; 0: nobody; kSeveral: readers of several blocks
  uint32_t write_barriers = 0, write_warp_barriers = 0, read_barriers = 0, read_warp_barriers = 0;
  uint16_t writer = 0, reader = 0;  // threads; kSeveralLanes, kSeveralWarps: several readers since the last barrier
  uint8_t read_warp = 0;
  bool is_written = false;                         // in this launch
  bool is_copied = false;                          // an asynchronous copy is under way
  bool is_atomic = false;                          // changed by atomics in this launch; if shared, since a barrier
  uint32_t write_arrivals = 0, read_arrivals = 0;  // counters at which the block had arrived
};

// The cells of one array, or of a block's shared memory.
class Shadow {
 public:
  Shadow(uintptr_t begin, size_t bytes, Access access) : begin_(begin), bytes_(bytes), access_(access) {}
  bool contains(uintptr_t address) const { return address - begin_ < bytes_; }
  uintptr_t begin() const { return begin_; }
  uintptr_t end() const { return begin_ + bytes_; }
  Access access() const { return access_; }

  // Each returns what is wrong with the access, or an empty text.
  std::string read(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order, bool is_readonly);
  std::string write(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order);
  // Atomic changes of shared memory are ordered with other accesses by barriers; of global memory, by the next launch.
  std::string change_atomically(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order,
                                bool is_shared);
  std::string begin_copy(uintptr_t address, size_t bytes, const Accessor& who, const BlockOrder& order);
  void end_copy(uintptr_t address, size_t bytes, const Accessor& who);
  // Forgets everything, for the next block.
  void clear();

 private:
  Cell* cells(uintptr_t address) { return &cells_[(address - begin_) / 2]; }
  void allocate();
  std::string check_write(Cell& cell, const Accessor& who, const BlockOrder& order) const;
  void note_read(Cell& cell, const Accessor& who, const BlockOrder& order);

  uintptr_t begin_;
  size_t bytes_;
  Access access_;
  std::vector<Cell> cells_;
};

}  // namespace fd::gpu::emulation
