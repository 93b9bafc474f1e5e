// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/norm.h"

#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace FD_ISA {
namespace {

template <class T>
void rms_norm_typed(const RmsNormArgs& a) {
  parallel_for(a.rows, a.rows * a.size >= kMinParallelNormElements, [&](int64_t row) {
    norm_rows(static_cast<const T*>(a.x) + row * a.size, a.size, static_cast<const T*>(a.weight),
              static_cast<T*>(a.out) + row * a.size, 1, a.size, a.eps);
  });
}

}  // namespace

void rms_norm(const RmsNormArgs& a) {
  a.dtype == DType::kBfloat16 ? rms_norm_typed<uint16_t>(a) : rms_norm_typed<float>(a);
}

}  // namespace FD_ISA
}  // namespace fd
