// SPDX-License-Identifier: Apache-2.0
// Append attention over a paged cache in one launch: blocks stride over the items of a plan, and the one that ends last
// among those of a tile merges their results.
//
// Occupancy is below 25 % on purpose. Two blocks of a multiprocessor have 32 KiB or more of copies under way, more than
// its share of the memory's bandwidth times latency (about 25 KiB); more warps would wait for the same bytes, and fewer
// registers would not hold the scores of a split and the values of a group.

#include "common/export.h"
#include "gpu_ops/attention_item.h"
#include "gpu_ops/count.h"

namespace {

using namespace fd::gpu;

// Merges the partial results of the rows of a tile and writes their outputs.
template <class Config>
class TileMerge {
 public:
  FD_DEVICE TileMerge(const AttentionArrays& arrays, const AttentionSizes& sizes, const PlanTile& tile, int kv_head)
      : arrays_(arrays), sizes_(sizes), tile_(tile), kv_head_(kv_head) {}

  // first_slot: of the KV head, or of the rows themselves if the tile has one item.
  FD_DEVICE void run(int64_t first_slot, uint16_t* out) const {
    constexpr int kRowThreads = Config::kHeadDim / kElements;
    const int thread = static_cast<int>(thread_index());
    for (int row = thread / kRowThreads; row < tile_.num_rows; row += Config::kThreads / kRowThreads)
      merge_row(first_slot, row, thread % kRowThreads * kElements, out);
  }

 private:
  static constexpr int kElements = 4;  // of a row, for each thread

  struct Part {
    PartSums sums;
    float values[kElements];

    FD_DEVICE void merge(const Part& next) {
      const MergeFactors factors = merge_sums(sums, next.sums);
      for (int i = 0; i < kElements; ++i) values[i] = merge_values(values[i], next.values[i], factors);
    }
  };

  FD_DEVICE Part load(int64_t slot, int element) const {
    Part part{bit_cast<PartSums>(arrays_.sums[slot]), {}};
    const Bytes16 bytes = load16(arrays_.values + slot * Config::kHeadDim + element);
    for (int i = 0; i < kElements; ++i) part.values[i] = bit_cast<float>(bytes.word[i]);
    return part;
  }

  FD_DEVICE void merge_row(int64_t first_slot, int row, int element, uint16_t* out) const {
    PlanMember member = load_record(arrays_.members + tile_.member);
    for (int i = 1; row >= member.at + member.count && i < tile_.num_members; ++i)
      member = load_record(arrays_.members + tile_.member + i);
    // The total of the groups before the one that is being merged, if there are any, and that group.
    Part total, group;
    bool has_total = false, has_group = false;
    const auto add = [&](SplitRange splits, int64_t slot) {
      const Part part = load(slot, element);
      if (has_group && splits.first % kGroupSplits != 0) {
        group.merge(part);
        return;
      }
      if (has_total) total.merge(group);
      if (has_group && !has_total) total = group;
      has_total = has_group;
      has_group = true;
      group = part;
    };
    if (tile_.num_items == 1) {
      add({0, 1}, first_slot + row);
    } else {
      const SplitRange shared{0, tile_.shared_splits}, own{tile_.shared_splits, member.end_split};
      for (int i = 0; i < count_items(shared, tile_.mode); ++i)
        add(item_splits(shared, tile_.mode, i), first_slot + tile_.slot + i * tile_.num_rows + row);
      for (int i = 0; i < count_items(own, tile_.mode); ++i)
        add(item_splits(own, tile_.mode, i), first_slot + member.slot + i * member.count + row - member.at);
    }
    if (has_total) {
      total.merge(group);
      group = total;
    }
    store_row(group, member, row - member.at, element, out);
  }

  FD_DEVICE void store_row(const Part& part, const PlanMember& member, int row, int element, uint16_t* out) const {
    const int heads_per_kv = sizes_.num_heads / sizes_.kv_heads, query_row = member.first + row;
    const int64_t new_row = member.first_row + query_row / heads_per_kv;
    const int64_t head = new_row * sizes_.num_heads + kv_head_ * heads_per_kv + query_row % heads_per_kv;
    const float inverse = divide(1.0f, part.sums.sum);
    float results[kElements];
    for (int i = 0; i < kElements; ++i) results[i] = part.values[i] * inverse + 0.0f;  // zeros become positive
    const uint64_t low = round_bf16x2(results[0], results[1]), high = round_bf16x2(results[2], results[3]);
    *reinterpret_cast<uint64_t*>(out + head * Config::kHeadDim + element) = low | high << 32;
  }

