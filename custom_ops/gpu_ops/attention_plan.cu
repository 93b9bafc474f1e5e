// SPDX-License-Identifier: Apache-2.0
// Plans the work of append attention: one block reads the lengths and block tables of a step, which may exist on the
// device only, and writes tiles, members and items (attention_plan.h).

#include "gpu_ops/attention_plan.h"

#include "common/export.h"
#include "gpu_ops/count.h"

namespace {

using namespace fd::gpu;

constexpr int kThreads = 256, kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kMaxSeqs = 2048;
constexpr int32_t kAlone = -1;  // key of a sequence that shares a tile with no other one

struct Shared {
  int32_t key[kMaxSeqs];  // by sequence: its first block
  // In the order of keys:
  int32_t order[kMaxSeqs];       // the sequence
  int32_t common[kMaxSeqs];      // splits in common with the one before
  int32_t group_size[kMaxSeqs];  // members of the tile that begins here, or 0
  int32_t shared[kMaxSeqs];      // splits that they share
  int32_t at[kMaxSeqs];          // where its rows begin in the tile
  int32_t tile[kMaxSeqs];        // its first tile
  int32_t member[kMaxSeqs];      // its first member
  int32_t warp_sums[kWarps];
};

struct Sizes {
  int32_t max_seqs, max_blocks, block_size, heads_per_kv, kv_heads;
  int32_t tile_rows;   // query rows of a tile
  int32_t num_blocks;  // of the attention kernel
  int32_t num_slots;   // rows of partial results per KV head
};

// What a thread of the planning block works with.
struct Planner {
  Shared& shared;
  const Sizes& sizes;
  const int32_t *cu_seqlens_q, *kv_lens, *block_tables;
  PlanTile* tiles;
  PlanMember* members;
  PlanItem* items;
  int32_t num_seqs;
  int thread = static_cast<int>(thread_index()), warp = static_cast<int>(warp_index()),
      lane = static_cast<int>(lane_index());

  FD_DEVICE int32_t num_new(int32_t seq) const { return cu_seqlens_q[seq + 1] - cu_seqlens_q[seq]; }
  FD_DEVICE int32_t num_rows(int32_t seq) const { return num_new(seq) * sizes.heads_per_kv; }
  FD_DEVICE int32_t first_position(int32_t seq) const { return kv_lens[seq] - num_new(seq); }
  FD_DEVICE int32_t key_of(int32_t seq) const {
    const int32_t rows = num_rows(seq);
    const bool may_share = rows > 0 && 2 * rows <= sizes.tile_rows && first_position(seq) >= kSplit;
    return may_share ? block_tables[static_cast<int64_t>(seq) * sizes.max_blocks] : kAlone;
  }
  FD_DEVICE int32_t key_at(int32_t place) const { return shared.key[shared.order[place]]; }

  // Returns the sum of the values of the threads before this one; `total` becomes that of all.
  FD_DEVICE int32_t scan(int32_t value, int32_t& total) {
    int32_t sum = value;
    for (int distance = 1; distance < static_cast<int>(kWarpSize); distance *= 2) {
      const int32_t other = shuffle(sum, static_cast<unsigned>(lane - distance) % kWarpSize);
      if (lane >= distance) sum += other;
    }
    sync_block();  // the sums of the previous call have been read
    if (lane == static_cast<int>(kWarpSize) - 1) shared.warp_sums[warp] = sum;
    sync_block();
    int32_t before = sum - value;
    total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += shared.warp_sums[w];
      total += shared.warp_sums[w];
    }
    return before;
  }

  // Sorts sequences by their first block, and those with the same one by number.
  FD_DEVICE void sort() {
    for (int32_t seq = thread; seq < num_seqs; seq += kThreads) shared.key[seq] = key_of(seq);
    sync_block();
    for (int32_t seq = thread; seq < num_seqs; seq += kThreads) {
      const int32_t key = shared.key[seq];
      int32_t place = 0;
      for (int32_t other = 0; other < num_seqs; ++other)
        place += shared.key[other] < key || (shared.key[other] == key && other < seq);
      shared.order[place] = seq;
    }
    sync_block();
  }

