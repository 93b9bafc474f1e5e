// SPDX-License-Identifier: Apache-2.0
// The noise of sampling as operators of their own, which tests and the check of a device compare with known values.

#include "common/export.h"
#include "common/gumbel.h"
#include "gpu_ops/device.h"

namespace {

using namespace fd::gpu;
using fd::ScalarLanes;

constexpr unsigned kThreads = 128;
constexpr int kGroup = 4;  // words that one call of the generator returns

FD_DEVICE int64_t global_thread() { return int64_t{block_index().x} * kThreads + thread_index(); }

Dim3 grid_for(int64_t num_threads) { return {static_cast<unsigned>((num_threads + kThreads - 1) / kThreads), 1, 1}; }

FD_KERNEL void philox4x32(Out<uint32_t> counters, int64_t count, uint64_t key) {
  const int64_t i = global_thread();
  if (i >= count) return;
  Bytes16 words = load16(counters.data + kGroup * i);
  fd::philox4x32<ScalarLanes>(words.word, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  store16(counters.data + kGroup * i, words);
}

FD_KERNEL void gumbel_of_words(In<uint32_t> words, Out<float> noise, int64_t count) {
  const int64_t i = global_thread();
  if (i < count) noise.data[i] = fd::gumbel_from_word<ScalarLanes>(words.data[i]);
}

FD_KERNEL void gumbel_noise(Out<float> noise, int32_t num_ids, uint64_t seed, uint64_t position) {
  const int64_t group = global_thread(), first = group * kGroup;
  if (first >= num_ids) return;
  uint32_t words[kGroup];
  fd::noise_words<ScalarLanes>(static_cast<uint32_t>(group), seed, position, words);
  for (int i = 0; i < kGroup; ++i)
    if (first + i < num_ids) noise.data[first + i] = fd::gumbel_from_word<ScalarLanes>(words[i]);
}

}  // namespace

// Replaces counters, [count, 4] uint32, with random words.
FD_EXPORT int fd_philox4x32(uint32_t* counters, int64_t count, int64_t key, void* stream) {
  FD_REQUIRE("philox4x32", count, count >= 0 && count <= INT32_MAX, "0 to 2147483647");
  if (count == 0) return kSuccess;
  return launch(philox4x32, grid_for(count), kThreads, 0, stream,
                Out<uint32_t>(counters, static_cast<size_t>(kGroup * count)), count, static_cast<uint64_t>(key));
}

// Writes the Gumbel transform of words, [count] uint32, to noise, [count] fp32.
FD_EXPORT int fd_gumbel_of_words(const uint32_t* words, float* noise, int64_t count, void* stream) {
  FD_REQUIRE("gumbel_of_words", count, count >= 0 && count <= INT32_MAX, "0 to 2147483647");
  if (count == 0) return kSuccess;
  const auto size = static_cast<size_t>(count);
  return launch(gumbel_of_words, grid_for(count), kThreads, 0, stream, In<uint32_t>(words, size),
                Out<float>(noise, size), count);
}

// Writes the noise of token ids 0 .. num_ids - 1 at a position of a request with this seed to noise, [num_ids] fp32.
FD_EXPORT int fd_gumbel_noise(float* noise, int64_t num_ids, int64_t seed, int64_t position, void* stream) {
  FD_REQUIRE("gumbel_noise", num_ids, num_ids >= 0 && num_ids <= INT32_MAX, "0 to 2147483647");
  if (num_ids == 0) return kSuccess;
  return launch(gumbel_noise, grid_for((num_ids + kGroup - 1) / kGroup), kThreads, 0, stream,
                Out<float>(noise, static_cast<size_t>(num_ids)), static_cast<int32_t>(num_ids),
                static_cast<uint64_t>(seed), static_cast<uint64_t>(position));
}
