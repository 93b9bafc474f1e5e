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
  const int64_t tiles = 16 * num_threads();
  float sums[64] = {};
  parallel_for(tiles, true, [&](int64_t tile) {
    F16 acc[kMaxRows][kMaxPanels];
    Pairs panel[kMaxPanels];
    for (int v = 0; v < kMaxPanels; ++v) panel[v] = splat_pair(0x3f803f80u + static_cast<uint32_t>(tile + v));
    for (int r = 0; r < kMaxRows; ++r)
      for (int v = 0; v < kMaxPanels; ++v) acc[r][v] = zero();
    for (int64_t step = 0; step < steps; ++step) {
      const Pairs x = splat_pair(0x3c003c00u + static_cast<uint32_t>(step & 1));
#pragma GCC unroll 8
      for (int r = 0; r < kMaxRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kMaxPanels; ++v) acc[r][v] = dot_pairs(acc[r][v], x, panel[v]);
    }
    for (int r = 0; r < kMaxRows; ++r)
      for (int v = 0; v < kMaxPanels; ++v) sums[tile % 64] += sum_lanes(acc[r][v]);
  });
  double operations = 4.0 * kMaxRows * kMaxPanels * kLanes * static_cast<double>(steps) * static_cast<double>(tiles);
  return sums[0] == 0.12345f ? 0 : operations;  // the sums are used: the loop cannot be left out
}

double multiply_integers(int64_t steps) {
  constexpr int kRows = kMaxRows < 4 ? kMaxRows : 4;  // sums and units together leave registers free
  const int64_t tiles = 16 * num_threads();
  float sums[64] = {};
  parallel_for(tiles, true, [&](int64_t tile) {
    I16 acc[kRows][kMaxPanels];
    QuadUnit units[kMaxPanels][1];
    alignas(64) uint8_t block[64];
    for (int v = 0; v < kMaxPanels; ++v) {
      std::memset(block, static_cast<int>(tile) + v, sizeof(block));
      load_w8a8(block, units[v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)  // unrolled like the products, or the sums would live in memory
#pragma GCC unroll 8
      for (int v = 0; v < kMaxPanels; ++v) acc[r][v] = splat_int(0);
    QuadElement x[kRows];
    for (int r = 0; r < kRows; ++r) {
      const int8_t row[4] = {1, static_cast<int8_t>(r), 2, 1};
      x[r] = quad_element(row);
    }
    for (int64_t step = 0; step < steps; ++step) {
      asm volatile("" : "+m"(x));  // the rows may have changed: no product outlives its step
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kMaxPanels; ++v) acc[r][v] = dot_unit(acc[r][v], x[r], units[v][0]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < kMaxPanels; ++v) sums[tile % 64] += sum_lanes(to_float(acc[r][v]));
  });
  double operations = 8.0 * kRows * kMaxPanels * kLanes * static_cast<double>(steps) * static_cast<double>(tiles);
  return sums[0] == 0.12345f ? 0 : operations;
}

}  // namespace FD_ISA
}  // namespace fd
