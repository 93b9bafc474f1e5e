// SPDX-License-Identifier: Apache-2.0
// What linear layers do with their sums: bias, gate, residual, one rounding. Steps are fp32, in this order.
//
// Packed weights have tiles of 16 rows, which are 16 outputs; in a gated layer the gates of 8 outputs, then their ups.
#pragma once

#include "common/sampling.h"
#include "gpu_ops/bf16.h"

namespace fd::gpu {

// Arrays of rows of n outputs, in bfloat16 (uint16_t) or float. A gated layer's bias has n gates, then n ups.
template <class T>
struct LinearOutputs {
  const uint16_t* bias;  // or null
  const T* residual;     // or null; may be `out`
  T* out;
  int n;
};

// x / (1 + e^-x)
FD_DEVICE float silu(float x) {
  const float magnitude = x < 0.0f ? x : -x;  // negative
  const float e = exp_nonpositive<ScalarLanes>(magnitude > kMinExponent ? magnitude : kMinExponent);
  return divide(x < 0.0f ? x * e : x, 1.0f + e);
}

template <class T>
constexpr int kOutputsOf16Bytes = 16 / static_cast<int>(sizeof(T));

FD_DEVICE float to_float(uint16_t bits) { return low_bf16(bits); }
FD_DEVICE float to_float(float value) { return value; }

FD_DEVICE void load_outputs(const uint16_t* from, float (&values)[8]) { unpack_bf16(load16(from), values); }
FD_DEVICE void load_outputs(const float* from, float (&values)[4]) {
  const Bytes16 bytes = load16(from);
  for (int i = 0; i < 4; ++i) values[i] = bit_cast<float>(bytes.word[i]);
}
FD_DEVICE void store_outputs(uint16_t* to, const float (&values)[8]) { store16(to, pack_bf16(values)); }
FD_DEVICE void store_outputs(float* to, const float (&values)[4]) {
  Bytes16 bytes;
  for (int i = 0; i < 4; ++i) bytes.word[i] = bit_cast<uint32_t>(values[i]);
  store16(to, bytes);
}
FD_DEVICE void store_output(uint16_t* to, float value) { *to = static_cast<uint16_t>(round_bf16x2(value, 0.0f)); }
FD_DEVICE void store_output(float* to, float value) { *to = value; }

// Adds the bias of outputs first .., of which those before `end` exist.
template <int kCount>
FD_DEVICE void add_bias(const uint16_t* bias, int first, int end, float (&values)[kCount]) {
  if (bias == nullptr) return;
  for (int i = 0; i < kCount; ++i)
    if (first + i < end) values[i] += to_float(bias[first + i]);
}

// Finishes neighbouring outputs, 16 bytes, of a row: `values` are sums, those of the gates if kIsGated.
template <class T, bool kIsGated, int kCount>
FD_DEVICE void finish_outputs(const LinearOutputs<T>& to, int64_t row, int first, float (&values)[kCount],
                              float (&ups)[kCount]) {
  add_bias(to.bias, first, to.n, values);
  if (kIsGated) {
    add_bias(to.bias, to.n + first, 2 * to.n, ups);
    for (int i = 0; i < kCount; ++i) values[i] = silu(values[i]) * ups[i];
  }
  const int64_t at = row * to.n + first;
  if (to.n % kCount == 0) {
    if (to.residual != nullptr) {
      float added[kCount];
      load_outputs(to.residual + at, added);
      for (int i = 0; i < kCount; ++i) values[i] += added[i];
    }
    store_outputs(to.out + at, values);
    return;
  }
  for (int i = 0; i < kCount; ++i) {
    if (first + i >= to.n) break;
    if (to.residual != nullptr) values[i] += to_float(to.residual[at + i]);
    store_output(to.out + at + i, values[i]);
  }
}

// Finishes the outputs of kTileRows rows of the packed weight from `tile_row`, a multiple of 16, for rows
// [first_row, first_row + num_rows). sums(row, i, float[4]) writes the sums of tile rows i .. i + 3 for a row, both
// counted from the first. All threads of a block take part.
template <class T, bool kIsGated, int kTileRows, class Sums>
FD_DEVICE void finish_tile(const LinearOutputs<T>& to, int tile_row, int first_row, int num_rows, Sums sums) {
  constexpr int kCount = kOutputsOf16Bytes<T>, kOutputs = kIsGated ? kTileRows / 2 : kTileRows;
  const int first_output = kIsGated ? tile_row / 2 : tile_row;
  for (int i = static_cast<int>(thread_index()); i < num_rows * (kOutputs / kCount);
       i += static_cast<int>(block_size())) {
    const int row = i / (kOutputs / kCount), output = i % (kOutputs / kCount) * kCount;
    if (first_output + output >= to.n) continue;
    const int begin = kIsGated ? output / 8 * 16 + output % 8 : output;
    float values[kCount], ups[kCount];
    for (int j = 0; j < kCount; j += 4) {
      float four[4];
      sums(row, begin + j, four);
      for (int l = 0; l < 4; ++l) values[j + l] = four[l];
      if (!kIsGated) continue;
      sums(row, begin + 8 + j, four);
      for (int l = 0; l < 4; ++l) ups[j + l] = four[l];
    }
    finish_outputs<T, kIsGated>(to, first_row + row, first_output + output, values, ups);
  }
}

}  // namespace fd::gpu
