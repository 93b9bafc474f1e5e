// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/verify.h"

namespace fd {

// The rows of request b are first_row[b] .. first_row[b] + row_count[b] - 1 of target, drafts (with a stride), survives
// and emitted.
template <class Draft>
void verify_draft_tokens(VerifyRule rule, const int32_t* target, const Draft* drafts, int64_t stride,
                         const uint8_t* survives, const int32_t* first_row, const int32_t* row_count, int64_t num_seqs,
                         int32_t* num_accepted, int32_t* emitted);

}  // namespace fd
