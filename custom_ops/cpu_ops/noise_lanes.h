// SPDX-License-Identifier: Apache-2.0
// The random words of consecutive token ids in the lanes of one instruction-set path.
#pragma once

#include "cpu_ops/sampling_lanes.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int kNoiseGroup = 4 * Lanes::kWidth;  // ids whose words one call of the generator returns

// Writes the words of kNoiseGroup ids from first_id on, which must be a multiple of kNoiseGroup: the words of ids
// first_id + i * Lanes::kWidth .. are in words[i].
FD_RULE void group_words(int32_t first_id, uint64_t seed, uint64_t position, Lanes::U words[4]) {
  const Lanes::U groups = Lanes::add(Lanes::set(static_cast<uint32_t>(first_id) / 4), Lanes::group_iota());
  noise_words<Lanes>(groups, seed, position, words);
  Lanes::interleave(words);
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
