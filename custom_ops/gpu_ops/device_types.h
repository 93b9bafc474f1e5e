// SPDX-License-Identifier: Apache-2.0
// Values that the functions of `device.h` take and return.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fd::gpu {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// Sixteen bytes, which memory instructions move at once; addresses must be multiples of 16.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

// Four 8 x 8 matrices of 16-bit elements as `load_matrix_x4` spreads them over a warp.
struct Matrices4 {
  uint32_t word[4];
};

}  // namespace fd::gpu
