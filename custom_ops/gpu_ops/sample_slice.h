// SPDX-License-Identifier: Apache-2.0
// A slice of a row of logits in the registers of a block, with the row's biases, penalties, bans and mask. Unlike those
// of logits_slice.h, slices begin at multiples of 8,192 ids, so that a thread holds all ids of a random counter.
#pragma once

#include "common/sampling_rules.h"
#include "gpu_ops/logits_slice.h"

namespace fd::gpu {

constexpr int kGroupIds = 4;  // ids that are loaded at once, and have one counter of the random generator
constexpr int kGroups = kSliceIds / kSliceThreads / kGroupIds;  // of a thread
constexpr int kBiasTile = 128;
constexpr uint32_t kBannedBit = 0x80000000u;

// Logits of a thread: group g holds the ids from first + 4 (thread + 256 g) on.
struct SliceValues {
  float x[kGroups][kGroupIds];
};

// What edits the logits of a row.
struct EditLists {
  const int32_t* history;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* banned_ids;
  const int32_t* mask_words;
  int64_t num_mask_words;
};

// Entries of the lists of a call. Ranges of rows are cut to them, so that no row makes a launch read other memory.
struct ListSizes {
  int64_t history, bias, banned, mask_words;

  // Returns the largest value of a column of the parameters, -1 for those that are no places of a list.
  FD_DEVICE int64_t limit_of(int column) const {
    if (column >= kHistoryBegin && column <= kHistoryEnd) return history;
    if (column == kBiasBegin || column == kBiasEnd) return bias;
    return column == kBannedBegin || column == kBannedEnd ? banned : -1;
  }
};

constexpr int kBins = 1024;

// The histogram of a slice, or of a row.
struct Histogram {
  uint64_t masses[kBins];
  int32_t counts[kBins];
};

struct SliceMemory {
  union {
    alignas(16) uint32_t words[kSliceIds];  // logits, or for each id: banned (highest bit), twice its occurrences in
                                            // the output, and 1 if it is in the history
    Histogram histogram;
  };
  int32_t bias_ids[kBiasTile];
  float bias_values[kBiasTile];
  float float_params[kNumFloatParams];
  int64_t int_params[kNumIntParams];
};

FD_DEVICE int group_offset(int group) { return kGroupIds * (static_cast<int>(thread_index()) + kSliceThreads * group); }

// Loads the parameters of a row, which a thread each has read. Ends with a barrier.
FD_DEVICE RowParams load_params(SliceMemory& memory, const float* float_params, const int64_t* int_params, int row,
                                const ListSizes& sizes) {
  const int thread = static_cast<int>(thread_index()), column = thread - static_cast<int>(kWarpSize);
  if (thread < kNumFloatParams) memory.float_params[thread] = float_params[int64_t{row} * kNumFloatParams + thread];
  if (column >= 0 && column < kNumIntParams) {
    int64_t value = int_params[int64_t{row} * kNumIntParams + column];
    if (const int64_t limit = sizes.limit_of(column); limit >= 0) value = value < 0 ? 0 : value < limit ? value : limit;
    memory.int_params[column] = value;
  }
  sync_block();
  return {memory.float_params, memory.int_params};
}

FD_DEVICE void read_group(const SliceMemory& memory, int group, float (&x)[kGroupIds]) {
  const Bytes16 bytes = load16(memory.words + group_offset(group));
  FD_UNROLL
  for (int j = 0; j < kGroupIds; ++j) x[j] = bit_cast<float>(bytes.word[j]);
}

// Each thread reads and writes its own groups.
FD_DEVICE void read_groups(const SliceMemory& memory, SliceValues& v) {
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) read_group(memory, g, v.x[g]);
}

FD_DEVICE void write_groups(SliceMemory& memory, const SliceValues& v) {
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    Bytes16 group;
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j) group.word[j] = bit_cast<uint32_t>(v.x[g][j]);
    store16(memory.words + group_offset(g), group);
  }
}

// Returns whether every row begins at a multiple of 16 bytes.
FD_DEVICE bool has_aligned_rows(const float* logits, int32_t vocab_size) {
  return vocab_size % kGroupIds == 0 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
}

// Loads the ids from `first` on, -inf from num_ids on. In rows that are not aligned, lanes load neighbouring ids, and
// exchange them through shared memory.
FD_DEVICE void load_logits(SliceMemory& memory, const float* row, bool is_aligned, int32_t first, int32_t num_ids,
                           SliceValues& v) {
  if (is_aligned) {
    FD_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int32_t id = first + group_offset(g);
      const Bytes16 group = id < num_ids ? load16(row + id) : Bytes16{};
      FD_UNROLL
      for (int j = 0; j < kGroupIds; ++j)
        v.x[g][j] = id + j < num_ids ? bit_cast<float>(group.word[j]) : kMinusInfinity;
    }
    return;
  }
  sync_block();
  for (int i = static_cast<int>(thread_index()); i < kSliceIds; i += kSliceThreads) {
    const float x = first + i < num_ids ? row[first + i] : kMinusInfinity;
    memory.words[i] = bit_cast<uint32_t>(x);
  }
  sync_block();
  read_groups(memory, v);
}

