// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/verify.h"

#include "common/sampling.h"

namespace fd {

void verify_draft_tokens(VerifyRule rule, const int32_t* target, const int64_t* int_params,
                         const uint8_t* draft_is_allowed, const int32_t* first_row, const int32_t* row_count,
                         int64_t num_seqs, int32_t* num_accepted, int32_t* emitted) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    const int32_t first = first_row[b];
    num_accepted[b] = verify_request(rule, target + first, int_params + first * kNumIntParams + kDraftId, kNumIntParams,
                                     draft_is_allowed + first, row_count[b], emitted + first);
  }
}

}  // namespace fd
