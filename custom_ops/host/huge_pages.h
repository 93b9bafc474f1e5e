// SPDX-License-Identifier: Apache-2.0
// Pages of 2 MiB for memory that is read here and there: with pages of 4 KiB, half of such a read is finding the page.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace fd {

constexpr uint64_t kHugePage = 2 << 20;

// Asks the system for huge pages wherever the memory holds whole ones; a system without them is as good, but slower.
inline void advise_huge_pages(void* memory, size_t num_bytes) {
  const uint64_t address = reinterpret_cast<uint64_t>(memory), end = (address + num_bytes) & ~(kHugePage - 1);
  const uint64_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace fd
