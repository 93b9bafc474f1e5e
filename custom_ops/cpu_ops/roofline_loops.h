// SPDX-License-Identifier: Apache-2.0
// The attainable floor of a launch, for benchmarks: loops that do nothing but what cannot be left out of it. They load
// every line of the very memory that the kernel reads, expand it as the format demands and multiply it by as many rows,
// on the same threads. What the format asks of sums belongs to it: those of a row of two limbs are joined, and where
// groups have scales, a group's sum times its scale is added to a total. No rows are prepared, no outputs scaled or
// written, no softmax taken. Each returns how many lines of 64 bytes it has multiplied, counted once for every row.
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {

// How a loop streams its memory: what one processor likes and another does not.
struct LoopForm {
  int64_t streams;      // at a time: 1, 2 or 4, fewer where their sums would not fit the registers
  int64_t ahead_bytes;  // how far ahead it fetches, all streams together; attention fetches its next block of the cache
  int64_t in_turns;     // not 0: blocks of rows meet short strips of a linear layer's weights in turns
};

#define FD_DECLARE_LOOPS(path)                                                \
  namespace path {                                                            \
  int64_t linear_loop(const LinearArgs&, const LoopForm&);                    \
  int64_t linear_quantized_loop(const QuantizedLinearArgs&, const LoopForm&); \
  int64_t attention_loop(const AttentionArgs&, const LoopForm&);              \
  int64_t row_limbs(Quantization);                                            \
  }

FD_DECLARE_LOOPS(portable)
FD_DECLARE_LOOPS(avx2)
FD_DECLARE_LOOPS(avx512)
FD_DECLARE_LOOPS(avx512_bf16)

#undef FD_DECLARE_LOOPS

}  // namespace fd
