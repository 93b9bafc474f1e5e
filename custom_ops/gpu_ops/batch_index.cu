// SPDX-License-Identifier: Apache-2.0
// Index arrays of a step (fastdeploy/ops/batch_index.py), and the rows of the next logits batch.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/device.h"
#include "gpu_ops/warp.h"

namespace {

using namespace fd::gpu;

constexpr int kThreads = 512;  // a thread for each request of a tile, and for each row
constexpr int kWarps = kThreads / static_cast<int>(kWarpSize);
constexpr int kMaxBlocks = 16;

// Sums over the requests of a tile, which end at each request: rows, and rows with logits.
struct Tile {
  int32_t row_ends[kThreads], logits_ends[kThreads];
  int32_t warp_rows[kWarps], warp_logits[kWarps];
};

// Fills the tile with the sums of its requests, to which `first_row` and `first_logits` are added. The first barrier
// comes before the ends of the previous requests are overwritten.
FD_DEVICE void sum_tile(Tile& tile, int32_t rows, int32_t logits, int32_t first_row, int32_t first_logits) {
  const unsigned warp = warp_index();
  int32_t row_end = sum_to_lane(rows), logits_end = sum_to_lane(logits);
  if (lane_index() == kWarpSize - 1) {
    tile.warp_rows[warp] = row_end;
    tile.warp_logits[warp] = logits_end;
  }
  sync_block();
  row_end += first_row;
  logits_end += first_logits;
  for (unsigned before = 0; before < warp; ++before) {
    row_end += tile.warp_rows[before];
    logits_end += tile.warp_logits[before];
  }
  tile.row_ends[thread_index()] = row_end;
  tile.logits_ends[thread_index()] = logits_end;
  sync_block();
}

// Returns how many of the ascending ends are at most `value`: the place of the request that it belongs to.
FD_DEVICE int find_request(const int32_t (&ends)[kThreads], int32_t value) {
  int low = 0, high = kThreads - 1;  // the last end is greater
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] <= value)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// The grid strides over the rows; each block sums over all requests.
FD_KERNEL void virtual_padding(In<int32_t> num_scheduled, In<int32_t> num_computed, In<int32_t> num_logits,
                               In<int32_t> block_tables, Out<int32_t> totals, Out<int32_t> cu_seqlens_q,
                               Out<int32_t> cu_logits_rows, Out<int32_t> kv_lens, Out<int32_t> batch_id_per_row,
                               Out<int32_t> positions, Out<int32_t> slot_mapping, Out<int32_t> logits_rows,
                               In<int32_t> device_seqs, int max_seqs, int max_rows, int table_stride, int block_size) {
  Tile& tile = shared_memory<Tile>();
  const int num_seqs = read_count(device_seqs, max_seqs);
  const int thread = static_cast<int>(thread_index()), block = static_cast<int>(block_index().x);
  const int stride = static_cast<int>(grid_size().x) * kThreads;
  int32_t first_row = 0, first_logits = 0;  // of the tile
  for (int begin = 0; begin < num_seqs; begin += kThreads) {
    const int request = begin + thread;
    const bool is_valid = request < num_seqs;
    const int32_t rows = is_valid ? num_scheduled.data[request] : 0, logits = is_valid ? num_logits.data[request] : 0;
    sum_tile(tile, rows, logits, first_row, first_logits);
    if (block == 0 && is_valid) {
      cu_seqlens_q.data[request] = tile.row_ends[thread] - rows;
      cu_logits_rows.data[request] = tile.logits_ends[thread] - logits;
      kv_lens.data[request] = num_computed.data[request] + rows;
    }
    const int32_t end_row = tile.row_ends[kThreads - 1], end_logits = tile.logits_ends[kThreads - 1];
    for (int row = first_row + block * kThreads + thread; row < end_row && row < max_rows; row += stride) {
      const int place = find_request(tile.row_ends, row);
      const int32_t start = place == 0 ? first_row : tile.row_ends[place - 1];
      const int32_t position = num_computed.data[begin + place] + row - start;
      const int32_t* table = block_tables.data + int64_t{begin + place} * table_stride;
      batch_id_per_row.data[row] = begin + place;
      positions.data[row] = position;
      slot_mapping.data[row] = table[position / block_size] * block_size + position % block_size;
    }
    for (int i = first_logits + block * kThreads + thread; i < end_logits && i < max_rows; i += stride) {
      const int place = find_request(tile.logits_ends, i);
      logits_rows.data[i] = tile.row_ends[place] - (tile.logits_ends[place] - i);
    }
    first_row = end_row;
    first_logits = end_logits;
  }
  if (block == 0 && thread == 0) {
    cu_seqlens_q.data[num_seqs] = totals.data[0] = first_row;
    cu_logits_rows.data[num_seqs] = totals.data[1] = first_logits;
  }
}

