// SPDX-License-Identifier: Apache-2.0
// Linear layers that one thread computes, in two parts: preparing all rows, and multiplying them by some panels. The
// outputs have the bits of linear and linear_quantized. Operators with several matrices are made of them.
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

// A packed matrix with the rows that it multiplies.
struct Product : QuantizedLinearArgs {
  bool is_quantized;
};

FD_INLINE int64_t float_size(DType dtype) { return dtype == DType::kBfloat16 ? 2 : 4; }

// Returns the product of rows x, one after the other, with a matrix of the size and format of `m`; `out` has the dtype
// of the rows.
static inline Product product_of(const PackedMatrices& m, const uint8_t* packed, const void* x, void* out,
                                 int64_t rows) {
  Product p{};
  p.x = x, p.packed = packed, p.out = out;
  p.rows = rows, p.n = p.out_stride = m.outputs, p.k = p.x_stride = m.inputs, p.gated = m.gated;
  p.dtype = p.out_dtype = m.dtype;
  p.form = m.form, p.is_quantized = m.is_quantized;
  return p;
}

static inline PreparedRows prepare(const Product& p) {
  return p.is_quantized ? prepare_quantized_rows(p) : prepare_rows(p);
}

// Multiplies prepared rows by panels [first, last).
static inline void multiply(const Product& p, const PreparedRows& rows, int64_t first, int64_t last) {
  p.is_quantized ? multiply_quantized_panels(p, rows, first, last) : multiply_panels(p, rows, first, last);
}

// The product that a thread computes at present, whose rows are prepared.
struct CurrentProduct {
  int64_t index = -1;
  Product product;
  PreparedRows rows;
};

}  // namespace FD_ISA
}  // namespace fd
