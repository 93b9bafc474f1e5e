// SPDX-License-Identifier: Apache-2.0
// One item of append attention: the query rows of a tile over a range of splits, for one KV head, by one block.
//
// Four warps share up to 32 query rows: each computes the scores of 16 of 64 positions, and later a quarter of the
// values' elements. Twice as many warps take 64 rows, in two groups that share keys and values in shared memory. So
// every score, sum and value is computed by the same instructions in the same order for every number of rows: scores of
// a split, their maximum, weights, and one chain of products over the positions of the split for each output.
#pragma once

#include "gpu_ops/attention_codes.h"
#include "gpu_ops/attention_non_finite.h"
#include "gpu_ops/attention_products.h"
#include "gpu_ops/attention_state.h"

namespace fd::gpu {

// kHalves: 1 if only the first 16 rows of a group can exist, otherwise 2.
template <class Config, int kHalves>
class AttentionBlock {
 public:
  using Shared = AttentionShared<Config>;
  using Stage = AttentionStage<Config>;
  using Pipeline = TilePipeline<Stage, Config::kStages, Config::kThreads>;
  using Products = AttentionProducts<Config, kHalves>;
  using Scores = typename Products::Scores;
  using Values = typename Products::Values;
  using RowSums = PartSums[kHalves][2];

  FD_DEVICE AttentionBlock(Shared& shared, const AttentionArrays& arrays, const AttentionSizes& sizes)
      : shared_(shared), arrays_(arrays), sizes_(sizes), products_{shared} {}

  // Computes an item and stores its result from row `slot` of the scratch memory on.
  FD_DEVICE void run(const PlanItem& item, int kv_head, int64_t slot) {
    item_ = item;
    products_.num_rows = item.num_rows;
    kv_head_ = kv_head;
    sync_block();  // the previous item no longer needs shared memory
    locate_rows();
    locate_segments(item.first_split / kGroupSplits);
    sync_block();
    load_queries();
    attend(slot);
  }

 private:
  struct alignas(16) RowParts {
    float warp[kWarpsPerGroup];
  };

  FD_DEVICE int row(int m, int i) const { return products_.row(m, i); }
  // Calls use(m, h) for each row of this thread: row(m, 2 h).
  template <class Use>
  FD_DEVICE static void for_rows(Use use) {
    FD_UNROLL
    for (int m = 0; m < kHalves; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) use(m, h);
  }

  // Finds the rows of the item and the positions that they attend to.
  FD_DEVICE void locate_rows() {
    const int heads_per_kv = sizes_.num_heads / sizes_.kv_heads;
    const PlanMember first = load_record(arrays_.members + item_.member);
    const bool is_shared = item_.end_split * kSplit <= first.first_position;
    first_limit_ = is_shared ? INT32_MAX : first.first_position + first.first / heads_per_kv;
    const int last_limit = first.first_position + (first.first + first.count - 1) / heads_per_kv;
    end_ = item_.end_split * kSplit;
    if (!is_shared && last_limit + 1 < end_) end_ = last_limit + 1;
    if (thread_ >= Config::kTileRows) return;
    int32_t source = -1, limit = -1;
    for (int i = 0, begin = 0; i < item_.num_members && thread_ < item_.num_rows; ++i) {
      const PlanMember member = load_record(arrays_.members + item_.member + i);
      const int query_row = member.first + thread_ - begin;
      begin += member.count;
      if (thread_ >= begin) continue;
      const int new_row = query_row / heads_per_kv;
      source = (member.first_row + new_row) * (sizes_.num_heads + 2 * sizes_.kv_heads) + kv_head_ * heads_per_kv +
               query_row % heads_per_kv;
      limit = member.first_position + new_row;
      break;
    }
    shared_.source[thread_] = source;
    shared_.limit[thread_] = limit;
  }

  // Where the place of the segment at a position is kept.
  FD_DEVICE static unsigned place_of(int position) {
    return static_cast<unsigned>(position) / kSegment % (2 * kGroupSegments);
  }
  // Looks up the blocks of a group of splits.
  FD_DEVICE void locate_segments(int group) {
    const typename Config::Layout layout{sizes_.block_size, sizes_.kv_heads};
    const int32_t* table = arrays_.block_tables + int64_t{arrays_.members[item_.member].seq} * sizes_.max_blocks;
    static_assert(Config::kThreads >= kGroupSegments);
    const int segment = group * kGroupSegments + thread_, position = segment * kSegment;
    if (thread_ >= kGroupSegments || position < item_.first_split * kSplit || position >= end_ + kKvRows) return;
    const int index = position / sizes_.block_size, offset = position - index * sizes_.block_size;
    const int64_t begin = layout.head_begin(position < end_ ? table[index] : 0, kv_head_);
    const auto keep = [&](uint32_t* places, int64_t at) {
      places[place_of(position)] = static_cast<uint32_t>(static_cast<uint64_t>(at) / kPlaceBytes);
    };
    keep(shared_.places, begin + offset * Config::Layout::kRowBytes);
    if constexpr (Config::kIsInt8) keep(shared_.scale_places, layout.scale_begin(begin, offset));
  }

