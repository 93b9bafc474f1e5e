// SPDX-License-Identifier: Apache-2.0
// Widens matrices of FP8 codes (E4M3 without infinities) that share a scale per block of rows and inputs.
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/export.h"
#include "common/threads.h"
#include "host/ggml_numbers.h"

namespace fd::fp8 {
namespace {

constexpr int64_t kTileValues = 1 << 16;  // are widened in about the time that waking a thread takes
// The smallest magnitude that is infinite when it is rounded to bf16.
constexpr int32_t kInfiniteInBfloat16 = 0x7f7f8000;

// The fields are in the order of fastdeploy/ops/fp8_blocks.py.
struct Blocks {
  const uint8_t* codes;  // [rows, inputs]
  const float* scales;   // [blocks of rows, blocks of inputs]
  int64_t num_rows;
  int64_t num_inputs;
  int64_t block_rows;
  int64_t block_inputs;

  int64_t scales_per_row() const { return (num_inputs + block_inputs - 1) / block_inputs; }
};

// Returns the value of a code that is not NaN. There is no branch and no subnormal fp32 number, and comparisons are of
// signed integers: the compiler vectorizes it.
inline float value_of(uint8_t code) {
  constexpr int32_t kExponentShift = 120 << 23;  // between the exponents of E4M3 and fp32
  const int32_t magnitude = code & 0x7f;
  const auto normal = (magnitude << 20) + kExponentShift;
  // Below 8, a code is that many times 2^-9, and `normal` is 2^-7 * (1 + code / 8).
  const float subnormal = (ggml::float_of(static_cast<uint32_t>(normal)) - 0x1p-7f) * 2.0f;
  const int32_t is_subnormal = -static_cast<int32_t>(magnitude < 8);
  const int32_t bits = (static_cast<int32_t>(ggml::bits_of(subnormal)) & is_subnormal) | (normal & ~is_subnormal);
  return ggml::float_of(static_cast<uint32_t>(bits | (code & 0x80) << 24));
}

inline void store(float value, float* to) { *to = value; }

// Rounds a number that is not NaN to the nearest bf16 number, ties to even.
inline void store(float value, uint16_t* to) {
  const uint32_t bits = ggml::bits_of(value);
  *to = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Writes code * scale, rounded to fp32 and then to the type of `to`. Returns the bits of the largest magnitude in fp32.
template <class Wide>
int32_t widen_run(const uint8_t* __restrict codes, float scale, int64_t count, Wide* __restrict to) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = value_of(codes[i]) * scale;
    const auto magnitude = static_cast<int32_t>(ggml::bits_of(value) & ~ggml::kSignBit);
    largest = magnitude > largest ? magnitude : largest;
    store(value, to + i);
  }
  return largest;
}

template <class Wide>
int32_t widen_row(const Blocks& from, int64_t row, Wide* wide) {
  const float* scales = from.scales + row / from.block_rows * from.scales_per_row();
  const int64_t first = row * from.num_inputs;
  int32_t largest = 0;
  for (int64_t begin = 0; begin < from.num_inputs; begin += from.block_inputs) {
    const int64_t count = std::min(from.block_inputs, from.num_inputs - begin);
    largest = std::max(largest, widen_run(from.codes + first + begin, *scales++, count, wide + first + begin));
  }
  return largest;
}

// Returns whether every value is finite in bf16.
template <class Wide>
bool widen(const Blocks& from, Wide* wide) {
  const int64_t rows = std::max<int64_t>(1, kTileValues / std::max<int64_t>(1, from.num_inputs));
  std::atomic<bool> is_finite{true};
  parallel_for((from.num_rows + rows - 1) / rows, true, [&](int64_t tile) {
    int32_t largest = 0;
    for (int64_t row = tile * rows; row < std::min(from.num_rows, (tile + 1) * rows); ++row) {
      largest = std::max(largest, widen_row(from, row, wide));
    }
    if (largest >= kInfiniteInBfloat16) is_finite = false;
  });
  return is_finite;
}

}  // namespace
}  // namespace fd::fp8

// Writes the values [rows, inputs] as fp32, or as bf16, on all threads; no code is NaN. Returns whether every value is
// finite in bf16. fd_num_threads_error must be called before.
FD_EXPORT int64_t fd_fp8_widen(const fd::fp8::Blocks* from, void* wide, int64_t is_bfloat16) {
  const bool is_finite = is_bfloat16 != 0 ? fd::fp8::widen(*from, static_cast<uint16_t*>(wide))
                                          : fd::fp8::widen(*from, static_cast<float*>(wide));
  return is_finite ? 1 : 0;
}
