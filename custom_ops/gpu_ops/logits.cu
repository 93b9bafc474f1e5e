// SPDX-License-Identifier: Apache-2.0
// Logits of some ids, written to their places among the logits of all ids: a block for each row.

#include "common/export.h"
#include "gpu_ops/count.h"

namespace {

using namespace fd::gpu;

constexpr unsigned kThreads = 256;

FD_KERNEL void scatter_logits(In<float> x, In<int32_t> ids, Out<float> out, In<int32_t> device_rows, int num_rows,
                              int num_ids, int vocab_size) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int thread = static_cast<int>(thread_index()), step = static_cast<int>(block_size());
  const float minus_infinity = bit_cast<float>(0xFF800000u);
  float* logits = out.data + int64_t{row} * vocab_size;
  for (int i = thread; i < vocab_size; i += step) logits[i] = minus_infinity;
  sync_block();
  for (int i = thread; i < num_ids; i += step) {
    const int32_t id = ids.data[i];
    if (id >= 0 && id < vocab_size) logits[id] = x.data[int64_t{row} * num_ids + i];
  }
}

}  // namespace

// x: [num_rows, num_ids]; ids: [num_ids] int32, distinct; out: [num_rows, vocab_size].
FD_EXPORT int fd_scatter_logits(const float* x, const int32_t* ids, float* out, const int32_t* device_rows,
                                int64_t num_rows, int64_t num_ids, int64_t vocab_size, void* stream) {
  constexpr const char* op = "scatter_logits";
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  FD_REQUIRE(op, num_ids, num_ids > 0 && num_ids <= vocab_size && vocab_size <= INT32_MAX, "at most all ids");
  if (num_rows == 0) return kSuccess;
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  return launch(scatter_logits, {static_cast<unsigned>(num_rows), 1, 1}, kThreads, 0, stream,
                In<float>(x, static_cast<size_t>(num_rows * num_ids)), In<int32_t>(ids, static_cast<size_t>(num_ids)),
                Out<float>(out, static_cast<size_t>(num_rows * vocab_size)), rows.array(), rows.max,
                static_cast<int>(num_ids), static_cast<int>(vocab_size));
}