  // Counts the splits before the new rows of both that a sequence has in common with the one before: a warp for each.
  FD_DEVICE void compare_neighbours() {
    for (int32_t place = warp; place < num_seqs; place += kWarps) {
      int32_t common = 0;
      if (place > 0 && key_at(place) != kAlone && key_at(place) == key_at(place - 1))
        common = common_splits(shared.order[place - 1], shared.order[place]);
      if (lane == 0) shared.common[place] = common;
    }
    sync_block();
  }
  FD_DEVICE int32_t common_splits(int32_t a, int32_t b) const {
    const int32_t *blocks_a = block_tables + static_cast<int64_t>(a) * sizes.max_blocks,
                  *blocks_b = block_tables + static_cast<int64_t>(b) * sizes.max_blocks;
    const int32_t first_a = first_position(a), first_b = first_position(b);
    const int32_t splits = (first_a < first_b ? first_a : first_b) / kSplit;
    const int32_t num_blocks = (splits * kSplit + sizes.block_size - 1) / sizes.block_size;
    for (int32_t begin = 0; begin < num_blocks; begin += static_cast<int32_t>(kWarpSize)) {
      const int32_t i = begin + lane;
      const uint32_t different = warp_ballot(i < num_blocks && blocks_a[i] != blocks_b[i]);
      if (different == 0) continue;
      const int32_t equal = begin + __builtin_popcount((different & -different) - 1);
      return equal * sizes.block_size / kSplit;
    }
    return splits;
  }

  // Forms tiles of neighbours that share splits; one thread for all sequences with the same first block.
  FD_DEVICE void form_tiles(bool may_share) {
    for (int32_t place = thread; place < num_seqs; place += kThreads) {
      const int32_t key = key_at(place);
      if (key == kAlone || !may_share) {
        shared.group_size[place] = 1;
        shared.shared[place] = shared.at[place] = 0;
      } else if (place == 0 || key_at(place - 1) != key) {
        int32_t end = place + 1;
        while (end < num_seqs && key_at(end) == key) ++end;
        for (int32_t begin = place; begin < end;) begin = form_tile(begin, end);
      }
    }
    sync_block();
  }
  // Forms the tile that begins at `begin`; a neighbour joins if that lets more splits be read once.
  FD_DEVICE int32_t form_tile(int32_t begin, int32_t end) {
    int32_t rows = num_rows(shared.order[begin]), splits = 0, next = begin + 1;
    shared.at[begin] = 0;
    for (; next < end; ++next) {
      const int32_t more = num_rows(shared.order[next]), size = next - begin;
      const int32_t common = size > 1 && splits < shared.common[next] ? splits : shared.common[next];
      if (rows + more > sizes.tile_rows || size * common <= (size - 1) * splits) break;
      splits = common;
      shared.at[next] = rows;
      shared.group_size[next] = 0;
      rows += more;
    }
    shared.group_size[begin] = next - begin;
    shared.shared[begin] = splits;
    return next;
  }

  // Writes members and what tiles have of them; returns the number of tiles.
  FD_DEVICE int32_t write_members() {
    int32_t num_tiles = 0, num_members = 0;
    for (int32_t begin = 0; begin < num_seqs; begin += kThreads) {
      const int32_t place = begin + thread;
      int32_t tiles_here = 0, members_here = 0, total;
      if (place < num_seqs) {
        const int32_t pieces = (num_rows(shared.order[place]) + sizes.tile_rows - 1) / sizes.tile_rows;
        tiles_here = shared.group_size[place] == 0 ? 0 : pieces;
        members_here = pieces;
      }
      const int32_t tile = num_tiles + scan(tiles_here, total);
      num_tiles += total;
      const int32_t member = num_members + scan(members_here, total);
      num_members += total;
      if (place < num_seqs) {
        shared.tile[place] = tile;
        shared.member[place] = member;
      }
    }
    sync_block();
    for (int32_t place = warp; place < num_seqs; place += kWarps) {
      const int32_t rows = num_rows(shared.order[place]), size = shared.group_size[place];
      for (int32_t piece = lane; piece * sizes.tile_rows < rows; piece += static_cast<int32_t>(kWarpSize)) {
        const int32_t count = rows - piece * sizes.tile_rows;
        const int32_t own = write_member(place, piece, count < sizes.tile_rows ? count : sizes.tile_rows);
        if (size == 0) continue;
        const int32_t last = place + size - 1;
        const int32_t all = size == 1 ? own : shared.at[last] + num_rows(shared.order[last]);
        store_record(tiles + shared.tile[place] + piece,
                     {shared.member[place] + piece, size, all, shared.shared[place], 0, 0, 0, 0});
      }
    }
    sync_block();
    return num_tiles;
  }
  FD_DEVICE int32_t write_member(int32_t place, int32_t piece, int32_t count) {
    const int32_t seq = shared.order[place], first = piece * sizes.tile_rows, position = first_position(seq);
    const int32_t last = position + (first + count - 1) / sizes.heads_per_kv;
    store_record(members + shared.member[place] + piece,
                 {seq, first, count, shared.at[place], last / kSplit + 1, 0, cu_seqlens_q[seq], position});
    return count;
  }

