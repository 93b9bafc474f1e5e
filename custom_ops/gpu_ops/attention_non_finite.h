// SPDX-License-Identifier: Apache-2.0
// Values that are NaN or infinite at positions that only some rows of an item attend to. A weight of zero does not mask
// them. So they are added for the rows that attend to them, and then replaced by zeros.
#pragma once

#include "gpu_ops/attention_config.h"

namespace fd::gpu {

// One stage of values. All threads of a block take part.
template <class Config, int kHalves>
struct NonFiniteValues {
  using Values = TileProduct<float, kHalves, Config::kNTiles>;

  AttentionShared<Config>& shared;
  AttentionStage<Config>& stage;
  int first;        // position of the stage's first row
  int first_limit;  // all rows attend to the positions up to this one
  int warp = static_cast<int>(warp_index()), lane = static_cast<int>(lane_index());

  FD_DEVICE bool exist() const {
    bool is_found = false;
    for_hidden_chunks([&](const Bytes16& bytes) {
      for (const uint32_t pair : bytes.word) is_found |= is_non_finite(pair << 16) || is_non_finite(pair);
      return bytes;
    });
    const uint32_t any = warp_ballot(is_found);
    if (lane == 0) shared.is_found[warp] = any != 0;
    sync_block();
    for (const int32_t found : shared.is_found) is_found |= found != 0;
    return is_found;
  }

  // Adds them to the sums of the rows from `row_begin` on, and replaces them. `place_begin` is
  // the place of the stage in its split.
  FD_DEVICE void add(int place_begin, int row_begin, Values& values) const {
    for (int place = static_cast<int>(begin()); place < kKvRows; ++place) {
      FD_UNROLL
      for (int m = 0; m < kHalves; ++m) FD_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = row_begin + 16 * m + Values::row(2 * h);
        if (first + place > shared.limit[row]) continue;
        const float weight = weight_at(row, place_begin + place);
        FD_UNROLL
        for (int n = 0; n < Config::kNTiles; ++n) {
          const int chunk = warp % kWarpsPerGroup * Config::kNTiles + n;
          const uint32_t pair = *reinterpret_cast<const uint32_t*>(stage.rows.chunk(place, chunk) + lane % 4 * 4);
          float (&sums)[4] = values.sums[m][n];
          add_if_non_finite(weight, pair << 16, sums[2 * h]);
          add_if_non_finite(weight, pair & 0xFFFF0000u, sums[2 * h + 1]);
        }
      }
    }
    sync_block();
    for_hidden_chunks([](Bytes16 bytes) {
      for (uint32_t& pair : bytes.word) {
        if (is_non_finite(pair << 16)) pair &= 0xFFFF0000u;
        if (is_non_finite(pair)) pair &= 0xFFFFu;
      }
      return bytes;
    });
    sync_block();
  }

 private:
  // The first row that some rows of the item do not attend to.
  FD_DEVICE unsigned begin() const { return first_limit < first ? 0 : static_cast<unsigned>(first_limit + 1 - first); }
  FD_DEVICE static bool is_non_finite(uint32_t bits) { return (bits & 0x7F800000u) == 0x7F800000u; }
  FD_DEVICE static void add_if_non_finite(float weight, uint32_t bits, float& sum) {
    if (is_non_finite(bits)) sum = fused_multiply_add(weight, bit_cast<float>(bits), sum);
  }
  FD_DEVICE float weight_at(int row, int place) const {
    const uint32_t weight = *reinterpret_cast<const uint16_t*>(shared.weights.chunk(row, place / 8) + place % 8 * 2);
    return bit_cast<float>(weight << 16);
  }
  // Replaces the chunks at positions that only some rows attend to by change(chunk).
  template <class Change>
  FD_DEVICE void for_hidden_chunks(Change change) const {
    constexpr unsigned kChunks = Config::kHeadDim / 8;
    for (unsigned row = begin() + thread_index() / kChunks; row < kKvRows; row += Config::kThreads / kChunks) {
      uint8_t* chunk = stage.rows.chunk(row, thread_index() % kChunks);
      store16(chunk, change(load16(chunk)));
    }
  }
};

}  // namespace fd::gpu
