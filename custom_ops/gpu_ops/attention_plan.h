// SPDX-License-Identifier: Apache-2.0
// The work of append attention as the planning kernel writes it (attention_plan.cu) and the attention kernel reads it.
//
// A query row is one query head of a new row, among the rows of its KV head: row i of a sequence is head i %
// heads_per_kv of its new row i / heads_per_kv. A tile is what one block holds at a time: query rows of one sequence,
// or all query rows of several sequences (its members) that begin with the same splits of the cache.
//
// Keys and values are divided into splits of 256 positions and groups of 8 splits, both at absolute positions. The
// result of a row is defined by them alone: the splits of a group are merged in order, then the groups in order.
// A tile is computed by one or more items, each for a range of splits; an item that begins inside a group is one split,
// so that every order is that of the definition.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

constexpr int kSplit = 256;      // positions
constexpr int kGroupSplits = 8;  // splits of a group

// How splits are divided into items: single splits where there are few rows, groups where there are many, and all
// splits of a tile in one item where the partial results of groups would not fit the scratch memory.
enum PlanMode : int32_t { kSingleSplits, kGroups, kAllSplits };

struct alignas(16) PlanTile {
  int32_t member, num_members;  // the first of its members
  int32_t num_rows;
  int32_t shared_splits;  // leading splits that all members share and that are computed once
  int32_t slot;           // of the first row of the first item in the scratch memory of a KV head
  int32_t first_item, num_items;
  int32_t mode;
};

struct alignas(16) PlanMember {
  int32_t seq;
  int32_t first, count;    // query rows of the sequence
  int32_t at;              // where they begin in the tile
  int32_t end_split;       // splits up to the last position that any of them attends to
  int32_t slot;            // of the first row of its first own item
  int32_t first_row;       // of the sequence, in qkv
  int32_t first_position;  // of that row
};

struct alignas(16) PlanItem {
  int32_t tile;
  int32_t member, num_members;
  int32_t num_rows;  // of these members
  int32_t first_split, end_split;
  int32_t slot;       // of the first row; -1: memory of the block, because the tile has no other item
  int32_t num_items;  // of the tile
};

struct Record {
  Bytes16 half[2];
};

// Loads a record that this launch does not write.
template <class T>
FD_DEVICE T load_record(const T* record) {
  const auto* halves = reinterpret_cast<const Bytes16*>(record);
  return bit_cast<T>(Record{{load16_readonly(halves), load16_readonly(halves + 1)}});
}
template <class T>
FD_DEVICE void store_record(T* record, const T& value) {
  const Record halves = bit_cast<Record>(value);
  store16(reinterpret_cast<Bytes16*>(record), halves.half[0]);
  store16(reinterpret_cast<Bytes16*>(record) + 1, halves.half[1]);
}

struct SplitRange {
  int32_t first, end;
  FD_DEVICE int32_t size() const { return end - first; }
};

FD_DEVICE int32_t next_group(int32_t split) { return (split + kGroupSplits - 1) / kGroupSplits * kGroupSplits; }

// The number of items for a range of splits.
FD_DEVICE int32_t count_items(SplitRange range, int32_t mode) {
  if (range.size() <= 0) return 0;
  if (mode == kAllSplits) return 1;
  if (mode == kSingleSplits) return range.size();
  const int32_t group = next_group(range.first);
  if (group >= range.end) return range.first % kGroupSplits == 0 ? 1 : range.size();
  return group - range.first + (range.end - group + kGroupSplits - 1) / kGroupSplits;
}

// The splits of item i of a range.
FD_DEVICE SplitRange item_splits(SplitRange range, int32_t mode, int32_t i) {
  if (mode == kAllSplits) return range;
  const int32_t singles = mode == kSingleSplits ? range.size() : next_group(range.first) - range.first;
  if (i < singles) return {range.first + i, range.first + i + 1};
  const int32_t first = next_group(range.first) + (i - singles) * kGroupSplits;
  return {first, first + kGroupSplits < range.end ? first + kGroupSplits : range.end};
}

}  // namespace fd::gpu
