// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/threads.h"
#include "cpu_ops/families.h"

namespace fd {
namespace FD_ISA {

void gather(const GatherArgs& a) {
  const char* table = static_cast<const char*>(a.table);
  char* out = static_cast<char*>(a.out);
  parallel_for(a.rows, a.rows * a.row_bytes >= 65536, [&](int64_t row) {
    std::memcpy(out + row * a.row_bytes, table + a.ids[row] * a.row_bytes, static_cast<size_t>(a.row_bytes));
  });
}

}  // namespace FD_ISA
}  // namespace fd