  const AttentionArrays& arrays_;
  const AttentionSizes& sizes_;
  const PlanTile& tile_;
  const int kv_head_;
};

template <class Config>
FD_KERNEL void attend(In<uint16_t> qkv, In<uint8_t> key, In<uint8_t> value, In<int32_t> block_tables,
                      In<int32_t> num_items, In<PlanTile> tiles, In<PlanMember> members, In<PlanItem> items,
                      Scratch<float> values, Scratch<uint64_t> sums, Out<int32_t> arrivals, Out<uint16_t> out,
                      AttentionSizes sizes) {
  const AttentionArrays arrays{qkv.data, key.data, value.data, block_tables.data, members.data, values.data, sums.data};
  const int count = num_items.data[0] * sizes.kv_heads, block = static_cast<int>(block_index().x);
  for (int i = block; i < count; i += static_cast<int>(grid_size().x)) {
    const PlanItem item = load_record(items.data + i / sizes.kv_heads);
    const int kv_head = i % sizes.kv_heads;
    const int64_t head_slots = int64_t{kv_head} * sizes.num_slots;
    const int64_t own_slots = int64_t{sizes.kv_heads} * sizes.num_slots + int64_t{block} * Config::kTileRows;
    const int64_t slot = item.slot < 0 ? own_slots : head_slots + item.slot;
    auto& shared = shared_memory<AttentionShared<Config>>();
    if (item.num_rows <= kGroupRows / 2)
      AttentionBlock<Config, 1>(shared, arrays, sizes).run(item, kv_head, slot);
    else
      AttentionBlock<Config, 2>(shared, arrays, sizes).run(item, kv_head, slot);
    if (item.num_items == 1)
      sync_block();
    else if (!last_block(arrivals.data + int64_t{item.tile} * sizes.kv_heads + kv_head, item.num_items))
      continue;
    const PlanTile tile = load_record(tiles.data + item.tile);
    TileMerge<Config>(arrays, sizes, tile, kv_head).run(item.slot < 0 ? own_slots : head_slots, out.data);
  }
}

// The arguments of one launch.
struct Arguments {
  const uint16_t* qkv;
  const uint8_t *key, *value;
  int64_t num_blocks;
  const int32_t* block_tables;
  const Record* plan;
  int64_t max_tiles, max_items;
  float* values;
  uint64_t* sums;
  int32_t* arrivals;
  uint16_t* out;
  int64_t num_rows, num_seqs, grid;
  AttentionSizes sizes;
  void* stream;
};

template <class Config>
int launch_attend(const Arguments& a) {
  const AttentionSizes& s = a.sizes;
  const auto rows = static_cast<size_t>(a.num_rows), tiles = static_cast<size_t>(a.max_tiles),
             heads = static_cast<size_t>(s.num_heads), kv_heads = static_cast<size_t>(s.kv_heads),
             items = static_cast<size_t>(a.max_items), tables = static_cast<size_t>(a.num_seqs * s.max_blocks),
             slots = kv_heads * static_cast<size_t>(s.num_slots) + static_cast<size_t>(a.grid) * Config::kTileRows;
  const size_t cache = static_cast<size_t>(a.num_blocks * s.kv_heads * s.block_size) *
                       (Config::Layout::kRowBytes + Config::Layout::kScaleBytes);
  return launch(attend<Config>, {static_cast<unsigned>(a.grid), 1, 1}, Config::kThreads,
                sizeof(AttentionShared<Config>), a.stream,
                In<uint16_t>(a.qkv, rows * (heads + 2 * kv_heads) * Config::kHeadDim), In<uint8_t>(a.key, cache),
                In<uint8_t>(a.value, cache), In<int32_t>(a.block_tables, tables),
                In<int32_t>(reinterpret_cast<const int32_t*>(a.plan), 1),
                In<PlanTile>(reinterpret_cast<const PlanTile*>(a.plan + 1), tiles),
                In<PlanMember>(reinterpret_cast<const PlanMember*>(a.plan + 1 + tiles), tiles),
                In<PlanItem>(reinterpret_cast<const PlanItem*>(a.plan + 1 + 2 * tiles), items),
                Scratch<float>(a.values, slots * Config::kHeadDim), Scratch<uint64_t>(a.sums, slots),
                Out<int32_t>(a.arrivals, tiles * kv_heads), Out<uint16_t>(a.out, rows * heads * Config::kHeadDim), s);
}

template <int kHeadDim, bool kIsInt8>
int launch_for_rows(int64_t tile_rows, const Arguments& a) {
  if constexpr (kHeadDim < 256)
    if (tile_rows == 2 * kGroupRows) return launch_attend<AttentionConfig<kHeadDim, 2, kIsInt8>>(a);
  FD_REQUIRE("append_attention", tile_rows, tile_rows == kGroupRows, "32, or 64 for a head_dim of 64 or 128");
  return launch_attend<AttentionConfig<kHeadDim, 1, kIsInt8>>(a);
}

template <bool kIsInt8>
int launch_for_head_dim(int64_t head_dim, int64_t tile_rows, const Arguments& a) {
  if (head_dim == 64) return launch_for_rows<64, kIsInt8>(tile_rows, a);
  if (head_dim == 128) return launch_for_rows<128, kIsInt8>(tile_rows, a);
  return launch_for_rows<256, kIsInt8>(tile_rows, a);
}

}  // namespace

