// SPDX-License-Identifier: Apache-2.0
// Preloaded into a process, counts the blocks of a page or more that any of its threads asks of malloc and its kin.
#include <atomic>
#include <cerrno>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<long> num_large{0};

static void count(size_t size) {
  if (size >= 4096) num_large.fetch_add(1, std::memory_order_relaxed);
}

long num_large_allocations() { return num_large.load(); }

void* malloc(size_t size) {
  count(size);
  return __libc_malloc(size);
}

void* calloc(size_t num, size_t size) {
  count(num * size);
  return __libc_calloc(num, size);
}

void* realloc(void* block, size_t size) {
  count(size);
  return __libc_realloc(block, size);
}

void* memalign(size_t alignment, size_t size) {
  count(size);
  return __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** block, size_t alignment, size_t size) {
  *block = memalign(alignment, size);
  return *block == nullptr ? ENOMEM : 0;
}
}
