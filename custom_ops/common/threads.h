// SPDX-License-Identifier: Apache-2.0
// A pool of threads of our own: Paddle's process already holds two OpenMP runtimes that would fight over the cores.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fd {

// Threads that share the work, the caller included: FD_NUM_THREADS, or the smaller of the affinity mask and the
// container's processor quota. Throws std::invalid_argument when FD_NUM_THREADS is not a positive number.
int num_threads();

// Threads that would share work which is handed out now: 1 inside a tile, or while another thread is using the pool.
int num_free_threads();

// Calls tile(context, i) once for each i in [0, num_tiles), on any thread and in any order, and returns when all are
// done. Tiles are handed out one by one, so a thread that the system has paused holds back at most one tile. A call
// from inside a tile, or while another thread is using the pool, runs on the calling thread alone. Tiles must not
// throw.
void run_tiles(int64_t num_tiles, void (*tile)(void* context, int64_t index), void* context);

// As run_tiles for a callable object. `parallel` false runs inline: for jobs shorter than waking a thread (about 2 us).
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
