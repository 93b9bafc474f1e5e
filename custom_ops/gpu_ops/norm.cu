// SPDX-License-Identifier: Apache-2.0
// RMSNorm, and RMSNorm with a bias and GELU after it: a block for each row.

#include "gpu_ops/norm.h"

#include "common/export.h"
#include "gpu_ops/attention_state.h"
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

// Returns x * Phi(x). The error function is that of Abramowitz and Stegun, 7.1.26, whose error is below 2e-7.
FD_DEVICE float gelu(float x) {
  const float z = (x < 0.0f ? -x : x) * 0.70710678f, t = divide(1.0f, fused_multiply_add(0.3275911f, z, 1.0f));
  float p = 1.061405429f;
  p = fused_multiply_add(p, t, -1.453152027f);
  p = fused_multiply_add(p, t, 1.421413741f);
  p = fused_multiply_add(p, t, -0.284496736f);
  p = fused_multiply_add(p, t, 0.254829592f);
  const float tail = p * t * power_of_two(z * z * -1.44269504f);  // 1 - erf(z)
  return x * (x < 0.0f ? 0.5f * tail : 1.0f - 0.5f * tail);
}

FD_KERNEL void norm_gelu(In<uint16_t> x, In<uint16_t> weight, In<uint16_t> bias, Out<uint16_t> out,
                         In<int32_t> device_rows, int num_rows, int size, float eps) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int64_t begin = int64_t{row} * size;
  const float factor = block_norm_factor(x.data + begin, size, eps, shared_memory<NormShared>().sums);
  const int stride = static_cast<int>(block_size()) * kNormChunk;
  for (int i = static_cast<int>(thread_index()) * kNormChunk; i < size; i += stride) {
    float values[kNormChunk], scales[kNormChunk], offsets[kNormChunk];
    unpack_bf16(load16(x.data + begin + i), values);
    unpack_bf16(load16_readonly(weight.data + i), scales);
    unpack_bf16(load16_readonly(bias.data + i), offsets);
    FD_UNROLL
    for (int c = 0; c < kNormChunk; ++c)
      values[c] = gelu(fused_multiply_add(values[c] * factor, scales[c], offsets[c]));
    store16(out.data + begin + i, pack_bf16(values));
  }
}

// Returns enough threads for a chunk each, at most one for each chain.
unsigned norm_threads(int64_t size) {
  unsigned threads = kWarpSize;
  while (threads < kNormChains && threads * kNormChunk < size) threads *= 2;
  return threads;
}

int check_norm(const char* op, int64_t num_rows, int64_t size) {
  FD_REQUIRE(op, size, size > 0 && size <= (1 << 20) && size % kNormChunk == 0,
             "a multiple of 8 elements, at most 1048576");
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  return kSuccess;
}

}  // namespace

// x, out: [num_rows, size] bf16, out may be x; weight: [size] bf16.
FD_EXPORT int fd_rms_norm(const uint16_t* x, const uint16_t* weight, uint16_t* out, const int32_t* device_rows,
                          int64_t num_rows, int64_t size, double eps, void* stream) {
  if (const int code = check_norm("rms_norm", num_rows, size)) return code;
  if (num_rows == 0) return kSuccess;
  const size_t elements = static_cast<size_t>(num_rows * size);
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  return launch(rms_norm, {static_cast<unsigned>(num_rows), 1, 1}, norm_threads(size), sizeof(NormShared), stream,
                In<uint16_t>(x, x == out ? 0 : elements), In<uint16_t>(weight, static_cast<size_t>(size)),
                Out<uint16_t>(out, elements), rows.array(), rows.max, static_cast<int>(size), static_cast<float>(eps));
}

// x, out: [num_rows, size] bf16, out may be x; weight, bias: [size] bf16.
FD_EXPORT int fd_norm_gelu(const uint16_t* x, const uint16_t* weight, const uint16_t* bias, uint16_t* out,
                           const int32_t* device_rows, int64_t num_rows, int64_t size, double eps, void* stream) {
  if (const int code = check_norm("norm_gelu", num_rows, size)) return code;
  if (num_rows == 0) return kSuccess;
  const size_t elements = static_cast<size_t>(num_rows * size);
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  return launch(norm_gelu, {static_cast<unsigned>(num_rows), 1, 1}, norm_threads(size), sizeof(NormShared), stream,
                In<uint16_t>(x, x == out ? 0 : elements), In<uint16_t>(weight, static_cast<size_t>(size)),
                In<uint16_t>(bias, static_cast<size_t>(size)), Out<uint16_t>(out, elements), rows.array(), rows.max,
                static_cast<int>(size), static_cast<float>(eps));
}