// Adds the biases in the order of their list: each thread adds those of its own ids.
FD_DEVICE void add_biases(SliceMemory& memory, const RowParams& row, const EditLists& lists, int32_t first,
                          SliceValues& v) {
  const int thread = static_cast<int>(thread_index());
  write_groups(memory, v);
  for (int64_t begin = row.i[kBiasBegin]; begin < row.i[kBiasEnd]; begin += kBiasTile) {
    const int64_t left = row.i[kBiasEnd] - begin;
    const int count = left < kBiasTile ? static_cast<int>(left) : kBiasTile;
    sync_block();
    if (thread < count) {
      memory.bias_ids[thread] = lists.bias_ids[begin + thread];
      memory.bias_values[thread] = lists.bias_values[begin + thread];
    }
    sync_block();
    for (int k = 0; k < count; ++k) {
      const int32_t id = memory.bias_ids[k];
      if (id < first || id >= first + kSliceIds || (id - first) / kGroupIds % kSliceThreads != thread) continue;
      uint32_t& word = memory.words[id - first];
      word = bit_cast<uint32_t>(ScalarLanes::add(bit_cast<float>(word), memory.bias_values[k]));
    }
  }
  read_groups(memory, v);
}

// Penalises the ids of the history and bans ids. Every slice of a row reads the whole lists, 4 bytes an entry.
FD_DEVICE void penalise_and_ban(SliceMemory& memory, const RowParams& row, const EditLists& lists, int32_t first,
                                SliceValues& v) {
  const auto thread = static_cast<int64_t>(thread_index());
  sync_block();
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) store16(memory.words + group_offset(g), Bytes16{});
  sync_block();
  const auto has = [&](int32_t id) { return id >= first && id < first + kSliceIds; };
  if (row.penalised()) {
    int64_t begin = row.i[kHistoryBegin];
    const int64_t output = row.i[kOutputBegin];
    if (row.f[kRepetition] == 1.0f && output > begin) begin = output;  // the prompt changes nothing
    for (int64_t k = begin + thread; k < row.i[kHistoryEnd]; k += kSliceThreads) {
      const int32_t id = lists.history[k];
      if (!has(id)) continue;
      if (k >= output)
        atomic_add(reinterpret_cast<int32_t*>(&memory.words[id - first]), 2);
      else
        atomic_or(&memory.words[id - first], 1);
    }
  }
  for (int64_t k = row.i[kBannedBegin] + thread; k < row.i[kBannedEnd]; k += kSliceThreads)
    if (has(lists.banned_ids[k])) atomic_or(&memory.words[lists.banned_ids[k] - first], kBannedBit);
  sync_block();
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const Bytes16 group = load16(memory.words + group_offset(g));
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j) {
      const uint32_t seen = group.word[j] & ~kBannedBit;
      if (seen != 0) v.x[g][j] = penalised_logit(v.x[g][j], row, static_cast<int32_t>(seen >> 1));
      if (group.word[j] & kBannedBit) v.x[g][j] = kMinusInfinity;
    }
  }
}

// Edits the logits of a slice; ids from num_ids on remain -inf.
FD_DEVICE void edit_logits(SliceMemory& memory, const RowParams& row, const EditLists& lists, int32_t first,
                           int32_t num_ids, SliceValues& v) {
  if (row.biased()) add_biases(memory, row, lists, first, v);
  if (row.penalised() || row.bans()) penalise_and_ban(memory, row, lists, first, v);
  const auto mask_begin = static_cast<uint64_t>(row.i[kMaskBegin]);
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int32_t id = first + group_offset(g);
    int32_t allowed = -1;
    if (row.masked() && id < num_ids) {
      const uint64_t word = mask_begin + static_cast<uint32_t>(id / 32);
      allowed = word < static_cast<uint64_t>(lists.num_mask_words) ? lists.mask_words[word] >> (id % 32) : 0;
    }
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j)
      if (id + j >= num_ids || ((allowed >> j) & 1) == 0) v.x[g][j] = kMinusInfinity;
  }
}

// Where a row's logits lie, and what they become.
struct RowLogits {
  float* row;  // [vocab_size]
  int32_t vocab_size, num_ids;
  bool is_aligned;
  bool is_edited;  // the logits have been edited in place
};

FD_DEVICE void load_slice(SliceMemory& memory, const RowLogits& logits, const RowParams& row, const EditLists& lists,
                          int32_t first, SliceValues& v) {
  load_logits(memory, logits.row, logits.is_aligned, first, logits.num_ids, v);
  if (!logits.is_edited && row.edits()) edit_logits(memory, row, lists, first, logits.num_ids, v);
}

// Writes the ids of a slice back.
FD_DEVICE void store_slice(const RowLogits& logits, int32_t first, const SliceValues& v) {
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const int32_t id = first + group_offset(g);
    if (logits.is_aligned && id < logits.vocab_size) {
      Bytes16 group;
      FD_UNROLL
      for (int j = 0; j < kGroupIds; ++j) group.word[j] = bit_cast<uint32_t>(v.x[g][j]);
      store16(logits.row + id, group);
      continue;
    }
    FD_UNROLL
    for (int j = 0; j < kGroupIds; ++j)
      if (id + j < logits.vocab_size) logits.row[id + j] = v.x[g][j];
  }
}

// Divides the logits by the temperature.
FD_DEVICE void scale(SliceValues& v, float temperature) {
  if (temperature == 1.0f) return;
  FD_UNROLL
  for (int g = 0; g < kGroups; ++g) FD_UNROLL
  for (int j = 0; j < kGroupIds; ++j) v.x[g][j] = ScalarLanes::div(v.x[g][j], temperature);
}

}  // namespace fd::gpu
