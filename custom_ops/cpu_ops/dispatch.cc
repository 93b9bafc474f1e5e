// SPDX-License-Identifier: Apache-2.0
#include "common/isa.h"
#include "cpu_ops/families.h"

namespace fd {

#define FD_TABLE(path)                                                                                       \
  Kernels {                                                                                                  \
    path::pack_linear, path::linear, path::rms_norm, path::swiglu, path::gather, path::rotary,               \
        path::append_attention                                                                               \
  }

const Kernels& kernels() {
  static const Kernels table = [] {
#if defined(FD_HAVE_AVX512)
    if (current_isa() == Isa::kAvx512) return FD_TABLE(avx512);
#endif
#if defined(FD_HAVE_AVX2)
    if (current_isa() == Isa::kAvx2) return FD_TABLE(avx2);
#endif
    return FD_TABLE(portable);
  }();
  return table;
}

}  // namespace fd
