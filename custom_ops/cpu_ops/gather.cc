// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/tuning.h"

namespace fd {
namespace FD_ISA {
namespace {

// Copies the weights of one output from its panel, where they are interleaved in units of four bytes with those of the
// other fifteen outputs.
void copy_from_panel(const char* panel, int64_t lane, int64_t row_bytes, char* out) {
  constexpr int64_t unit = 4;
  const char* source = panel + lane * unit;
  const int64_t whole = row_bytes / unit * unit;
  for (int64_t byte = 0; byte < whole; byte += unit) std::memcpy(out + byte, source + byte * kPanel, unit);
  std::memcpy(out + whole, source + whole * kPanel, static_cast<size_t>(row_bytes - whole));
}

}  // namespace

void gather(const GatherArgs& a) {
  const char* table = static_cast<const char*>(a.table);
  parallel_for(a.rows, a.rows * a.row_bytes >= kMinParallelCopyBytes, [&](int64_t row) {
    char* out = static_cast<char*>(a.out) + row * a.row_bytes;
    const int64_t id = a.ids[row];
    if (a.panel_bytes == 0) {
      std::memcpy(out, table + id * a.row_bytes, static_cast<size_t>(a.row_bytes));
    } else {
      copy_from_panel(table + id / kPanel * a.panel_bytes, id % kPanel, a.row_bytes, out);
    }
  });
}

}  // namespace FD_ISA
}  // namespace fd
