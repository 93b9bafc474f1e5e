// SPDX-License-Identifier: Apache-2.0
// The closed list of what a GPU kernel may use. nvcc gives each function a line of CUDA or PTX; g++ gives it a function
// of the emulator (emulation/), which executes the same kernels on a CPU and checks every access.
//
// A kernel is a function `FD_KERNEL void name(parameters)`. Its parameters are values, and `In<T>`, `Out<T>` or
// `Scratch<T>` for arrays in global memory, so that the emulator knows which memory it may touch. It is launched by
// `launch(...)` only. It contains no PTX, no static __shared__ arrays, no memcpy or memset, and calls no math library.
#pragma once

#include <type_traits>

#include "gpu_ops/errors.h"

#ifdef __CUDACC__
#include "gpu_ops/device_cuda.h"
#else
#include "emulation/device_emulated.h"
#endif

namespace fd::gpu {

// Thread within its warp, and warp within its block; blocks are one-dimensional.
FD_DEVICE unsigned lane_index() { return thread_index() % kWarpSize; }
FD_DEVICE unsigned warp_index() { return thread_index() / kWarpSize; }

template <class To, class From>
FD_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace fd::gpu
