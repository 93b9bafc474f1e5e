// SPDX-License-Identifier: Apache-2.0
// The noise of sampling as C functions for tests: the scalar code, and the vector code of one instruction-set path.
#include "common/export.h"
#include "cpu_ops/noise_lanes.h"

namespace fd {
namespace FD_ISA {
namespace {

void vector_noise(uint64_t seed, uint64_t position, int32_t num_ids, float* noise) {
  for (int32_t first = 0; first < num_ids; first += kNoiseGroup) {
    Lanes::U words[4];
    float group[kNoiseGroup];
    group_words(first, seed, position, words);
    for (int i = 0; i < 4; ++i) Lanes::store(group + i * Lanes::kWidth, gumbel_from_word<Lanes>(words[i]));
    for (int32_t i = 0; i < kNoiseGroup && first + i < num_ids; ++i) noise[first + i] = group[i];
  }
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd

// Replaces `count` counters of four words with random words.
FD_EXPORT void fd_philox4x32(uint32_t* counters, int64_t count, uint64_t key) {
  for (int64_t i = 0; i < count; ++i)
    fd::philox4x32<fd::ScalarLanes>(counters + 4 * i, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

// Writes the Gumbel transform of `count` random words.
FD_EXPORT void fd_gumbel_of_words(const uint32_t* words, int64_t count, float* noise) {
  for (int64_t i = 0; i < count; ++i) noise[i] = fd::gumbel_from_word<fd::ScalarLanes>(words[i]);
}

// Writes the noise of token ids 0 .. num_ids - 1, as the kernels of sampling compute it.
FD_EXPORT void fd_gumbel_noise(uint64_t seed, uint64_t position, int64_t num_ids, float* noise) {
  fd::FD_ISA::vector_noise(seed, position, static_cast<int32_t>(num_ids), noise);
}
