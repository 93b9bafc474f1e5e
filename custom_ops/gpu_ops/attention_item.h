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

template <class Config>
class AttentionBlock {
 public:
  using Shared = AttentionShared<Config>;
  using Stage = AttentionStage<Config>;
  using Pipeline = TilePipeline<Stage, Config::kStages, Config::kThreads>;
  using Products = AttentionProducts<Config>;
  using Scores = typename Products::Scores;
  using Values = typename Products::Values;

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
  FD_DEVICE int row(int m, int i) const { return products_.row(m, i); }
  FD_DEVICE bool is_active(int m) const { return products_.is_active(m); }

  // Finds the rows of the item and the positions that they attend to.
  FD_DEVICE void locate_rows() {
    const int heads_per_kv = sizes_.num_heads / sizes_.kv_heads;
    const PlanMember first = load_record(arrays_.members + item_.member);
    seq_ = first.seq;
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

  // Looks up the blocks of a group of splits.
  FD_DEVICE void locate_segments(int group) {
    const int32_t* table = arrays_.block_tables + int64_t{seq_} * sizes_.max_blocks;
    for (int i = thread_; i < kGroupSegments; i += Config::kThreads) {
      const int position = (group * kGroupSegments + i) * kSegment;
      if (position < item_.first_split * kSplit || position >= end_) continue;
      shared_.heads[group % 2][i] = table[position / sizes_.block_size] * sizes_.kv_heads + kv_head_;
      shared_.offsets[group % 2][i] = static_cast<uint16_t>(position % sizes_.block_size);
    }
  }

  FD_DEVICE void load_queries() {
    constexpr int kChunks = Config::kHeadDim / 8;
    const int num_rows = 16 * ((item_.num_rows + 15) / 16);
    for (int i = thread_; i < num_rows * kChunks; i += Config::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
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
    const int visible = end_ - split * kSplit;
    return visible >= kSplit ? kSplitStages : (visible + kKvRows - 1) / kKvRows;
  }

  // Issues stage `index`: of each split first the keys, then the values.
  FD_DEVICE void issue(Pipeline& pipeline, Stage& stage, int index) const {
    const typename Config::Layout layout{sizes_.block_size, sizes_.kv_heads};
    const int split = item_.first_split + index / (2 * kSplitStages), place = index % (2 * kSplitStages);
    const int num_stages = num_stages_of(split);
    const bool is_value = place >= num_stages;
    const int first = split * kSplit + (is_value ? place - num_stages : place) * kKvRows;
    const uint8_t* memory = is_value ? arrays_.value : arrays_.key;
    const int group = split / kGroupSplits % 2, first_segment = first / kSegment % kGroupSegments;
    pipeline.copy(stage.rows, [&](int row, int chunk) -> const void* {
      if (first + row >= end_) return nullptr;
      const int segment = first_segment + row / kSegment;
      const int offset = shared_.offsets[group][segment] + row % kSegment;
      return memory + shared_.heads[group][segment] * layout.head_bytes() + offset * layout.kRowBytes + 16 * chunk;
    });
    if constexpr (Config::kIsInt8) {
      if (is_value) return;
      pipeline.copy(stage.scales, [&](int row, int chunk) -> const void* {
        const int segment = first_segment + row % Stage::kSegments;
        if (first + row % Stage::kSegments * kSegment >= end_) return nullptr;
        const int64_t begin = shared_.heads[group][segment] * layout.head_bytes();
        const uint8_t* scales = row < Stage::kSegments ? arrays_.key : arrays_.value;
        return scales + layout.scale_begin(begin, shared_.offsets[group][segment]) + 16 * chunk;
      });
    }
  }

  FD_DEVICE void attend(int64_t slot) {
    Pipeline pipeline(shared_.stages);
    const int num_splits = item_.end_split - item_.first_split;
    const int count = 2 * (kSplitStages * (num_splits - 1) + num_stages_of(item_.end_split - 1));
    const auto issue_stage = [&](Stage& stage, int index) { issue(pipeline, stage, index); };
    int index = 0;
    const auto next_stage = [&]() -> Stage& {
      Stage& stage = pipeline.wait();
      pipeline.issue(issue_stage, index + Config::kStages - 1, count);
      ++index;
      return stage;
    };
    for (int i = 0; i < Config::kStages - 1; ++i) pipeline.issue(issue_stage, i, count);
    PartSums total[2][2];
    PartSums sums[2][2];
    Values group;
    for (int split = item_.first_split; split < item_.end_split; ++split) {
      const bool begins_group = split == item_.first_split || split % kGroupSplits == 0;
      if (begins_group) locate_segments(split / kGroupSplits + 1);
      const int num_stages = num_stages_of(split);
      {
        Scores scores[kSplitStages];
        FD_UNROLL
        for (int stage = 0; stage < kSplitStages; ++stage)
          if (stage < num_stages) products_.multiply_keys(next_stage(), stage, scores[stage]);
        weigh(scores, split, num_stages);
      }
      Values values;
      for (int stage = 0; stage < num_stages; ++stage) multiply_values(next_stage(), split * kSplit, stage, values);
      PartSums split_sums[2][2];
      read_sums(split_sums);
      merge(group, sums, values, split_sums, begins_group);
      if (split + 1 == item_.end_split || (split + 1) % kGroupSplits == 0)
        store_group(slot, group, sums, total, split / kGroupSplits == item_.first_split / kGroupSplits);
    }
    if (warp_ % kWarpsPerGroup == 0 && lane_ % 4 == 0) store_sums(slot, total);
  }

  // Converts the scores of a split to weights in shared memory, and sums them.
  FD_DEVICE void weigh(Scores (&scores)[kSplitStages], int split, int num_stages) {
    PartSums sums[2][2];
    for (auto& pair : sums)
      for (PartSums& part : pair) part = {kMaskedScore, 0.0f};
    FD_UNROLL
    for (int stage = 0; stage < kSplitStages; ++stage) {
      if (stage < num_stages) mask(scores[stage], split * kSplit + stage * kKvRows, sums);
    }
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) {
      float& maximum = sums[m][h].maximum;
      for (unsigned distance = 1; distance < 4; distance *= 2)
        maximum = larger(maximum, shuffle_xor(maximum, distance));
      if (lane_ % 4 == 0) shared_.maxima[quarter_][row(m, 2 * h)] = maximum;
    }
    sync_block();
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) sums[m][h].maximum = read_maximum(row(m, 2 * h));
    FD_UNROLL
    for (int stage = 0; stage < kSplitStages; ++stage)
      if (stage < num_stages) store_weights(scores[stage], stage, sums);
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) {
      float& sum = sums[m][h].sum;
      for (unsigned distance = 1; distance < 4; distance *= 2) sum += shuffle_xor(sum, distance);
      if (lane_ % 4 == 0) shared_.sums[quarter_][row(m, 2 * h)] = sum;
    }
  }

  // Scales scores and masks those of positions that a row does not attend to.
  FD_DEVICE void mask(Scores& scores, int first, PartSums (&sums)[2][2]) const {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) {
      if (!is_active(m)) continue;
      FD_UNROLL
      for (int n = 0; n < 2; ++n) FD_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int position = first + 16 * quarter_ + 8 * n + Scores::column(i), limit = shared_.limit[row(m, i)];
        const bool is_visible = position <= limit && (position >= sizes_.num_masked_prefix || position == limit);
        float& score = scores.sums[m][n][i];
        score = is_visible ? score * sizes_.scale : kMaskedScore;
        sums[m][i / 2].maximum = larger(score, sums[m][i / 2].maximum);
      }
    }
  }

  FD_DEVICE void store_weights(Scores& scores, int stage, PartSums (&sums)[2][2]) {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) {
      if (!is_active(m)) continue;
      FD_UNROLL
      for (int n = 0; n < 2; ++n) FD_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int place = stage * kKvRows + 16 * quarter_ + 8 * n + Scores::column(0);
        float weights[2];
        FD_UNROLL
        for (int j = 0; j < 2; ++j) {
          const float score = scores.sums[m][n][2 * h + j];
          weights[j] = score == kMaskedScore ? 0.0f : power_of_two(score - sums[m][h].maximum);
          sums[m][h].sum += weights[j];
          if constexpr (Config::kIsInt8)
            if (score != kMaskedScore) weights[j] *= shared_.value_scales[place + j];
        }
        uint8_t* chunk = shared_.weights.chunk(row(m, 2 * h), place / 8);
        *reinterpret_cast<uint32_t*>(chunk + lane_ % 4 * 4) = round_bf16x2(weights[0], weights[1]);
      }
    }
  }

  // Adds the products of the weights and the values of stage `number` of a split.
  FD_DEVICE void multiply_values(Stage& stage, int split_begin, int number, Values& values) {
    if constexpr (!Config::kIsInt8) {  // there the weights have been multiplied by scales, which are NaN or finite
      const int first = split_begin + number * kKvRows;
      const bool hides_some = first_limit_ < end_ - 1 && first_limit_ < first + kKvRows - 1;
      if (hides_some) {
        NonFiniteValues<Config> hidden{shared_, stage, first, first_limit_};
        if (hidden.exist()) hidden.add(number * kKvRows, products_.row_group * kGroupRows, values);
      }
    }
    products_.multiply_values(stage, number, values);
  }

  FD_DEVICE float read_maximum(int row) const {
    float maximum = kMaskedScore;
    for (int quarter = 0; quarter < kWarpsPerGroup; ++quarter) maximum = larger(shared_.maxima[quarter][row], maximum);
    return maximum;
  }
  // Reads the sums of a split; a barrier after `weigh` has been passed.
  FD_DEVICE void read_sums(PartSums (&sums)[2][2]) const {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;
      for (int quarter = 0; quarter < kWarpsPerGroup; ++quarter) sum += shared_.sums[quarter][row(m, 2 * h)];
      sums[m][h] = {read_maximum(row(m, 2 * h)), sum};
    }
  }

  // Merges the next part into a total, or begins one with it.
  FD_DEVICE static void merge(Values& total, PartSums (&sums)[2][2], const Values& next,
                              const PartSums (&next_sums)[2][2], bool is_first) {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) {
      MergeFactors factors{0.0f, 1.0f};
      if (is_first)
        sums[m][h] = next_sums[m][h];
      else
        factors = merge_sums(sums[m][h], next_sums[m][h]);
      FD_UNROLL
      for (int n = 0; n < Config::kNTiles; ++n) FD_UNROLL
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        float& value = total.sums[m][n][i];
        value = is_first ? next.sums[m][n][i] : merge_values(value, next.sums[m][n][i], factors);
      }
    }
  }

  // Stores the values of a group of splits, merged with those of the groups before it in this item.
  FD_DEVICE void store_group(int64_t slot, const Values& group, const PartSums (&sums)[2][2], PartSums (&total)[2][2],
                             bool is_first) {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h) {
      MergeFactors factors{0.0f, 1.0f};
      if (is_first)
        total[m][h] = sums[m][h];
      else
        factors = merge_sums(total[m][h], sums[m][h]);
      if (row(m, 2 * h) >= item_.num_rows) continue;
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
    }
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

  FD_DEVICE void store_sums(int64_t slot, const PartSums (&total)[2][2]) const {
    FD_UNROLL
    for (int m = 0; m < 2; ++m) FD_UNROLL
    for (int h = 0; h < 2; ++h)
      if (row(m, 2 * h) < item_.num_rows) arrays_.sums[slot + row(m, 2 * h)] = bit_cast<uint64_t>(total[m][h]);
  }

  Shared& shared_;
  const AttentionArrays& arrays_;
  const AttentionSizes& sizes_;
  const int thread_ = static_cast<int>(thread_index()), lane_ = static_cast<int>(lane_index()),
            warp_ = static_cast<int>(warp_index());
  const int quarter_ = warp_ % kWarpsPerGroup;
  Products products_;
  PlanItem item_;
  int kv_head_, seq_;
  int end_;          // of the positions that any row of the item attends to
  int first_limit_;  // all rows attend to the positions up to this one
};

}  // namespace fd::gpu
