// SPDX-License-Identifier: Apache-2.0
// One lane of 32-bit arithmetic. philox.h, gumbel.h and sampling.h are templates over a type of lanes, so that scalar
// code, the vector paths (cpu_ops/sampling_lanes.h) and CUDA share one source. Integer operations are exact, float
// operations are correctly rounded, and products are fused only where `fma` is called: the bits are the same
// everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FD_RULE __host__ __device__ __forceinline__
#else
// Always inlined: a source compiled for one instruction-set path must not share a copy with another path.
#define FD_RULE __attribute__((always_inline)) inline
#endif

namespace fd {

struct ScalarLanes {
  static constexpr int kWidth = 1;
  using F = float;
  using U = uint32_t;
  using M = bool;

  static FD_RULE F set(float x) { return x; }
  static FD_RULE U set(uint32_t x) { return x; }
  static FD_RULE F add(F a, F b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);  // nvcc may fuse a + b with a product
#else
    return a + b;
#endif
  }
  static FD_RULE F mul(F a, F b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
  }
  static FD_RULE F div(F a, F b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
  }
  static FD_RULE F fma(F a, F b, F c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
  }
  static FD_RULE U bits(F a) {
    U r;
    memcpy(&r, &a, sizeof(r));
    return r;
  }
  static FD_RULE F from_bits(U a) {
    F r;
    memcpy(&r, &a, sizeof(r));
    return r;
  }
  static FD_RULE F to_float(U a) {
    return static_cast<float>(static_cast<int32_t>(a));
  }  // reads `a` as a signed integer
  static FD_RULE U add(U a, U b) { return a + b; }
  static FD_RULE U sub(U a, U b) { return a - b; }
  static FD_RULE U bit_and(U a, U b) { return a & b; }
  static FD_RULE U bit_xor(U a, U b) { return a ^ b; }
  template <int kCount>
  static FD_RULE U shift_left(U a) {
    return a << kCount;
  }
  template <int kCount>
  static FD_RULE U shift_right_signed(U a) {  // shifts in copies of the sign bit
    return static_cast<U>(static_cast<int32_t>(a) >> kCount);
  }
  static FD_RULE M is_negative(U a) { return static_cast<int32_t>(a) < 0; }
  static FD_RULE M greater(F a, F b) { return a > b; }
  static FD_RULE F select(M m, F yes, F no) { return m ? yes : no; }
  static FD_RULE void multiply_wide(U a, uint32_t b, U* high, U* low) {
    const uint64_t product = static_cast<uint64_t>(a) * b;
    *high = static_cast<uint32_t>(product >> 32);
    *low = static_cast<uint32_t>(product);
  }
};

}  // namespace fd
