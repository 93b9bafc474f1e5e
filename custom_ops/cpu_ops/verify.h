// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/verify.h"

namespace fd {

// Verifies the drafts of num_seqs requests. The rows of request b are first_row[b] .. first_row[b] + row_count[b] - 1
// of target, int_params, draft_is_allowed and emitted; its drafts are in column kDraftId of int_params.
void verify_draft_tokens(VerifyRule rule, const int32_t* target, const int64_t* int_params,
                         const uint8_t* draft_is_allowed, const int32_t* first_row, const int32_t* row_count,
                         int64_t num_seqs, int32_t* num_accepted, int32_t* emitted);

}  // namespace fd
