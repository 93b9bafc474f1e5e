// SPDX-License-Identifier: Apache-2.0
// The attainable floor of a launch: loops that do only what no kernel can avoid. They load every line of the memory
// that the kernel reads, expand it as its format requires and multiply it by as many rows, on the same threads. Work on
// sums that the format requires is included: the two limbs of 16-bit rows are joined, and where groups have scales, the
// sum of a group times its scale is added to a total. Rows are not prepared, outputs neither scaled nor written, and no
// softmax is computed. Each loop returns the number of 64-byte lines that it has multiplied, counted once per row.
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {
namespace roofline {

// How a loop reads memory. The fastest form depends on the processor.
struct LoopForm {
  int64_t streams;  // read at a time: 1, 2 or 4, fewer if their sums would not fit the registers
  int64_t
      ahead_bytes;  // prefetch distance of linear layers, all streams together; attention prefetches its next KV block
  int64_t interleaves_row_blocks;  // not 0: all row blocks multiply a strip of weights before the next strip
};

int64_t linear_loop(const LinearArgs&, const LoopForm&);
int64_t linear_quantized_loop(const QuantizedLinearArgs&, const LoopForm&);
int64_t attention_loop(const AttentionArgs&, const LoopForm&);

// Returns the integer products per weight and row: 2 where 16-bit rows are multiplied as two limbs.
int64_t row_limbs(Quantization);

}  // namespace roofline
}  // namespace fd
