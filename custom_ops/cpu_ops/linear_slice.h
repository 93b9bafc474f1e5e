// SPDX-License-Identifier: Apache-2.0
// Linear layers that one thread computes, in two parts: preparing all rows, and multiplying them by some panels. The
// outputs have the bits of linear and linear_quantized.
#pragma once

#include "cpu_ops/quant_rows.h"

namespace fd {
namespace FD_ISA {

// Rows without a norm, in the memory of the thread's Scratch::kRows.
struct PreparedRows {
  const void* units = nullptr;  // of bf16 and fp32 weights
  QuantizedRows quantized;
};

PreparedRows prepare_rows(const LinearArgs&);
void multiply_panels(const LinearArgs&, const PreparedRows&, int64_t first, int64_t last);

PreparedRows prepare_quantized_rows(const QuantizedLinearArgs&);
void multiply_quantized_panels(const QuantizedLinearArgs&, const PreparedRows&, int64_t first, int64_t last);

}  // namespace FD_ISA
}  // namespace fd
