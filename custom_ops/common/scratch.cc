// SPDX-License-Identifier: Apache-2.0
#include "common/scratch.h"

#include <cstdlib>
#include <new>

namespace fd {
namespace {

struct Area {
  void* data = nullptr;
  size_t size = 0;
  ~Area() { std::free(data); }
};

}  // namespace

void* thread_scratch(size_t bytes, Scratch use) {
  thread_local Area areas[3];
  Area& scratch = areas[static_cast<int>(use)];
  if (bytes > scratch.size) {
    const size_t size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    void* data = std::aligned_alloc(64, size);
    if (data == nullptr) throw std::bad_alloc();
    std::free(scratch.data);
    scratch.data = data;
    scratch.size = size;
  }
  return scratch.data;
}

}  // namespace fd
