// SPDX-License-Identifier: Apache-2.0
// What drafting does between the operators of its passes: it writes the rows of a pass, takes the last row of each
// sequence to sample from, and stores the drafts. The host reads nothing before the last pass has ended.

#include <algorithm>

#include "common/export.h"
#include "common/sampling.h"
#include "gpu_ops/count.h"

namespace {

using namespace fd::gpu;

constexpr int kMaxThreads = 256;
constexpr int kShiftThreads = 128;  // a sequence rarely has more rows
constexpr int64_t kChunkBytes = sizeof(Bytes16);

// The buffers of a DraftLoop (fastdeploy/ops/drafting.py) and those of a batch of logits: as many sequences as fit the
// logits. fastdeploy/ops/backends/gpu/drafting.py has the same fields.
struct DraftBuffers {
  const Bytes16* states;   // [num_states, row_bytes] by slot, the last is the state before the first token; or null
  Bytes16* input_states;   // [max_rows, row_bytes]; or null
  const Bytes16* output;   // [max_rows, row_bytes]
  int32_t* token_ids;      // [max_rows]
  int32_t* num_scheduled;  // [max_seqs]
  int32_t* num_computed;   // [max_seqs]
  const int32_t* block_tables;      // [max_seqs, table_stride]
  const int32_t* cu_seqlens_q;      // [max_seqs + 1]
  const int32_t* kv_lens;           // [max_seqs]
  const int32_t* batch_id_per_row;  // [max_rows]
  const int32_t* positions;         // [max_rows]
  const float* float_params;        // [max_seqs, kNumFloatParams]
  const int64_t* int_params;        // [max_seqs, kNumIntParams]
  int32_t* drafted;                 // [max_seqs], the tokens of the last pass
  int32_t* drafts;                  // [max_seqs, max_drafts]
  int32_t* next_pass;               // [1]
  Bytes16* batch_rows;              // [max_batch, row_bytes]
  float* batch_float_params;        // [max_batch, kNumFloatParams]
  int64_t* batch_int_params;        // [max_batch, kNumIntParams]
  int32_t* batch_count;             // [1], the sequences of the batch
  const int32_t* sampled;           // [max_batch]
  const int32_t* target_ids;        // [num_target_ids], what sampled ids stand for; or null
  int64_t num_states, row_bytes, max_rows, max_seqs, table_stride, block_positions, max_drafts, max_batch,
      num_target_ids;

  int row_chunks() const { return static_cast<int>(row_bytes / kChunkBytes); }
  size_t chunks_of(int64_t num_rows) const { return static_cast<size_t>(num_rows * (row_bytes / kChunkBytes)); }
  unsigned copy_threads() const {
    const int64_t warps = (row_chunks() + kWarpSize - 1) / kWarpSize;
    return static_cast<unsigned>(std::min<int64_t>(kMaxThreads, warps * kWarpSize));
  }
};

template <class T>
In<T> input(const T* data, int64_t count) {
  return In<T>(data, static_cast<size_t>(count));
}
template <class T>
Out<T> output(T* data, int64_t count) {
  return Out<T>(data, static_cast<size_t>(count));
}

// Copies a row of `chunks` chunks by all threads of the block.
FD_DEVICE void copy_row(Bytes16* to, int64_t row, const Bytes16* from, int64_t from_row, int chunks) {
  for (int i = static_cast<int>(thread_index()); i < chunks; i += static_cast<int>(block_size()))
    store16(to + row * chunks + i, load16(from + from_row * chunks + i));
}

FD_DEVICE int32_t token_or_zero(int32_t token) { return token < 0 ? 0 : token; }

// A block for each row: its input is the state of the position before it, found by the slot of that position.
FD_KERNEL void read_states(In<Bytes16> states, int num_states, In<int32_t> positions, In<int32_t> batch_id_per_row,
                           In<int32_t> block_tables, int table_stride, int block_positions, Out<Bytes16> input_states,
                           int chunks, In<int32_t> device_rows, int num_rows) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int before = positions.data[row] - 1;
  int64_t slot = num_states - 1;
  if (before >= 0) {
    const int32_t* table = block_tables.data + int64_t{batch_id_per_row.data[row]} * table_stride;
    slot = int64_t{table[before / block_positions]} * block_positions + before % block_positions;
  }
  copy_row(input_states.data, row, states.data, slot, chunks);
}

// A block for each row: its input is the output of the same row.
FD_KERNEL void read_output(In<Bytes16> output, Out<Bytes16> input_states, int chunks, In<int32_t> device_rows,
                           int num_rows) {
  const int row = static_cast<int>(block_index().x);
  if (row < read_count(device_rows, num_rows)) copy_row(input_states.data, row, output.data, row, chunks);
}

