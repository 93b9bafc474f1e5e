// SPDX-License-Identifier: Apache-2.0
// What benchmarks compare with: how fast the threads of the pool read memory, and how many operations in bf16 and in
// int8 they do when nothing has to be fetched.
#include "common/threads.h"
#include "cpu_ops/dot.h"
#include "cpu_ops/families.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kReadTile = 1 << 18;  // bytes that a thread reads at a time

// Rows whose sums, with a unit, fit the registers: enough that none waits for its last addition.
constexpr int kRows = kColumnRows < 12 ? kColumnRows : 12;

FD_INLINE void clear(F16& x) { x = zero(); }
FD_INLINE void clear(I16& x) { x = splat_int(0); }

// Any use of a sum will do. A copy of all of it, since one of a part would keep the sums in memory.
template <class Sum>
FD_INLINE float first_lane(const Sum& sum) {
  float lanes[kLanes];
  static_assert(sizeof(lanes) == sizeof(sum), "sixteen lanes of four bytes");
  std::memcpy(lanes, &sum, sizeof(lanes));
  return lanes[0];
}

// All threads do `steps` products of a unit with kRows elements many times over; returns the products of all.
template <class Sum, class Element, class Unit>
double multiply(int64_t steps, const Element (&elements)[kRows], const Unit& unit) {
  const int64_t tiles = 16 * num_threads();
  float sums[64] = {};
  parallel_for(tiles, true, [&](int64_t tile) {
    Sum acc[kRows];
    Element x[kRows];
    std::memcpy(x, elements, sizeof(x));
    const Unit w = unit;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) clear(acc[r]);  // unrolled like the products, or the sums would live in memory
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("" : "+m"(x));  // the rows may have changed: no product outlives its step
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) acc[r] = dot_unit(acc[r], x[r], w);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[tile % 64] += first_lane(acc[r]);
  });
  const double products = static_cast<double>(kRows) * static_cast<double>(steps) * static_cast<double>(tiles);
  return sums[0] == 0.12345f ? 0 : products;  // the sums are used: the loop cannot be left out
}

}  // namespace

float read_memory(const void* data, int64_t bytes) {
  float sums[64] = {};
  parallel_for(bytes / kReadTile, true, [&](int64_t tile) {
    const float* p = static_cast<const float*>(data) + tile * (kReadTile / 4);
    F16 acc[8];
    for (int i = 0; i < 8; ++i) acc[i] = zero();
    for (int64_t at = 0; at < kReadTile / 4; at += 8 * kLanes)
      for (int i = 0; i < 8; ++i) acc[i] = add(acc[i], load(p + at + i * kLanes));
    for (int i = 1; i < 8; ++i) acc[0] = add(acc[0], acc[i]);
    sums[tile % 64] = sum_lanes(acc[0]);
  });
  float total = 0;
  for (float sum : sums) total += sum;
  return total;
}

double multiply_registers(int64_t steps) {
  PairElement x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = pair_element(0x3f80, static_cast<uint16_t>(0x3c00 + r));
  alignas(64) uint16_t panel[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) panel[i] = 0x3f80;
  return 4.0 * kLanes * multiply<F16>(steps, x, widen_unit(load_pairs(panel)));
}

double multiply_integers(int64_t steps) {
  QuadElement x[kRows];
  for (int r = 0; r < kRows; ++r) {
    const Code row[4] = {1, static_cast<Code>(r), 2, 1};
    x[r] = quad_element(row);
  }
  alignas(64) uint8_t block[64];
  std::memset(block, 129, sizeof(block));
  return 8.0 * kLanes * multiply<I16>(steps, x, byte_unit(block));
}

}  // namespace FD_ISA
}  // namespace fd
