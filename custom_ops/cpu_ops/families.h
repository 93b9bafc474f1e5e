// SPDX-License-Identifier: Apache-2.0
// The launchers that one path defines, and their table.
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {

#define FD_DECLARE_PATH(path)                        \
  namespace path {                                   \
  void pack_linear(const PackArgs&);                 \
  void linear(const LinearArgs&);                    \
  bool pack_quantized(const PackQuantizedArgs&);     \
  void linear_quantized(const QuantizedLinearArgs&); \
  void rms_norm(const RmsNormArgs&);                 \
  void gather(const GatherArgs&);                    \
  void append_attention(const AttentionArgs&);       \
  float read_memory(const void*, int64_t);           \
  double multiply_registers(int64_t);                \
  double multiply_integers(int64_t);                 \
  }

FD_DECLARE_PATH(portable)
FD_DECLARE_PATH(avx2)
FD_DECLARE_PATH(avx512)

#undef FD_DECLARE_PATH

}  // namespace fd
