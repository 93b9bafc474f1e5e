// SPDX-License-Identifier: Apache-2.0
// RMSNorm: a block for each row.

#include "gpu_ops/norm.h"

#include "common/export.h"
#include "gpu_ops/count.h"

namespace {

using namespace fd::gpu;

struct NormShared {
  float sums[kNormGroups];
};

FD_KERNEL void rms_norm(In<uint16_t> x, In<uint16_t> weight, Out<uint16_t> out, In<int32_t> device_rows, int num_rows,
                        int size, float eps) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int64_t begin = int64_t{row} * size;
  const float factor = block_norm_factor(x.data + begin, size, eps, shared_memory<NormShared>().sums);
  const int stride = static_cast<int>(block_size()) * kNormChunk;
  for (int i = static_cast<int>(thread_index()) * kNormChunk; i < size; i += stride)
    store16(out.data + begin + i,
            normalise_chunk(load16(x.data + begin + i), load16_readonly(weight.data + i), factor));
}

// Returns enough threads for a chunk each, at most one for each chain.
unsigned norm_threads(int64_t size) {
  unsigned threads = kWarpSize;
  while (threads < kNormChains && threads * kNormChunk < size) threads *= 2;
  return threads;
}

}  // namespace

// x, out: [num_rows, size] bf16, out may be x; weight: [size] bf16.
FD_EXPORT int fd_rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, const int32_t* device_rows,
                          int64_t num_rows, int64_t size, double eps, void* stream) {
  FD_REQUIRE("rms_norm", size, size > 0 && size <= (1 << 20) && size % kNormChunk == 0,
             "a multiple of 8 elements, at most 1048576");
  FD_REQUIRE("rms_norm", num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  if (num_rows == 0) return kSuccess;
  const size_t elements = static_cast<size_t>(num_rows * size);
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  return launch(rms_norm, {static_cast<unsigned>(num_rows), 1, 1}, norm_threads(size), sizeof(NormShared), stream,
                In<uint16_t>(x, x == out ? 0 : elements), In<uint16_t>(weight, static_cast<size_t>(size)),
                Out<uint16_t>(out, elements), rows.array(), rows.max, static_cast<int>(size), static_cast<float>(eps));
}
