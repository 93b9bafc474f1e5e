// SPDX-License-Identifier: Apache-2.0
// Verification by comparison (exactness.md 4): the walk over one request's rows, shared by CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/scalar_lanes.h"

namespace fd {

enum AcceptPolicy { kAcceptNormal, kAcceptAll, kAcceptNone };

struct VerifyRule {
  bool relaxed;  // accept every draft of the surviving set (lossy)
  AcceptPolicy policy;
};

FD_RULE bool accepts(VerifyRule rule, int32_t target, int64_t draft, bool draft_survives) {
  if (draft < 0 || rule.policy == kAcceptNone) return false;
  return rule.policy == kAcceptAll || target == draft || (rule.relaxed && draft_survives);
}

// Walks num_rows rows: target[i] is the token drawn at row i, drafts[i * stride] the draft it judges (negative: none).
// Writes the accepted drafts and the first token that no draft covers to `emitted`. Returns the number of accepted
// drafts, one less than the number of emitted tokens; -1 for no rows.
template <class Draft>
FD_RULE int32_t walk_drafts(VerifyRule rule, const int32_t* target, const Draft* drafts, int64_t stride,
                            const uint8_t* survives, int32_t num_rows, int32_t* emitted) {
  for (int32_t row = 0; row < num_rows; ++row) {
    const int64_t draft = row + 1 < num_rows ? static_cast<int64_t>(drafts[row * stride]) : -1;
    if (!accepts(rule, target[row], draft, survives[row] != 0)) {
      emitted[row] = target[row];
      return row;
    }
    emitted[row] = static_cast<int32_t>(draft);
  }
  return -1;
}

}  // namespace fd