// A block for each sequence: its rows move to the next position, each with the token of the row after it, the last one
// with the draft.
FD_KERNEL void shift_rows(In<int32_t> drafted, In<int32_t> cu_seqlens_q, Out<int32_t> token_ids,
                          Out<int32_t> num_computed, In<int32_t> device_seqs, int num_seqs) {
  const int seq = static_cast<int>(block_index().x), thread = static_cast<int>(thread_index());
  if (seq >= read_count(device_seqs, num_seqs)) return;
  const int last = cu_seqlens_q.data[seq + 1] - 1;
  for (int begin = cu_seqlens_q.data[seq]; begin < last; begin += static_cast<int>(block_size())) {
    const int row = begin + thread;
    const int32_t next = row < last ? token_ids.data[row + 1] : 0;
    sync_block();
    if (row < last) token_ids.data[row] = next;
  }
  if (thread == 0) {
    token_ids.data[last] = token_or_zero(drafted.data[seq]);
    ++num_computed.data[seq];
  }
}

// A block for each sequence: one row is left, at the next position. It holds the draft, and its input is the output of
// the last row.
FD_KERNEL void keep_one_row(In<int32_t> drafted, In<int32_t> cu_seqlens_q, In<int32_t> kv_lens, In<Bytes16> output,
                            Out<Bytes16> input_states, int chunks, Out<int32_t> token_ids, Out<int32_t> num_computed,
                            Out<int32_t> num_scheduled, In<int32_t> device_seqs, int num_seqs) {
  const int seq = static_cast<int>(block_index().x);
  if (seq >= read_count(device_seqs, num_seqs)) return;
  if (input_states.data != nullptr)
    copy_row(input_states.data, seq, output.data, cu_seqlens_q.data[seq + 1] - 1, chunks);
  if (thread_index() == 0) {
    token_ids.data[seq] = token_or_zero(drafted.data[seq]);
    num_computed.data[seq] = kv_lens.data[seq];
    num_scheduled.data[seq] = 1;
  }
}

// A block for each sequence of a batch, whose first one is `first`: its last row, and its parameters of sampling.
FD_KERNEL void begin_batch(In<Bytes16> output, In<int32_t> cu_seqlens_q, In<int32_t> kv_lens, In<float> float_params,
                           In<int64_t> int_params, int first, int max_batch, Out<Bytes16> batch_rows, int chunks,
                           Out<float> batch_float_params, Out<int64_t> batch_int_params, Out<int32_t> batch_count,
                           In<int32_t> device_seqs, int num_seqs) {
  const int row = static_cast<int>(block_index().x), thread = static_cast<int>(thread_index()), seq = first + row;
  const int rest = read_count(device_seqs, num_seqs) - first;
  const int count = rest < 0 ? 0 : rest < max_batch ? rest : max_batch;
  if (row == 0 && thread == 0) batch_count.data[0] = count;
  if (row >= count) return;
  copy_row(batch_rows.data, row, output.data, cu_seqlens_q.data[seq + 1] - 1, chunks);
  if (thread < fd::kNumFloatParams)
    batch_float_params.data[row * fd::kNumFloatParams + thread] = float_params.data[seq * fd::kNumFloatParams + thread];
  if (thread < fd::kNumIntParams)
    batch_int_params.data[row * fd::kNumIntParams + thread] =
        thread == fd::kPosition ? kv_lens.data[seq] : int_params.data[seq * fd::kNumIntParams + thread];
}

// One block: stores the tokens of a batch, or what they stand for, as the drafts of a pass; pass -1 is the one after
// the last that had sequences.
FD_KERNEL void end_batch(In<int32_t> sampled, In<int32_t> target_ids, In<int32_t> batch_count, int max_batch, int first,
                         int pass, bool is_last_batch, Out<int32_t> drafted, Out<int32_t> drafts, int max_drafts,
                         Out<int32_t> next_pass, In<int32_t> device_seqs, int num_seqs) {
  const int count = read_count(batch_count, max_batch), column = pass < 0 ? next_pass.data[0] : pass;
  sync_block();
  for (int row = static_cast<int>(thread_index()); row < count; row += static_cast<int>(block_size())) {
    const int32_t id = sampled.data[row], token = target_ids.data == nullptr || id < 0 ? id : target_ids.data[id];
    drafted.data[first + row] = token;
    drafts.data[int64_t{first + row} * max_drafts + column] = token;
  }
  if (is_last_batch && thread_index() == 0 && read_count(device_seqs, num_seqs) > 0) next_pass.data[0] = column + 1;
}

Count count_of(const int32_t* device, int64_t max) { return {device, static_cast<int32_t>(max)}; }

}  // namespace

#define FD_REQUIRE_COUNT(count, limit) \
  FD_REQUIRE("draft", count, count >= 0 && count <= limit, "at most those of the buffers")

