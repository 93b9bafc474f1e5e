// SPDX-License-Identifier: Apache-2.0
// Sums and extremes over the lanes of a warp. All lanes take part.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

FD_DEVICE uint64_t shuffle_xor64(uint64_t value, unsigned mask) {
  const uint32_t low = shuffle_xor(static_cast<uint32_t>(value), mask);
  const uint32_t high = shuffle_xor(static_cast<uint32_t>(value >> 32), mask);
  return uint64_t{high} << 32 | low;
}
FD_DEVICE uint64_t shuffle64(uint64_t value, unsigned lane) {
  const uint32_t low = shuffle(static_cast<uint32_t>(value), lane);
  const uint32_t high = shuffle(static_cast<uint32_t>(value >> 32), lane);
  return uint64_t{high} << 32 | low;
}

// Each of these returns the sum of the values of this lane and those before it.
FD_DEVICE int32_t sum_to_lane(int32_t value) {
  const unsigned lane = lane_index();
  for (unsigned distance = 1; distance < kWarpSize; distance *= 2) {
    const int32_t other = shuffle(value, lane < distance ? lane : lane - distance);
    if (lane >= distance) value += other;
  }
  return value;
}
FD_DEVICE uint64_t sum_to_lane(uint64_t value) {
  const unsigned lane = lane_index();
  for (unsigned distance = 1; distance < kWarpSize; distance *= 2) {
    const uint64_t other = shuffle64(value, lane < distance ? lane : lane - distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// Each of these returns its result in all lanes.
FD_DEVICE int32_t warp_sum(int32_t value) {
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}
FD_DEVICE uint64_t warp_sum(uint64_t value) {
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) value += shuffle_xor64(value, mask);
  return value;
}
FD_DEVICE float warp_max(float value) {
  for (unsigned mask = 1; mask < kWarpSize; mask *= 2) {
    const float other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace fd::gpu
