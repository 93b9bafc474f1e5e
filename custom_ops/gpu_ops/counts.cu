// SPDX-License-Identifier: Apache-2.0
// Writes the counts that the launches of a graph read (count.h).

#include "common/export.h"
#include "gpu_ops/device.h"

namespace {

using namespace fd::gpu;

FD_KERNEL void write_counts(Out<int32_t> counts, int32_t num_rows, int32_t num_seqs) {
  if (thread_index() == 0) {
    counts.data[0] = num_rows;
    counts.data[1] = num_seqs;
  }
}

}  // namespace

// counts: [2] int32.
FD_EXPORT int fd_write_counts(int32_t* counts, int64_t num_rows, int64_t num_seqs, void* stream) {
  return launch(write_counts, {1, 1, 1}, kWarpSize, 0, stream, Out<int32_t>(counts, 2), static_cast<int32_t>(num_rows),
                static_cast<int32_t>(num_seqs));
}