// Writes the inputs of the first rows: with `is_first_stage` from states, otherwise from the output.
FD_EXPORT int fd_draft_read_inputs(const DraftBuffers* d, int64_t is_first_stage, const int32_t* device_rows,
                                   int64_t num_rows, void* stream) {
  FD_REQUIRE_COUNT(num_rows, d->max_rows);
  if (num_rows == 0) return kSuccess;
  const Dim3 grid{static_cast<unsigned>(num_rows), 1, 1};
  const Count rows = count_of(device_rows, num_rows);
  const auto input_states = output(d->input_states, d->chunks_of(num_rows));
  if (is_first_stage == 0)
    return launch(read_output, grid, d->copy_threads(), 0, stream, input(d->output, d->chunks_of(num_rows)),
                  input_states, d->row_chunks(), rows.array(), rows.max);
  return launch(read_states, grid, d->copy_threads(), 0, stream, input(d->states, d->chunks_of(d->num_states)),
                static_cast<int>(d->num_states), input(d->positions, num_rows), input(d->batch_id_per_row, num_rows),
                input(d->block_tables, d->max_seqs * d->table_stride), static_cast<int>(d->table_stride),
                static_cast<int>(d->block_positions), input_states, d->row_chunks(), rows.array(), rows.max);
}

// Writes tokens and counts of the next pass, whose index arrays are still those of the last one.
FD_EXPORT int fd_draft_shift_rows(const DraftBuffers* d, const int32_t* device_seqs, int64_t num_seqs, void* stream) {
  FD_REQUIRE_COUNT(num_seqs, d->max_seqs);
  const Count seqs = count_of(device_seqs, num_seqs);
  return launch(shift_rows, {static_cast<unsigned>(num_seqs), 1, 1}, kShiftThreads, 0, stream,
                input(d->drafted, num_seqs), input(d->cu_seqlens_q, num_seqs + 1), output(d->token_ids, d->max_rows),
                output(d->num_computed, num_seqs), seqs.array(), seqs.max);
}

// As fd_draft_shift_rows, but leaves one row for each sequence and writes its input.
FD_EXPORT int fd_draft_keep_one_row(const DraftBuffers* d, const int32_t* device_seqs, int64_t num_seqs, void* stream) {
  FD_REQUIRE_COUNT(num_seqs, d->max_seqs);
  const Count seqs = count_of(device_seqs, num_seqs);
  return launch(keep_one_row, {static_cast<unsigned>(num_seqs), 1, 1}, d->copy_threads(), 0, stream,
                input(d->drafted, num_seqs), input(d->cu_seqlens_q, num_seqs + 1), input(d->kv_lens, num_seqs),
                input(d->output, d->chunks_of(d->max_rows)),
                output(d->input_states, d->input_states == nullptr ? 0 : d->chunks_of(num_seqs)), d->row_chunks(),
                output(d->token_ids, num_seqs), output(d->num_computed, num_seqs), output(d->num_scheduled, num_seqs),
                seqs.array(), seqs.max);
}

// Takes the last rows of the sequences [first, first + max_batch), as far as they exist.
FD_EXPORT int fd_draft_begin_batch(const DraftBuffers* d, int64_t first, const int32_t* device_seqs, int64_t num_seqs,
                                   void* stream) {
  FD_REQUIRE_COUNT(num_seqs, d->max_seqs);
  FD_REQUIRE("draft", first, first >= 0 && first < num_seqs, "a sequence");
  const Count seqs = count_of(device_seqs, num_seqs);
  const int64_t rows = std::min(d->max_batch, num_seqs - first);
  return launch(
      begin_batch, {static_cast<unsigned>(rows), 1, 1}, d->copy_threads(), 0, stream,
      input(d->output, d->chunks_of(d->max_rows)), input(d->cu_seqlens_q, num_seqs + 1), input(d->kv_lens, num_seqs),
      input(d->float_params, num_seqs * fd::kNumFloatParams), input(d->int_params, num_seqs * fd::kNumIntParams),
      static_cast<int>(first), static_cast<int>(d->max_batch), output(d->batch_rows, d->chunks_of(rows)),
      d->row_chunks(), output(d->batch_float_params, rows * fd::kNumFloatParams),
      output(d->batch_int_params, rows * fd::kNumIntParams), output(d->batch_count, 1), seqs.array(), seqs.max);
}

// Stores what was sampled from a batch as drafts of a pass, -1 for the one after the last; with `is_mapped`, what it
// stands for.
FD_EXPORT int fd_draft_end_batch(const DraftBuffers* d, int64_t first, int64_t pass, int64_t is_last_batch,
                                 int64_t is_mapped, const int32_t* device_seqs, int64_t num_seqs, void* stream) {
  FD_REQUIRE_COUNT(num_seqs, d->max_seqs);
  FD_REQUIRE("draft", first, first >= 0 && first < num_seqs, "a sequence");
  FD_REQUIRE("draft", pass, pass >= -1 && pass < d->max_drafts, "a pass");
  const int64_t rows = std::min(d->max_batch, num_seqs - first);
  const Count seqs = count_of(device_seqs, num_seqs);
  return launch(end_batch, {1, 1, 1}, kMaxThreads, 0, stream, input(d->sampled, rows),
                is_mapped == 0 ? In<int32_t>(nullptr, 0) : input(d->target_ids, d->num_target_ids),
                In<int32_t>(d->batch_count, 1), static_cast<int>(rows), static_cast<int>(first), static_cast<int>(pass),
                is_last_batch != 0, output(d->drafted, d->max_seqs), output(d->drafts, d->max_seqs * d->max_drafts),
                static_cast<int>(d->max_drafts), output(d->next_pass, 1), seqs.array(), seqs.max);
}