  FD_DEVICE void load_queries() {
    constexpr unsigned kChunks = Config::kHeadDim / 8, kProductRows = 16 * kHalves;
    const unsigned num_rows = (static_cast<unsigned>(item_.num_rows) + kProductRows - 1) / kProductRows * kProductRows;
    const unsigned chunk = thread_index() % kChunks;
    for (unsigned row = thread_index() / kChunks; row < num_rows; row += Config::kThreads / kChunks) {
      const int64_t source = shared_.source[row];
      Bytes16 bytes{};
      if (source >= 0) bytes = load16(arrays_.qkv + source * Config::kHeadDim + chunk * 8);
      if constexpr (Config::kIsInt8)
        permute(shared_.queries, row, chunk, bytes);
      else
        store16(shared_.queries.chunk(row, chunk), bytes);
    }
  }

  FD_DEVICE int num_stages_of(int split) const {
    const int num_stages = static_cast<int>(static_cast<unsigned>(end_ - split * kSplit + kKvRows - 1) / kKvRows);
    return num_stages < kSplitStages ? num_stages : kSplitStages;
  }

  // Issues stage `index`: of each split first the keys, then the values.
  FD_DEVICE void issue(Pipeline& pipeline, Stage& stage, unsigned index) const {
    const int split = item_.first_split + static_cast<int>(index / (2 * kSplitStages));
    const int number = static_cast<int>(index % (2 * kSplitStages)), num_stages = num_stages_of(split);
    const bool is_value = number >= num_stages;
    const int first = split * kSplit + (is_value ? number - num_stages : number) * kKvRows;
    const uint8_t* memory = is_value ? arrays_.value : arrays_.key;
    const unsigned segment = place_of(first);
    pipeline.template copy_groups<kSegment>(stage.rows, end_ - first, [&](unsigned i, unsigned offset) {
      return memory + offset + uint64_t{shared_.places[segment + i]} * kPlaceBytes;
    });
    if constexpr (Config::kIsInt8) {
      if (is_value) return;
      const auto copy_scales = [&](auto& tile, const uint8_t* scales) {
        pipeline.template copy_groups<1>(tile, (end_ - first - 1) / kSegment + 1, [&](unsigned i, unsigned offset) {
          return scales + offset + uint64_t{shared_.scale_places[segment + i]} * kPlaceBytes;
        });
      };
      copy_scales(stage.key_scales, arrays_.key);
      copy_scales(stage.value_scales, arrays_.value);
    }
  }

  FD_DEVICE void attend(int64_t slot) {
    Pipeline pipeline(shared_.stages);
    const int num_splits = item_.end_split - item_.first_split;
    const int count = 2 * (kSplitStages * (num_splits - 1) + num_stages_of(item_.end_split - 1));
    const auto issue_stage = [&](Stage& stage, int index) { issue(pipeline, stage, static_cast<unsigned>(index)); };
    int index = 0;
    const auto next_stage = [&]() -> Stage& {
      Stage& stage = pipeline.wait();
      pipeline.issue(issue_stage, index + Config::kStages - 1, count);
      ++index;
      return stage;
    };
    for (int i = 0; i < Config::kStages - 1; ++i) pipeline.issue(issue_stage, i, count);
    sync_block();  // the queries can be read
    RowSums sums;
    Values group;
    for (int split = item_.first_split; split < item_.end_split; ++split) {
      const bool begins_group = split == item_.first_split || split % kGroupSplits == 0;
      if (begins_group) locate_segments(split / kGroupSplits + 1);
      const int num_stages = num_stages_of(split);
      {
        Scores scores[kSplitStages];
        typename Products::Queries queries;
        if (products_.is_active()) products_.load_queries(queries);
        FD_UNROLL
        for (int stage = 0; stage < kSplitStages; ++stage)
          if (stage < num_stages) {
            Stage& keys = next_stage();
            if (products_.is_active()) products_.multiply_keys(queries, keys, stage, scores[stage]);
          }
        weigh(scores, split, num_stages);
      }
      Values values;
      for (int stage = 0; stage < num_stages; ++stage) multiply_values(next_stage(), split * kSplit, stage, values);
      if (products_.is_active()) {
        RowSums split_sums;
        read_sums(split_sums);
        merge(group, sums, values, split_sums, begins_group);
      }
      if (split + 1 == item_.end_split || (split + 1) % kGroupSplits == 0)
        store_group(slot, group, sums, split / kGroupSplits == item_.first_split / kGroupSplits);
    }
  }

