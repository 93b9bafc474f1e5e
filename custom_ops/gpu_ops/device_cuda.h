// SPDX-License-Identifier: Apache-2.0
// `device.h` for nvcc: each function is a line of CUDA or PTX. Included by it only.
#pragma once

#include <cuda_runtime.h>

#include "gpu_ops/device_types.h"
#include "gpu_ops/errors.h"

#define FD_DEVICE __device__ __forceinline__
#define FD_KERNEL __global__ static
// Of a kernel, between `FD_KERNEL` and `void`: the most threads of a block, and the least number of blocks that
// registers must allow on a multiprocessor. Without it the compiler saves registers that nothing else could use.
#define FD_LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define FD_UNROLL _Pragma("unroll")    // before a loop whose number of iterations is a constant
#define FD_ROLLED _Pragma("unroll 1")  // before one that must not be unrolled, because registers would not suffice

namespace fd::gpu {

// Arrays in global memory. `In` is read, `Out` is written and may be read, `Scratch` is read only after it is written.
template <class T>
struct In {
  const T* data;
  In(const T* pointer, size_t) : data(pointer) {}
};
template <class T>
struct Out {
  T* data;
  Out(T* pointer, size_t) : data(pointer) {}
};
template <class T>
struct Scratch {
  T* data;
  Scratch(T* pointer, size_t) : data(pointer) {}
};

FD_DEVICE unsigned thread_index() { return threadIdx.x; }
FD_DEVICE unsigned block_size() { return blockDim.x; }
FD_DEVICE Dim3 block_index() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
FD_DEVICE Dim3 grid_size() { return {gridDim.x, gridDim.y, gridDim.z}; }

// The block's shared memory as one struct, as large as the launch says.
template <class T>
FD_DEVICE T& shared_memory() {
  extern __shared__ __align__(128) unsigned char fd_shared_bytes[];
  return *reinterpret_cast<T*>(fd_shared_bytes);
}

FD_DEVICE void sync_block() { __syncthreads(); }
FD_DEVICE void sync_warp() { __syncwarp(); }

template <class T>
FD_DEVICE T shuffle_xor(T value, unsigned mask) {
  return __shfl_xor_sync(kAllLanes, value, mask);
}
template <class T>
FD_DEVICE T shuffle(T value, unsigned lane) {
  return __shfl_sync(kAllLanes, value, lane);
}
FD_DEVICE unsigned warp_ballot(bool predicate) { return __ballot_sync(kAllLanes, predicate); }

FD_DEVICE Bytes16 load16(const void* address) {
  const uint4 v = *static_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}
// For memory that nothing writes during the launch.
FD_DEVICE Bytes16 load16_readonly(const void* address) {
  const uint4 v = __ldg(static_cast<const uint4*>(address));
  return {{v.x, v.y, v.z, v.w}};
}
FD_DEVICE void store16(void* address, Bytes16 v) {
  *static_cast<uint4*>(address) = make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]);
}

FD_DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Copies 16 bytes from global to shared memory, or zeros if not `is_valid`; they may be read after the wait for their
// group and a `sync_warp` or `sync_block`. Each thread commits and waits for its own groups.
FD_DEVICE void copy_async16(void* shared, const void* global, bool is_valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(is_valid ? 16 : 0)
               : "memory");
}
FD_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of this thread's groups are under way.
template <int kPending>
FD_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements: lane 8 i + r names row r of matrix i, and gets elements 2 (lane % 4)
// and the next of row lane / 4; transposed, of column lane / 4.
FD_DEVICE Matrices4 load_matrix_x4(const void* shared_row) {
  Matrices4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.word[0]), "=r"(m.word[1]), "=r"(m.word[2]), "=r"(m.word[3])
               : "r"(shared_address(shared_row))
               : "memory");
  return m;
}
FD_DEVICE Matrices4 load_matrix_x4_transposed(const void* shared_row) {
  Matrices4 m;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m.word[0]), "=r"(m.word[1]), "=r"(m.word[2]), "=r"(m.word[3])
               : "r"(shared_address(shared_row))
               : "memory");
  return m;
}

// c += a b for bfloat16 16 x 16 and 16 x 8, in fp32.
FD_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// c += a b for signed bytes 16 x 32 and 32 x 8, in int32.
FD_DEVICE void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same with unsigned bytes of a.
FD_DEVICE void mma_u8_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Counters, histograms and flags. What lies in global memory is read by a later launch only, what lies in shared memory
// after the next `sync_block`.
FD_DEVICE void atomic_add(int32_t* counter, int32_t value) { atomicAdd(counter, value); }
FD_DEVICE void atomic_add(uint64_t* counter, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(value));
}
FD_DEVICE void atomic_or(uint32_t* word, uint32_t bits) { atomicOr(word, bits); }

// Returns true in the block that arrives last of `count` blocks at a counter, which is 0 before the launch and after
// it. What the others have written before they arrived can then be read. To be called by all threads of a block, which
// may arrive at several counters, one after another.
FD_DEVICE bool last_block(int32_t* counter, int32_t count) {
  __threadfence();
  __syncthreads();  // every thread's writes come before the arrival
  int32_t is_last = 0;
  if (threadIdx.x == 0) {
    is_last = atomicAdd(counter, 1) == count - 1;
    if (is_last) *counter = 0;
  }
  is_last = __syncthreads_or(is_last);
  if (is_last) __threadfence();
  return is_last != 0;
}

FD_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FD_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
FD_DEVICE float square_root(float a) { return __fsqrt_rn(a); }

// Returns the value of the fp16 number in the low half of a word, exactly.
FD_DEVICE float widen_half(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
}
// Rounds two numbers to bfloat16, to the nearest, ties to even; every NaN becomes 0x7FFF. `low` takes the lower half.
FD_DEVICE uint32_t round_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

inline int launch_status(cudaError_t error) {
  return error == cudaSuccess ? kSuccess : fail(kDeviceFailed, "launch: %s", cudaGetErrorString(error));
}

// Returns 0, or kDeviceFailed; `fd_last_error` then says why.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Dim3 grid, unsigned block, size_t shared_bytes, void* stream,
           const Arguments&... arguments) {
  if (shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return launch_status(error);
  }
  kernel<<<dim3(grid.x, grid.y, grid.z), block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  return launch_status(cudaGetLastError());
}

}  // namespace fd::gpu
