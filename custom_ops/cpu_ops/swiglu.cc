// SPDX-License-Identifier: Apache-2.0
#include "common/threads.h"
#include "common/vec.h"
#include "cpu_ops/families.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kElementsWorthAThread = 8192;

// silu(gate) * up = gate / (1 + e^-gate) * up, rounded once
FD_INLINE F16 gated(F16 gate, F16 up) { return mul(div(gate, add(splat(1.0f), exp(sub(zero(), gate)))), up); }

template <class T>
void swiglu_row(const T* gate, const T* up, T* out, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store_rounded(out + i, gated(load_as_float(gate + i), load_as_float(up + i)));
  const int tail = static_cast<int>(size - i);
  if (tail > 0) store_first(out + i, gated(load_first(gate + i, tail), load_first(up + i, tail)), tail);
}

template <class T>
void swiglu_typed(const SwigluArgs& a) {
  parallel_for(a.rows, a.rows * a.size >= kElementsWorthAThread, [&](int64_t row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row * 2 * a.size;
    swiglu_row(gate, gate + a.size, static_cast<T*>(a.out) + row * a.size, a.size);
  });
}

}  // namespace

void swiglu(const SwigluArgs& a) { a.dtype == DType::kBfloat16 ? swiglu_typed<uint16_t>(a) : swiglu_typed<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
