// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/vec.h"

namespace fd {
namespace FD_ISA {

// x / (1 + e^-x)
FD_INLINE FP32Vec16 silu(FP32Vec16 x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); }

}  // namespace FD_ISA
}  // namespace fd