  struct Amount {
    int32_t items, slots;
  };
  // Counts what a tile needs; with `slot`, notes where its members' own items begin.
  FD_DEVICE Amount measure(const PlanTile& tile, int32_t mode, int32_t slot = -1) {
    Amount needed{count_items({0, tile.shared_splits}, mode), 0};
    needed.slots = needed.items * tile.num_rows;
    for (int32_t i = tile.member; i < tile.member + tile.num_members; ++i) {
      if (slot >= 0) members[i].slot = slot + needed.slots;
      const int32_t own = count_items({tile.shared_splits, members[i].end_split}, mode);
      needed.items += own;
      needed.slots += own * members[i].count;
    }
    if (needed.items == 1) needed.slots = 0;
    return needed;
  }

  FD_DEVICE PlanTile tile_at(int32_t index) const {
    const PlanTile& t = tiles[index];
    return {t.member, t.num_members, t.num_rows, t.shared_splits, t.slot, t.first_item, t.num_items, t.mode};
  }

  // Returns the mode, or -1 if only tiles without sharing fit.
  FD_DEVICE int32_t choose_mode(int32_t num_tiles) {
    int32_t sums[4] = {0, 0, 0, 0}, totals[4];  // groups, slots of groups, slots of single splits, shared splits
    for (int32_t t = thread; t < num_tiles; t += kThreads) {
      const PlanTile tile = tile_at(t);
      const Amount groups = measure(tile, kGroups);
      sums[0] += groups.items;
      sums[1] += groups.slots;
      sums[2] += measure(tile, kSingleSplits).slots;
      sums[3] += tile.shared_splits;
    }
    for (int i = 0; i < 4; ++i) scan(sums[i], totals[i]);
    if (totals[0] * sizes.kv_heads < sizes.num_blocks && totals[2] <= sizes.num_slots) return kSingleSplits;
    if (totals[1] <= sizes.num_slots) return kGroups;
    return totals[3] == 0 ? kAllSplits : -1;
  }

  // Completes tiles and members; returns the number of items.
  FD_DEVICE int32_t assign_slots(int32_t num_tiles, int32_t mode) {
    int32_t num_items = 0, num_slots = 0;
    for (int32_t begin = 0; begin < num_tiles; begin += kThreads) {
      const int32_t t = begin + thread;
      PlanTile tile{};
      Amount needed{0, 0};
      if (t < num_tiles) needed = measure(tile = tile_at(t), mode);
      int32_t total;
      const int32_t first_item = num_items + scan(needed.items, total);
      num_items += total;
      const int32_t slot = num_slots + scan(needed.slots, total);
      num_slots += total;
      if (t >= num_tiles) continue;
      measure(tile, mode, slot);
      store_record(tiles + t, {tile.member, tile.num_members, tile.num_rows, tile.shared_splits, slot, first_item,
                               needed.items, mode});
    }
    sync_block();
    return num_items;
  }

