// SPDX-License-Identifier: Apache-2.0
// `device.h` for g++: each function is one of the emulator. Included by it only.
#pragma once

#include <cmath>
#include <cstring>
#include <new>

#include "common/quant.h"
#include "emulation/machine.h"

#define FD_DEVICE inline
#define FD_KERNEL static
#define FD_LAUNCH_BOUNDS(threads, blocks)
#define FD_UNROLL
#define FD_ROLLED
#define FD_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace fd::gpu {

template <class T>
struct In {
  const T* data;
  size_t size;  // elements
  In(const T* pointer, size_t count) : data(pointer), size(count) {}
};
template <class T>
struct Out {
  T* data;
  size_t size;
  Out(T* pointer, size_t count) : data(pointer), size(count) {}
};
template <class T>
struct Scratch {
  T* data;
  size_t size;
  Scratch(T* pointer, size_t count) : data(pointer), size(count) {}
};

FD_DEVICE unsigned thread_index() { return emulation::thread_index(); }
FD_DEVICE unsigned block_size() { return emulation::block_size(); }
FD_DEVICE Dim3 block_index() { return emulation::block_index(); }
FD_DEVICE Dim3 grid_size() { return emulation::grid_size(); }

template <class T>
FD_DEVICE T& shared_memory(FD_HERE) {
  return *static_cast<T*>(emulation::shared_memory(sizeof(T), {file, line}));
}

FD_DEVICE void sync_block(FD_HERE) { emulation::sync_block({file, line}); }
FD_DEVICE void sync_warp(FD_HERE) { emulation::sync_warp({file, line}); }

template <class T>
FD_DEVICE T shuffle_xor(T value, unsigned mask, FD_HERE) {
  static_assert(sizeof(T) == 4);
  const uint32_t word = emulation::shuffle_xor(__builtin_bit_cast(uint32_t, value), mask, {file, line});
  return __builtin_bit_cast(T, word);
}
template <class T>
FD_DEVICE T shuffle(T value, unsigned lane, FD_HERE) {
  static_assert(sizeof(T) == 4);
  const uint32_t word = emulation::shuffle(__builtin_bit_cast(uint32_t, value), lane, {file, line});
  return __builtin_bit_cast(T, word);
}
FD_DEVICE unsigned warp_ballot(bool predicate, FD_HERE) { return emulation::warp_ballot(predicate, {file, line}); }

FD_DEVICE Bytes16 load16(const void* address, FD_HERE) { return emulation::load16(address, false, {file, line}); }
FD_DEVICE Bytes16 load16_readonly(const void* address, FD_HERE) {
  return emulation::load16(address, true, {file, line});
}
FD_DEVICE void store16(void* address, Bytes16 value, FD_HERE) { emulation::store16(address, value, {file, line}); }

FD_DEVICE void copy_async16(void* shared, const void* global, bool is_valid = true, FD_HERE) {
  emulation::copy_async16(shared, global, is_valid, {file, line});
}
FD_DEVICE void copy_async_commit() { emulation::copy_async_commit(); }
template <int kPending>
FD_DEVICE void copy_async_wait() {
  emulation::copy_async_wait(kPending);
}

FD_DEVICE Matrices4 load_matrix_x4(const void* shared_row, FD_HERE) {
  return emulation::load_matrix_x4(shared_row, false, {file, line});
}
FD_DEVICE Matrices4 load_matrix_x4_transposed(const void* shared_row, FD_HERE) {
  return emulation::load_matrix_x4(shared_row, true, {file, line});
}
FD_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FD_HERE) {
  emulation::mma_bf16(c, a, b, {file, line});
}
FD_DEVICE void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FD_HERE) {
  emulation::mma_s8(c, a, b, {file, line});
}
FD_DEVICE void mma_u8_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FD_HERE) {
  emulation::mma_u8_s8(c, a, b, {file, line});
}

FD_DEVICE void atomic_add(int32_t* counter, int32_t value, FD_HERE) {
  emulation::atomic_add(counter, value, {file, line});
}
FD_DEVICE void atomic_add(uint64_t* counter, uint64_t value, FD_HERE) {
  emulation::atomic_add(counter, value, {file, line});
}
FD_DEVICE void atomic_or(uint32_t* word, uint32_t bits, FD_HERE) { emulation::atomic_or(word, bits, {file, line}); }
FD_DEVICE bool last_block(int32_t* counter, int32_t count, FD_HERE) {
  return emulation::last_block(counter, count, {file, line});
}

FD_DEVICE float fused_multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FD_DEVICE float divide(float a, float b) { return a / b; }
FD_DEVICE float square_root(float a) { return __builtin_sqrtf(a); }

FD_DEVICE float widen_half(uint32_t bits) { return half_to_float(bits & 0xFFFFu); }
FD_DEVICE uint32_t round_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  return value != value ? 0x7FFFu : (bits + ((bits >> 16) & 1) + 0x7FFFu) >> 16;
}
FD_DEVICE uint32_t round_bf16x2(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }

namespace detail {

// The arguments of a launch, copied to the stack of each thread.
template <class... Types>
struct Pack {};
template <class First, class... Rest>
struct Pack<First, Rest...> {
  First first;
  Pack<Rest...> rest;
};

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  Pack<Parameters...> arguments;

  static void run(const void* stored) {
    const Call& call = *static_cast<const Call*>(stored);
    call.apply(call.arguments);
  }
  template <class First, class... Rest, class... Unpacked>
  void apply(const Pack<First, Rest...>& pack, const Unpacked&... unpacked) const {
    apply(pack.rest, unpacked..., pack.first);
  }
  void apply(const Pack<>&, const Parameters&... unpacked) const { kernel(unpacked...); }
};

template <class T>
void note_buffer(emulation::Launch&, const T&) {
  static_assert(!std::is_pointer_v<T>, "pass arrays as In, Out or Scratch");
}
template <class T>
void note_buffer(emulation::Launch& launch, const In<T>& array) {
  launch.add_buffer(array.data, array.size * sizeof(T), emulation::Access::kRead);
}
template <class T>
void note_buffer(emulation::Launch& launch, const Out<T>& array) {
  launch.add_buffer(array.data, array.size * sizeof(T), emulation::Access::kWrite);
}
template <class T>
void note_buffer(emulation::Launch& launch, const Scratch<T>& array) {
  launch.add_buffer(array.data, array.size * sizeof(T), emulation::Access::kScratch);
}

template <class First, class... Rest>
Pack<First, Rest...> pack(const First& first, const Rest&... rest) {
  if constexpr (sizeof...(Rest) == 0) {
    return {first, {}};
  } else {
    return {first, pack<Rest...>(rest...)};
  }
}

}  // namespace detail

// Returns 0, or kDeviceFailed after a fault, which `fd_last_error` describes.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), Dim3 grid, unsigned block, size_t shared_bytes, void* stream,
           const Arguments&... arguments) {
  using Call = detail::Call<Parameters...>;
  static_assert(std::is_trivially_copyable_v<Call> && sizeof(Call) <= emulation::kMaxParameterBytes + sizeof(void*));
  const Call call{kernel, detail::pack<Parameters...>(Parameters(arguments)...)};
  emulation::Launch launched(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, &Call::run, &call,
                             sizeof(call));
  (detail::note_buffer(launched, arguments), ...);
  return emulation::submit(launched, stream);
}

}  // namespace fd::gpu

#undef FD_HERE