  // Converts the scores of a split to weights in shared memory, and sums them.
  FD_DEVICE void weigh(Scores (&scores)[kSplitStages], int split, int num_stages) {
    RowSums sums;
    for_rows([&](int m, int h) { sums[m][h] = {kMaskedScore, 0.0f}; });
    if (products_.is_active()) {
      FD_UNROLL
      for (int stage = 0; stage < kSplitStages; ++stage)
        if (stage < num_stages) scale(scores[stage], split * kSplit + stage * kKvRows, sums);
      for_rows([&](int m, int h) {
        float& maximum = sums[m][h].maximum;
        for (unsigned distance = 1; distance < 4; distance *= 2)
          maximum = larger(maximum, shuffle_xor(maximum, distance));
        if (lane_ % 4 == 0) shared_.maxima[row(m, 2 * h)][quarter_] = maximum;
      });
    }
    sync_block();
    if (!products_.is_active()) return;
    for_rows([&](int m, int h) {
      const float maximum = read_maximum(m, h);
      // Relative to zero, the weights of a row without positions are zeros, as those of masked positions are.
      sums[m][h].maximum = maximum == kMaskedScore ? 0.0f : maximum;
    });
    FD_UNROLL
    for (int stage = 0; stage < kSplitStages; ++stage)
      if (stage < num_stages) store_weights(scores[stage], stage, sums);
    for_rows([&](int m, int h) {
      float& sum = sums[m][h].sum;
      for (unsigned distance = 1; distance < 4; distance *= 2) sum += shuffle_xor(sum, distance);
      if (lane_ % 4 == 0) shared_.sums[row(m, 2 * h)][quarter_] = sum;
    });
  }

  // Scales scores, masks those of positions that a row does not attend to, and finds the maxima.
  FD_DEVICE void scale(Scores& scores, int first, RowSums& sums) const {
    FD_UNROLL
    for (int m = 0; m < kHalves; ++m) FD_UNROLL
    for (int n = 0; n < 2; ++n) FD_UNROLL
    for (int i = 0; i < 4; ++i) scores.sums[m][n][i] *= sizes_.scale;
    if (first + kKvRows - 1 > first_limit_ || first < sizes_.num_masked_prefix) mask(scores, first);
    FD_UNROLL
    for (int m = 0; m < kHalves; ++m) FD_UNROLL
    for (int n = 0; n < 2; ++n) FD_UNROLL
    for (int i = 0; i < 4; ++i) sums[m][i / 2].maximum = larger(scores.sums[m][n][i], sums[m][i / 2].maximum);
  }

  FD_DEVICE void mask(Scores& scores, int first) const {
    FD_UNROLL
    for (int m = 0; m < kHalves; ++m) FD_UNROLL
    for (int n = 0; n < 2; ++n) FD_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int position = first + 16 * quarter_ + 8 * n + Scores::column(i), limit = shared_.limit[row(m, i)];
      const bool is_visible = position <= limit && (position >= sizes_.num_masked_prefix || position == limit);
      if (!is_visible) scores.sums[m][n][i] = kMaskedScore;
    }
  }

