// SPDX-License-Identifier: Apache-2.0
// The two products of append attention, as the warps of a block share them: scores of 16 of 64 keys, and a quarter of
// the elements of values, for up to 32 query rows.
#pragma once

#include "gpu_ops/attention_codes.h"
#include "gpu_ops/attention_config.h"

namespace fd::gpu {

// The part of a tile from a panel of eight chunks and a row on. The row is a multiple of 8, so that chunks lie in the
// same order; addresses in all parts then differ by constants.
template <class AnyTile>
FD_DEVICE AnyTile& part_of(AnyTile& tile, int panel, int row) {
  return reinterpret_cast<AnyTile&>(tile.bytes[panel][row]);
}

// What a thread has of the products of an item, for 16 kHalves rows of each group of 32.
template <class Config, int kHalves>
struct AttentionProducts {
  using Shared = AttentionShared<Config>;
  using Stage = AttentionStage<Config>;
  using Scores = TileProduct<float, kHalves, 2>;
  using Values = TileProduct<float, kHalves, Config::kNTiles>;

  // The first steps of the queries, which stay in registers during a split.
  struct Queries {
    static constexpr int kMost = Config::kHeldQueries / kHalves, kAll = Config::kHeadDim / 16;
    static constexpr int kSteps = kMost < kAll ? kMost : kAll;
    typename Scores::A rows[kSteps == 0 ? 1 : kSteps][kHalves];
  };

  Shared& shared;
  int num_rows = 0;  // of the item
  int thread = static_cast<int>(thread_index()), warp = static_cast<int>(warp_index());
  int row_group = warp / kWarpsPerGroup, quarter = warp % kWarpsPerGroup;

  // The number of query row `m`, element `i` of a product in the tile.
  FD_DEVICE int row(int m, int i) const { return row_group * kGroupRows + 16 * m + Scores::row(i); }
  // Whether the item has rows of this thread's group.
  FD_DEVICE bool is_active() const { return Config::kRowGroups == 1 || row_group * kGroupRows < num_rows; }

  FD_DEVICE void load_queries(Queries& queries) const {
    FD_UNROLL
    for (int step = 0; step < Queries::kSteps; ++step) FD_UNROLL
    for (int m = 0; m < kHalves; ++m) queries.rows[step][m] = load_queries(step, m);
  }

  // Multiplies the queries by 16 keys of stage `number` of a split.
  FD_DEVICE void multiply_keys(const Queries& queries, const Stage& stage, int number, Scores& scores) const {
    FD_UNROLL
    for (int step = 0; step < Config::kHeadDim / 16; step += Config::kKeySteps) {
      typename Scores::B keys[2];
      Scores::load_b(stage.rows, 16 * quarter, 2 * step / Config::kKeySteps, keys[0], keys[1]);
      if constexpr (Config::kIsInt8) {
        FD_UNROLL
        for (int i = 0; i < 2; ++i)
          multiply_step(queries, step + i, widen_keys<Scores>(keys[0].word[i]), widen_keys<Scores>(keys[1].word[i]),
                        scores);
      } else {
        multiply_step(queries, step, keys[0], keys[1], scores);
      }
    }
    if constexpr (Config::kIsInt8) apply_scales(stage, number, scores);
  }

  // Adds the products of the weights and the values of stage `number` of a split.
  FD_DEVICE void multiply_values(const Stage& stage, int number, Values& values) const {
    for (int step = 0; step < kKvRows / 16; step += Config::kValueSteps) {
      typename Values::A a[Config::kValueSteps][kHalves];
      FD_UNROLL
      for (int i = 0; i < Config::kValueSteps; ++i) FD_UNROLL
      for (int m = 0; m < kHalves; ++m) {
        a[i][m] = Values::load_a(part_of(shared.weights, number, row_group * kGroupRows + 16 * m), 0, 2 * (step + i));
      }
      FD_UNROLL
      for (int n = 0; n < Config::kNTiles; n += Config::kValueTiles) {
        typename Values::B b[Config::kValueSteps][Config::kValueTiles];
        load_values(stage, step, n, b);
        FD_UNROLL
        for (int i = 0; i < Config::kValueSteps; ++i) FD_UNROLL
        for (int m = 0; m < kHalves; ++m) FD_UNROLL
        for (int j = 0; j < Config::kValueTiles; ++j) values.multiply(m, n + j, a[i][m], b[i][j]);
      }
    }
  }

 private:
  FD_DEVICE typename Scores::A load_queries(int step, int m) const {
    const auto& rows = part_of(shared.queries, step / 4, row_group * kGroupRows + 16 * m);
    return Scores::load_a(rows, 0, 2 * step % 8);
  }
  FD_DEVICE void multiply_step(const Queries& queries, int step, const typename Scores::B& first,
                               const typename Scores::B& second, Scores& scores) const {
    FD_UNROLL
    for (int m = 0; m < kHalves; ++m) {
      const typename Scores::A a = step < Queries::kSteps ? queries.rows[step][m] : load_queries(step, m);
      scores.multiply(m, 0, a, first);
      scores.multiply(m, 1, a, second);
    }
  }

  // Multiplies scores by the scales of the keys, and keeps those of the values.
  FD_DEVICE void apply_scales(const Stage& stage, int number, Scores& scores) const {
    FD_UNROLL
    for (int n = 0; n < 2; ++n) {
      const int place = 8 * n + Scores::column(0);
      const auto* chunk = reinterpret_cast<const float*>(stage.key_scales.chunk(quarter, place / 4));
      const float scales[2] = {chunk[place % 4], chunk[place % 4 + 1]};
      FD_UNROLL
      for (int m = 0; m < kHalves; ++m) FD_UNROLL
      for (int i = 0; i < 4; ++i) scores.sums[m][n][i] *= scales[i % 2];
    }
    if (thread >= kKvRows / 4) return;
    const uint8_t* chunk = stage.value_scales.chunk(thread / 4, thread % 4);
    store16(shared.value_scales + number * kKvRows + 4 * thread, load16(chunk));
  }

  // Loads what one load brings: bfloat16 values for two tiles, or codes for four, or for two in two steps.
  FD_DEVICE void load_values(const Stage& stage, int step, int n,
                             typename Values::B (&b)[Config::kValueSteps][Config::kValueTiles]) const {
    const auto& rows = part_of(stage.rows, 0, 16 * step);
    const int tile = quarter * Config::kNTiles + n;
    if constexpr (!Config::kIsInt8) {
      Values::load_b_transposed(rows, 0, tile, b[0][0], b[0][1]);
    } else {
      typename Values::B codes[2];
      if constexpr (Config::kValueSteps == 2)
        Values::load_b_steps_transposed(rows, 0, tile / 2, codes);
      else
        Values::load_b_transposed(rows, 0, tile / 2, codes[0], codes[1]);
      FD_UNROLL
      for (int i = 0; i < 4; ++i)
        b[i / Config::kValueTiles][i % Config::kValueTiles] = widen_values<Values>(codes[i / 2], i % 2);
    }
  }
};

}  // namespace fd::gpu
