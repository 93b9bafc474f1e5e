// SPDX-License-Identifier: Apache-2.0
// The kernels that each instruction-set path defines.
#pragma once

#include "cpu_ops/experts.h"
#include "cpu_ops/latent_attention.h"

namespace fd {

#define FD_DECLARE_PATH(path)                               \
  namespace path {                                          \
  void pack_linear(const PackArgs&);                        \
  void linear(const LinearArgs&);                           \
  bool pack_quantized(const PackQuantizedArgs&);            \
  PackError pack_coded(const PackCodedArgs&);               \
  void linear_quantized(const QuantizedLinearArgs&);        \
  void project_heads(const ProjectHeadsArgs&);              \
  void rms_norm(const RmsNormArgs&);                        \
  void gather(const GatherArgs&);                           \
  void gather_quantized(const QuantizedGatherArgs&);        \
  void append_attention(const AttentionArgs&);              \
  void append_latent_attention(const LatentAttentionArgs&); \
  void route(const RouteArgs&);                             \
  void experts_up(const ExpertsUpArgs&);                    \
  void experts_down(const ExpertsDownArgs&);                \
  }

FD_DECLARE_PATH(portable)
FD_DECLARE_PATH(avx2)
FD_DECLARE_PATH(avx512)
FD_DECLARE_PATH(avx512_bf16)

#undef FD_DECLARE_PATH

}  // namespace fd
