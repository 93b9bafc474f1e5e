// SPDX-License-Identifier: Apache-2.0
// The peaks of a roofline: how fast the threads of the pool read memory, and how many bf16 and int8 operations they do
// per second on values in registers. Compiled for one instruction-set path.
#include "common/export.h"
#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kReadTile = 1 << 18;  // bytes of a tile

// Rows whose sums fit the registers beside the weights: enough to hide the latency of an addition.
constexpr int kRows = kColumnRows < 12 ? kColumnRows : 12;

FD_INLINE void clear(FP32Vec16& x) { x = zero(); }
FD_INLINE void clear(INT32Vec16& x) { x = splat_int32(0); }

// Uses a sum, so that the compiler does not remove its products. It copies all lanes, because a copy of some lanes
// would make the compiler keep the sums in memory.
template <class Sum>
FD_INLINE float first_lane(const Sum& sum) {
  float lanes[kLanes];
  static_assert(sizeof(lanes) == sizeof(sum), "sixteen lanes of four bytes");
  std::memcpy(lanes, &sum, sizeof(lanes));
  return lanes[0];
}

// Multiplies kRows row units by one weight unit, `steps` times on each of many tiles; returns the number of products.
template <class Sum, class RowUnit, class WeightUnit>
double multiply(int64_t steps, const RowUnit (&rows)[kRows], const WeightUnit& weights) {
  const int64_t tiles = 16 * num_threads();
  float sums[64] = {};
  parallel_for(tiles, true, [&](int64_t tile) {
    Sum acc[kRows];
    RowUnit x[kRows];
    std::memcpy(x, rows, sizeof(x));
    const WeightUnit w = weights;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) clear(acc[r]);  // unrolled, so that the sums stay in registers
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("" : "+m"(x));  // prevents reuse of products from one step to the next
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) acc[r] = dot_accumulate(acc[r], x[r], w);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[tile % 64] += first_lane(acc[r]);
  });
  const double products = static_cast<double>(kRows) * static_cast<double>(steps) * static_cast<double>(tiles);
  return sums[0] == 0.12345f ? 0 : products;  // uses the sums, so that the loop is not removed
}

}  // namespace

}  // namespace FD_ISA
}  // namespace fd

using namespace fd;
using namespace fd::FD_ISA;

// Reads `bytes`, a multiple of 256 KiB, with all threads; returns the sum of the data as fp32.
FD_EXPORT float fd_read_memory(const void* data, int64_t bytes) {
  float sums[64] = {};
  parallel_for(bytes / kReadTile, true, [&](int64_t tile) {
    const float* p = static_cast<const float*>(data) + tile * (kReadTile / 4);
    FP32Vec16 acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = zero();
    for (int64_t at = 0; at < kReadTile / 4; at += 8 * kLanes)
      for (int i = 0; i < 8; ++i) acc[i] = add(acc[i], load(p + at + i * kLanes));
    for (int i = 1; i < 8; ++i) acc[0] = add(acc[0], acc[i]);
    sums[tile % 64] = reduce_sum(acc[0]);
  });
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

// Returns the number of bf16 operations that all threads have done.
FD_EXPORT double fd_multiply_registers(int64_t steps) {
  RowPair x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = row_pair(0x3f80, static_cast<uint16_t>(0x3c00 + r));
  alignas(64) uint16_t panel[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) panel[i] = 0x3f80;
  return 4.0 * kLanes * multiply<FP32Vec16>(steps, x, widen_pairs(load_pairs(panel)));
}

// Returns the number of int8 operations that all threads have done.
FD_EXPORT double fd_multiply_integers(int64_t steps) {
  RowQuad x[kRows];
  for (int r = 0; r < kRows; ++r) {
    const RowCode row[4] = {1, static_cast<RowCode>(r), 2, 1};
    x[r] = row_quad(row);
  }
  alignas(64) uint8_t block[64];
  std::memset(block, 129, sizeof(block));
  return 8.0 * kLanes * multiply<INT32Vec16>(steps, x, load_byte_quad(block));
}
