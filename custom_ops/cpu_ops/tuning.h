// SPDX-License-Identifier: Apache-2.0
// Constants that were measured, not derived: they depend on the caches, ports and memory of a processor, never on the
// instructions that it runs. What depends on the instructions, such as the rows that fit the registers, is in dot.h.
// None of them changes a bit of any result.
#pragma once

#include <cstdint>

namespace fd {

// What differs between processors. setup.py compiles every instruction-set path with the tuning of the processors that
// run it (FD_TUNING). To tune for another processor, add a row here and name it there.
struct Tuning {
  // Neighbouring panels of weights that a thread reads as parallel streams while it multiplies few rows. Each stream
  // occupies a hardware prefetcher and its own DRAM pages. 1: a single stream is faster.
  int64_t weight_streams;
  // Inputs (rows * k) up to which every thread prepares all rows of a linear layer for itself. Above it, preparing them
  // once and waiting for the other threads takes less time. The limit is higher where prefetches of the first weights
  // (prefetch_start) overlap with the preparation.
  int64_t max_private_inputs;
  // Whether the load ports limit integer products: two loads and two products per cycle. Row values then come from
  // registers that several panels share, or four at a time, instead of one load per product.
  bool saves_loads;
};

namespace tuning {
constexpr Tuning generic = {4, 1 << 14, false};         // the portable path: not measured
constexpr Tuning zen3 = {4, 1 << 14, false};            // AVX2: as on Emerald Rapids, 32 MB L3
constexpr Tuning emerald_rapids = {4, 1 << 14, false};  // AVX-512: four streams 0.89 to 0.97 of the time of one
constexpr Tuning zen5 = {1, 1 << 15, true};  // AVX-512 with BF16, Zen 4 and 5: one stream 0.87 to 0.92 of four
}  // namespace tuning

// Caches, the same for all processors so far.
constexpr int64_t kPrefetchBytes = 1 << 14;  // distance of prefetches of weights, all streams together: half of an L1
constexpr int64_t kStripUnits = 64;          // k units of a strip: its rows, sums and next weights fit in L1
constexpr int64_t kInterleaveUnits = 128;    // k units whose rows are interleaved at a time: they stay in L1

// Work below which waking a thread, some microseconds, costs more than it saves.
constexpr int64_t kMinParallelProducts = 1 << 17;      // multiply-adds of a linear layer
constexpr int64_t kMinParallelInputs = 1 << 16;        // inputs of a linear layer to prepare
constexpr int64_t kMinParallelScores = 1 << 15;        // multiply-adds of attention scores
constexpr int64_t kMinParallelKvElements = 1 << 10;    // keys to write, in elements: each may miss the caches
constexpr int64_t kMinParallelNormElements = 1 << 14;  // elements to normalise
constexpr int64_t kMinParallelCopyBytes = 1 << 16;     // bytes of rows to copy
constexpr int64_t kMinParallelIds = 1 << 17;           // logits that a greedy row reads, about 20 us

}  // namespace fd

#if defined(FD_TUNING)
namespace fd {
namespace FD_ISA {
constexpr Tuning kTuning = tuning::FD_TUNING;
}  // namespace FD_ISA
}  // namespace fd
#endif
