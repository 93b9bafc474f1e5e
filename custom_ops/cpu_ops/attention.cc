// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/families.h"
namespace fd {
namespace FD_ISA {
void append_attention(const AttentionArgs&) {}
}  // namespace FD_ISA
}  // namespace fd
