// SPDX-License-Identifier: Apache-2.0
// Counts of rows and sequences. A captured graph is launched for fewer rows than it was captured for, so every kernel
// reads how many there are from memory of the device; its grid covers the captured number.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

// A count as an operator takes it: at most `max`, and `*device` if that is not null.
struct Count {
  const int32_t* device;
  int32_t max;

  In<int32_t> array() const { return In<int32_t>(device, device == nullptr ? 0 : 1); }
};

// Returns the count in a kernel, whose parameters are `count.array()` and `count.max`.
FD_DEVICE int32_t read_count(In<int32_t> device, int32_t max) {
  if (device.data == nullptr) return max;
  const int32_t count = device.data[0];
  return count < max ? count : max;
}

}  // namespace fd::gpu
