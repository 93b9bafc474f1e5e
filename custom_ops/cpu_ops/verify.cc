// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/verify.h"

namespace fd {

template <class Draft>
void verify_draft_tokens(VerifyRule rule, const int32_t* target, const Draft* drafts, int64_t stride,
                         const uint8_t* survives, const int32_t* first_row, const int32_t* row_count, int64_t num_seqs,
                         int32_t* num_accepted, int32_t* emitted) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    const int32_t first = first_row[b];
    num_accepted[b] = walk_drafts(rule, target + first, drafts + first * stride, stride, survives + first, row_count[b],
                                  emitted + first);
  }
}

template void verify_draft_tokens<int32_t>(VerifyRule, const int32_t*, const int32_t*, int64_t, const uint8_t*,
                                           const int32_t*, const int32_t*, int64_t, int32_t*, int32_t*);
template void verify_draft_tokens<int64_t>(VerifyRule, const int32_t*, const int64_t*, int64_t, const uint8_t*,
                                           const int32_t*, const int32_t*, int64_t, int32_t*, int32_t*);

}  // namespace fd
