// SPDX-License-Identifier: Apache-2.0
// Verification of the drafts of one request, shared by all backends (docs/design/exactness.md).
#pragma once

#include <cstdint>

#include "common/scalar_lanes.h"

namespace fd {

enum AcceptPolicy { kAcceptNormal, kAcceptAll, kRejectAll };

struct VerifyRule {
  bool relaxed;  // accept every draft in the allowed set (lossy)
  AcceptPolicy policy;
};

FD_RULE bool accepts(VerifyRule rule, int32_t target, int64_t draft, bool draft_is_allowed) {
  if (draft < 0 || rule.policy == kRejectAll) return false;
  return rule.policy == kAcceptAll || target == draft || (rule.relaxed && draft_is_allowed);
}

// Verifies the drafts of num_rows rows: target[i] is the token sampled in row i, drafts[i * stride] the draft that row
// i verifies (negative: none). Writes the accepted drafts and then the bonus token to `emitted`. Returns the number of
// accepted drafts, which is one less than the number of emitted tokens; -1 for no rows.
FD_RULE int32_t verify_request(VerifyRule rule, const int32_t* target, const int64_t* drafts, int64_t stride,
                               const uint8_t* draft_is_allowed, int32_t num_rows, int32_t* emitted) {
  for (int32_t row = 0; row < num_rows; ++row) {
    const int64_t draft = row + 1 < num_rows ? drafts[row * stride] : -1;
    if (!accepts(rule, target[row], draft, draft_is_allowed[row] != 0)) {
      emitted[row] = target[row];
      return row;
    }
    emitted[row] = static_cast<int32_t>(draft);
  }
  return -1;
}

}  // namespace fd