  FD_DEVICE void write_items(int32_t num_tiles, int32_t mode) {
    for (int32_t t = warp; t < num_tiles; t += kWarps) {
      const PlanTile tile = tile_at(t);
      int32_t next =
          write_items(tile, {0, tile.shared_splits}, tile.first_item,
                      {t, tile.member, tile.num_members, tile.num_rows, 0, 0, tile.slot, tile.num_items}, mode);
      for (int32_t m = tile.member; m < tile.member + tile.num_members; ++m)
        next = write_items(tile, {tile.shared_splits, members[m].end_split}, next,
                           {t, m, 1, members[m].count, 0, 0, members[m].slot, tile.num_items}, mode);
    }
  }
  // Writes the items of a range from number `first` on; returns the number after them.
  FD_DEVICE int32_t write_items(const PlanTile& tile, SplitRange range, int32_t first, const PlanItem& like,
                                int32_t mode) {
    const int32_t count = count_items(range, mode);
    for (int32_t i = lane; i < count; i += static_cast<int32_t>(kWarpSize)) {
      PlanItem item = like;
      const SplitRange splits = item_splits(range, mode, i);
      item.first_split = splits.first;
      item.end_split = splits.end;
      item.slot = tile.num_items == 1 ? -1 : like.slot + i * like.num_rows;
      store_record(items + first + i, item);
    }
    return first + count;
  }
};

FD_KERNEL void plan_attention(In<int32_t> cu_seqlens_q, In<int32_t> kv_lens, In<int32_t> block_tables,
                              In<int32_t> device_seqs, Out<PlanTile> tiles, Out<PlanMember> members,
                              Out<PlanItem> items, Out<int32_t> num_items, Sizes sizes) {
  Planner planner{shared_memory<Shared>(),
                  sizes,
                  cu_seqlens_q.data,
                  kv_lens.data,
                  block_tables.data,
                  tiles.data,
                  members.data,
                  items.data,
                  read_count(device_seqs, sizes.max_seqs)};
  planner.sort();
  planner.compare_neighbours();
  int32_t mode = -1, num_tiles = 0;
  for (int attempt = 0; mode < 0; ++attempt) {
    planner.form_tiles(attempt == 0);
    num_tiles = planner.write_members();
    mode = planner.choose_mode(num_tiles);
  }
  const int32_t count = planner.assign_slots(num_tiles, mode);
  planner.write_items(num_tiles, mode);
  if (thread_index() == 0) num_items.data[0] = count;
}

}  // namespace

// Plans a call of append attention.
//
// plan: [1 + 2 max_tiles + max_items, 8] int32: the number of items, then tiles, members and items. max_tiles is at
// least max_seqs plus the query rows of a KV head divided by tile_rows; max_items is at least max_tiles + num_slots.
// table_stride: entries from one block table to the next.
FD_EXPORT int fd_plan_attention(const int32_t* cu_seqlens_q, const int32_t* kv_lens, const int32_t* block_tables,
                                int64_t table_stride, const int32_t* device_seqs, int64_t num_seqs, int32_t* plan,
                                int64_t max_tiles, int64_t max_items, int64_t block_size, int64_t heads_per_kv,
                                int64_t kv_heads, int64_t tile_rows, int64_t num_blocks, int64_t num_slots,
                                void* stream) {
  FD_REQUIRE("append_attention", num_seqs, num_seqs >= 0 && num_seqs <= kMaxSeqs, "0 to 2048");
  FD_REQUIRE("append_attention", block_size, block_size > 0 && block_size % 16 == 0, "a multiple of 16");
  const auto seqs = static_cast<size_t>(num_seqs), tiles = static_cast<size_t>(max_tiles),
             items = static_cast<size_t>(max_items);
  auto* records = reinterpret_cast<Record*>(plan);
  const auto narrow = [](int64_t value) { return static_cast<int32_t>(value); };
  const Sizes sizes{narrow(num_seqs), narrow(table_stride), narrow(block_size), narrow(heads_per_kv),
                    narrow(kv_heads), narrow(tile_rows),    narrow(num_blocks), narrow(num_slots)};
  return launch(
      plan_attention, {1, 1, 1}, kThreads, sizeof(Shared), stream, In<int32_t>(cu_seqlens_q, seqs + 1),
      In<int32_t>(kv_lens, seqs), In<int32_t>(block_tables, seqs * static_cast<size_t>(table_stride)),
      Count{device_seqs, narrow(num_seqs)}.array(), Out<PlanTile>(reinterpret_cast<PlanTile*>(records + 1), tiles),
      Out<PlanMember>(reinterpret_cast<PlanMember*>(records + 1 + tiles), tiles),
      Out<PlanItem>(reinterpret_cast<PlanItem*>(records + 1 + 2 * tiles), items), Out<int32_t>(plan, 1), sizes);
}
