// SPDX-License-Identifier: Apache-2.0
#include "common/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace fd {
namespace {

// How long an idle thread polls for tiles before it sleeps. Waking a sleeping thread costs the caller 55 us on a
// virtual machine. At first the thread keeps its core: this covers the time between two operators of a replayed step.
constexpr auto kSpinTime = std::chrono::microseconds(50);
// After that it yields the core between polls, in particular to the API process: this covers the time between two
// steps.
constexpr auto kYieldTime = std::chrono::microseconds(1000);

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int affinity_count() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  return sched_getaffinity(0, sizeof(mask), &mask) == 0 ? std::max(1, CPU_COUNT(&mask)) : 1;
}

// Returns the container's processor quota in cores, or 0 if it has none (cgroup v2, then v1).
double cgroup_quota() {
  std::string quota;
  double period = 0;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  if (v2 >> quota >> period && quota != "max" && period > 0) return std::atof(quota.c_str()) / period;
  std::ifstream quota_v1("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period_v1("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double limit = 0;
  if (quota_v1 >> limit && period_v1 >> period && limit > 0 && period > 0) return limit / period;
  return 0;
}

int choose_num_threads() {
  if (const char* wanted = std::getenv("FD_NUM_THREADS"); wanted != nullptr && *wanted != '\0') {
    char* end = nullptr;
    const long count = std::strtol(wanted, &end, 10);
    if (*end != '\0' || count < 1 || count > 1024)
      throw std::invalid_argument(std::string("FD_NUM_THREADS: expected 1..1024, got '") + wanted + "'");
    return static_cast<int>(count);
  }
  const double quota = cgroup_quota();
  const int cores = affinity_count();
  return quota > 0 ? std::min(cores, static_cast<int>(std::ceil(quota))) : cores;
}

// Runs one job at a time. `cursor_` holds the number of the job (high half) and its unclaimed tiles (low half).
// Claiming a tile by compare-and-swap therefore also proves that the job has not ended, so its fields may be read.
class Pool {
 public:
  explicit Pool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) std::thread([this] { work(); }).detach();
  }

  bool try_acquire() { return !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }
  bool is_busy() const { return busy_.load(std::memory_order_relaxed); }

  void run(int64_t num_tiles, void (*tile)(void*, int64_t), void* context) {
    tile_ = tile;
    context_ = context;
    num_tiles_ = num_tiles;
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t number = (cursor_.load(std::memory_order_relaxed) >> 32) + 1;
    cursor_.store(number << 32 | static_cast<uint64_t>(num_tiles));
    if (num_sleeping_.load() > 0) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
      }
      wake_.notify_all();
    }
    run_claimed_tiles();
    for (int spins = 0; num_done_.load(std::memory_order_acquire) != num_tiles; ++spins) {
      if (spins < 4096) {
        pause_cpu();
      } else {
        sched_yield();
      }
    }
  }

 private:
  bool has_tiles() const { return static_cast<uint32_t>(cursor_.load()) != 0; }

  void run_claimed_tiles() {
    uint64_t cursor = cursor_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(cursor) != 0) {
      if (!cursor_.compare_exchange_weak(cursor, cursor - 1, std::memory_order_acq_rel)) continue;
      tile_(context_, num_tiles_ - static_cast<uint32_t>(cursor));
      num_done_.fetch_add(1, std::memory_order_release);
      cursor = cursor_.load(std::memory_order_acquire);
    }
  }

  bool spin_for_tiles() const {
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (has_tiles()) return true;
        pause_cpu();
      }
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (waited > kYieldTime) return false;
      if (waited > kSpinTime) sched_yield();
    }
  }

  void work() {
    for (;;) {
      run_claimed_tiles();
      if (spin_for_tiles()) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      num_sleeping_.fetch_add(1);
      wake_.wait(lock, [this] { return has_tiles(); });
      num_sleeping_.fetch_sub(1);
    }
  }

  alignas(64) std::atomic<uint64_t> cursor_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<bool> busy_{false};
  void (*tile_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t num_tiles_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::atomic<Pool*> shared_pool{nullptr};
std::mutex creation;

// The pool is never destroyed, because its threads may outlive main. A forked child inherits no threads and creates a
// new pool.
Pool& pool() {
  if (Pool* existing = shared_pool.load(std::memory_order_acquire)) return *existing;
  std::lock_guard<std::mutex> lock(creation);
  if (shared_pool.load() == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { shared_pool.store(nullptr); });
    (void)registered;
    shared_pool.store(new Pool(num_threads()));
  }
  return *shared_pool.load();
}

}  // namespace

int num_threads() {
  static const int count = choose_num_threads();
  return count;
}

int num_free_threads() { return num_threads() == 1 || pool().is_busy() ? 1 : num_threads(); }

void run_tiles(int64_t num_tiles, void (*tile)(void*, int64_t), void* context) {
  if (num_tiles <= 0) return;
  Pool* shared = num_threads() > 1 && num_tiles > 1 && num_tiles < (int64_t{1} << 32) ? &pool() : nullptr;
  if (shared == nullptr || !shared->try_acquire()) {
    for (int64_t i = 0; i < num_tiles; ++i) tile(context, i);
    return;
  }
  shared->run(num_tiles, tile, context);
  shared->release();
}

}  // namespace fd
