// SPDX-License-Identifier: Apache-2.0
// The thread pool of the CPU kernels. It does not use OpenMP, because a process with Paddle already holds two OpenMP
// runtimes, whose threads would compete for the cores.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/export.h"

namespace fd {

// Returns the number of threads, including the caller: FD_NUM_THREADS, or the smaller of the affinity mask and the
// container's processor quota. Throws std::invalid_argument when FD_NUM_THREADS is not a number from 1 to 1024.
FD_PUBLIC int num_threads();

// Returns how many threads would run tiles now: 1 inside a tile, or while another thread is using the pool.
int num_free_threads();

// Calls tile(context, i) once for each i in [0, num_tiles), on any thread and in any order, and returns when all calls
// have returned. Threads claim one tile at a time, so a thread that the system has preempted delays at most one tile. A
// call from inside a tile, or while another thread is using the pool, runs on the calling thread alone. Tiles must not
// throw.
FD_PUBLIC void run_tiles(int64_t num_tiles, void (*tile)(void* context, int64_t index), void* context);

// Does the same as run_tiles for a callable object. If `parallel` is false, the calling thread runs all tiles: for work
// that takes less time than waking a thread.
template <class Tile>
static inline void parallel_for(int64_t num_tiles, bool parallel, Tile&& tile) {
  if (!parallel || num_tiles <= 1) {
    for (int64_t i = 0; i < num_tiles; ++i) tile(i);
    return;
  }
  using Plain = std::remove_reference_t<Tile>;
  run_tiles(
      num_tiles, [](void* context, int64_t index) { (*static_cast<Plain*>(context))(index); },
      const_cast<void*>(static_cast<const void*>(&tile)));
}

}  // namespace fd