// One block moves the rows in ascending order; none is overwritten before it is read.
FD_KERNEL void shift_logits_rows(Out<int32_t> logits_rows, int num_sampled, int num_rows) {
  for (int begin = 0; begin < num_rows; begin += kThreads) {
    const int i = begin + static_cast<int>(thread_index());
    const int32_t row = i < num_rows ? logits_rows.data[num_sampled + i] : 0;
    sync_block();
    if (i < num_rows) logits_rows.data[i] = row;
  }
}

}  // namespace

// StepBuffers.tensors(): [max_seqs] each, block_tables [max_seqs, table_stride]; totals [2], cu_* [max_seqs + 1],
// kv_lens [max_seqs], the others [max_rows]. `num_blocks` is for checks on the host.
FD_EXPORT int fd_virtual_padding(const int32_t* num_scheduled, const int32_t* num_computed, const int32_t* num_logits,
                                 const int32_t*, const int32_t* block_tables, int32_t* totals, int32_t* cu_seqlens_q,
                                 int32_t* cu_logits_rows, int32_t* kv_lens, int32_t* batch_id_per_row,
                                 int32_t* positions, int32_t* slot_mapping, int32_t* logits_rows, int64_t max_rows,
                                 int64_t max_seqs, int64_t table_stride, const int32_t* device_seqs, int64_t num_seqs,
                                 int64_t block_size, void* stream) {
  FD_REQUIRE("virtual_padding", num_seqs, num_seqs >= 0 && num_seqs <= max_seqs, "at most the capacity");
  FD_REQUIRE("virtual_padding", block_size, block_size > 0 && block_size <= INT32_MAX, "at least 1");
  const auto seqs = static_cast<size_t>(num_seqs), rows = static_cast<size_t>(max_rows);
  const Count count{device_seqs, static_cast<int32_t>(num_seqs)};
  const int64_t blocks = (max_rows + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks);
  return launch(virtual_padding, {grid, 1, 1}, kThreads, sizeof(Tile), stream, In<int32_t>(num_scheduled, seqs),
                In<int32_t>(num_computed, seqs), In<int32_t>(num_logits, seqs),
                In<int32_t>(block_tables, seqs * static_cast<size_t>(table_stride)), Out<int32_t>(totals, 2),
                Out<int32_t>(cu_seqlens_q, seqs + 1), Out<int32_t>(cu_logits_rows, seqs + 1),
                Out<int32_t>(kv_lens, seqs), Out<int32_t>(batch_id_per_row, rows), Out<int32_t>(positions, rows),
                Out<int32_t>(slot_mapping, rows), Out<int32_t>(logits_rows, rows), count.array(), count.max,
                static_cast<int>(max_rows), static_cast<int>(table_stride), static_cast<int>(block_size));
}

// logits_rows: [max_rows] int32.
FD_EXPORT int fd_shift_logits_rows(int32_t* logits_rows, int64_t max_rows, int64_t num_sampled, int64_t num_rows,
                                   void* stream) {
  FD_REQUIRE("shift_logits_rows", num_sampled, num_sampled >= 0 && num_sampled <= max_rows, "at most the capacity");
  FD_REQUIRE("shift_logits_rows", num_rows, num_rows >= 0 && num_rows <= max_rows - num_sampled,
             "at most the rows that follow");
  if (num_rows == 0) return kSuccess;
  return launch(shift_logits_rows, {1, 1, 1}, kThreads, 0, stream,
                Out<int32_t>(logits_rows, static_cast<size_t>(max_rows)), static_cast<int>(num_sampled),
                static_cast<int>(num_rows));
}
