// SPDX-License-Identifier: Apache-2.0
// One call for many live texts: the tokens that each has gained, and the tokens that are proposed to follow it.
#pragma once

#include <cstdint>

#include "host/tail.h"

namespace fd {

struct TextBatch {
  int64_t num_texts, stride;
  const int32_t* slots;
  const int32_t* cu_tokens;  // tokens[cu_tokens[i] .. cu_tokens[i + 1]) are appended to the text of slots[i]
  const int32_t* tokens;
  const int32_t* caps;      // maximum drafts of each text, at most `stride`; 0 or less: none
  const int32_t* cu_tails;  // null: no tails
  const int32_t* tails;
  int32_t* drafts;      // [num_texts, stride]
  int32_t* counts;      // number of drafts of each text
  int32_t* match_lens;  // last tokens of each text that occurred before
  int32_t* is_shared;   // 1 if the draft follows the cached output of another request; suffix decoding only

  Tail tail(int64_t i) const { return Tails{cu_tails, tails}.at(i); }
  const int32_t* added(int64_t i) const { return tokens + cu_tokens[i]; }
  int64_t num_added(int64_t i) const { return cu_tokens[i + 1] - cu_tokens[i]; }

  // Returns 0, or 1 + the index of the first text whose slot is not live.
  template <class IsLive>
  int64_t find_wrong_slot(IsLive is_live) const {
    for (int64_t i = 0; i < num_texts; ++i) {
      if (!is_live(slots[i])) return 1 + i;
    }
    return 0;
  }
};

}  // namespace fd