  // Stores the weights relative to the maxima of rows.
  FD_DEVICE void store_weights(const Scores& scores, int stage, RowSums& sums) {
    for_rows([&](int m, int h) {
      FD_UNROLL
      for (int n = 0; n < 2; ++n) {
        float weights[2];
        FD_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float score = scores.sums[m][n][2 * h + j];
          weights[j] = power_of_two(score - sums[m][h].maximum);
          sums[m][h].sum += weights[j];
          if constexpr (Config::kIsInt8)
            if (score != kMaskedScore)
              weights[j] *= shared_.value_scales[stage * kKvRows + 16 * quarter_ + 8 * n + Scores::column(j)];
        }
        auto& rows = part_of(shared_.weights, stage, products_.row_group * kGroupRows + 16 * m + 8 * h);
        auto* to = reinterpret_cast<uint32_t*>(rows.chunk(lane_ / 4, 2 * quarter_ + n));
        to[lane_ % 4] = round_bf16x2(weights[0], weights[1]);
      }
    });
  }

  // Adds the products of the weights and the values of stage `number` of a split.
  FD_DEVICE void multiply_values(Stage& stage, int split_begin, int number, Values& values) {
    if constexpr (!Config::kIsInt8) {  // there the weights have been multiplied by scales, which are NaN or finite
      const int first = split_begin + number * kKvRows;
      const bool hides_some = first_limit_ < end_ - 1 && first_limit_ < first + kKvRows - 1;
      if (hides_some) {
        NonFiniteValues<Config, kHalves> hidden{shared_, stage, first, first_limit_};
        if (hidden.exist()) hidden.add(number * kKvRows, products_.row_group * kGroupRows, values);
      }
    }
    if (products_.is_active()) products_.multiply_values(stage, number, values);
  }

  // Reads what the warps have of a row.
  FD_DEVICE RowParts read(const float (&parts)[Config::kTileRows][kWarpsPerGroup], int m, int h) const {
    return bit_cast<RowParts>(load16(parts[row(m, 2 * h)]));
  }
  FD_DEVICE float read_maximum(int m, int h) const {
    float maximum = kMaskedScore;
    for (const float next : read(shared_.maxima, m, h).warp) maximum = larger(next, maximum);
    return maximum;
  }
  // Reads the sums of a split; a barrier after `weigh` has been passed.
  FD_DEVICE void read_sums(RowSums& sums) const {
    for_rows([&](int m, int h) {
      sums[m][h] = {read_maximum(m, h), 0.0f};
      for (const float next : read(shared_.sums, m, h).warp) sums[m][h].sum += next;
    });
  }

  // Merges the next part into a total, or begins one with it.
  FD_DEVICE static void merge(Values& total, RowSums& sums, const Values& next, const RowSums& next_sums,
                              bool is_first) {
    if (is_first) total = next;
    for_rows([&](int m, int h) {
      if (is_first) {
        sums[m][h] = next_sums[m][h];
        return;
      }
      const MergeFactors factors = merge_sums(sums[m][h], next_sums[m][h]);
      FD_UNROLL
      for (int n = 0; n < Config::kNTiles; ++n) FD_UNROLL
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        float& value = total.sums[m][n][i];
        value = merge_values(value, next.sums[m][n][i], factors);
      }
    });
  }

  // Stores the sums and values of a group of splits, merged with those of the groups before it in this item.
  FD_DEVICE void store_group(int64_t slot, const Values& group, const RowSums& sums, bool is_first) {
    RowSums total;
    for_rows([&](int m, int h) {
      total[m][h] = sums[m][h];
      if (row(m, 2 * h) >= item_.num_rows) return;
      MergeFactors factors{0.0f, 1.0f};
      if (!is_first) {
        total[m][h] = bit_cast<PartSums>(arrays_.sums[slot + row(m, 2 * h)]);
        factors = merge_sums(total[m][h], sums[m][h]);
      }
      float* to = arrays_.values + (slot + row(m, 2 * h)) * Config::kHeadDim + 8 * Config::kNTiles * quarter_;
      if constexpr (Config::kIsInt8) {
        FD_UNROLL
        for (int n = 0; n < Config::kNTiles; n += 2) {
          const float (&even)[4] = group.sums[m][n], (&odd)[4] = group.sums[m][n + 1];
          const Elements<4> elements{{even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]}};
          store(to + 8 * n + 4 * (lane_ % 4), elements, is_first, factors);
        }
      } else {
        FD_UNROLL
        for (int n = 0; n < Config::kNTiles; ++n) {
          const float (&values)[4] = group.sums[m][n];
          store(to + 8 * n + Values::column(0), Elements<2>{{values[2 * h], values[2 * h + 1]}}, is_first, factors);
        }
      }
    });
    if (!is_first) sync_block();  // the other warps have read the sums of the groups before
    if (quarter_ != 0 || lane_ % 4 != 0) return;
    for_rows([&](int m, int h) {
      if (row(m, 2 * h) < item_.num_rows) arrays_.sums[slot + row(m, 2 * h)] = bit_cast<uint64_t>(total[m][h]);
    });
  }
  template <int kCount>
  struct alignas(4 * kCount) Elements {
    float value[kCount];
  };
  // Stores consecutive elements of a row, merged with those that are there.
  template <int kCount>
  FD_DEVICE static void store(float* to, Elements<kCount> elements, bool is_first, const MergeFactors& factors) {
    using Bytes = std::conditional_t<kCount == 2, uint64_t, Bytes16>;
    auto* bytes = reinterpret_cast<Bytes*>(to);
    if (!is_first) {
      const auto before = bit_cast<Elements<kCount>>(*bytes);
      FD_UNROLL
      for (int i = 0; i < kCount; ++i) elements.value[i] = merge_values(before.value[i], elements.value[i], factors);
    }
    *bytes = bit_cast<Bytes>(elements);
  }

  Shared& shared_;
  const AttentionArrays& arrays_;
  const AttentionSizes& sizes_;
  const int thread_ = static_cast<int>(thread_index()), lane_ = static_cast<int>(lane_index()),
            warp_ = static_cast<int>(warp_index());
  const int quarter_ = warp_ % kWarpsPerGroup;
  Products products_;
  PlanItem item_;
  int kv_head_;
  int end_;          // of the positions that any row of the item attends to
  int first_limit_;  // all rows attend to the positions up to this one
};

}  // namespace fd::gpu