// Attends causally over the cache, which holds the keys and values of the new rows already.
//
// qkv: [num_rows, (num_heads + 2 kv_heads) head_dim] bfloat16, queries rotated; out: [num_rows, num_heads head_dim].
// plan: as fd_plan_attention wrote it. values: [kv_heads num_slots + grid tile_rows, head_dim] fp32 and sums [.., 2]
// fp32: partial results. arrivals: [max_tiles, kv_heads] int32, zero before and after. num_rows, num_seqs: capacities.
FD_EXPORT int fd_attend(const uint16_t* qkv, const uint8_t* key, const uint8_t* value, int64_t num_blocks,
                        const int32_t* block_tables, int64_t table_stride, const int32_t* plan, int64_t max_tiles,
                        int64_t max_items, float* values, uint64_t* sums, int64_t num_slots, int32_t* arrivals,
                        uint16_t* out, int64_t num_rows, int64_t num_seqs, int64_t num_heads, int64_t kv_heads,
                        int64_t head_dim, int64_t block_size, int64_t is_int8, int64_t tile_rows, int64_t grid,
                        int64_t num_masked_prefix, double scale, void* stream) {
  const char* op = "append_attention";
  FD_REQUIRE(op, head_dim, head_dim == 64 || head_dim == 128 || head_dim == 256, "64, 128 or 256");
  FD_REQUIRE(op, kv_heads, kv_heads > 0 && num_heads % kv_heads == 0, "a divisor of num_heads");
  FD_REQUIRE(op, num_masked_prefix, num_masked_prefix >= 0 && num_masked_prefix <= 16, "0 to 16");
  if (num_rows == 0) return kSuccess;
  const auto narrow = [](int64_t number) { return static_cast<int32_t>(number); };
  constexpr double kLog2E = 1.4426950408889634;
  const AttentionSizes sizes{narrow(num_heads),
                             narrow(kv_heads),
                             narrow(block_size),
                             narrow(table_stride),
                             narrow(num_masked_prefix),
                             narrow(num_slots),
                             static_cast<float>(scale * kLog2E)};
  const Arguments arguments{
      qkv,       key,       value,  num_blocks, block_tables, reinterpret_cast<const Record*>(plan),
      max_tiles, max_items, values, sums,       arrivals,     out,
      num_rows,  num_seqs,  grid,   sizes,      stream};
  return is_int8 ? launch_for_head_dim<true>(head_dim, tile_rows, arguments)
                 : launch_for_head_dim<false>(head_dim, tile_rows, arguments);
}
