// SPDX-License-Identifier: Apache-2.0
// One call over many live texts: what they have grown by, and what is guessed to follow them.
#pragma once

#include <cstdint>

#include "host/tail.h"

namespace fd {

struct TextBatch {
  int64_t num_texts, stride;
  const int32_t* slots;
  const int32_t* cu_tokens;  // tokens[cu_tokens[i] .. cu_tokens[i + 1]) are appended to the text of slots[i]
  const int32_t* tokens;
  const int32_t* caps;      // most drafts of each, at most `stride`; 0 and below: none
  const int32_t* cu_tails;  // null: no tails
  const int32_t* tails;
  int32_t* drafts;      // [num_texts, stride]
  int32_t* counts;      // drafts of each
  int32_t* match_lens;  // tokens that were found to occur earlier
  float* scores;        // expected number of right drafts; suffix decoding alone writes it and the next
  int32_t* is_shared;   // 1: another request's output was followed

  Tail tail(int64_t i) const { return Tails{cu_tails, tails}.at(i); }
  const int32_t* added(int64_t i) const { return tokens + cu_tokens[i]; }
  int64_t num_added(int64_t i) const { return cu_tokens[i + 1] - cu_tokens[i]; }

  // Returns 0, or 1 + the index of the first text that `is_live` does not know.
  template <class IsLive>
  int64_t find_wrong_slot(IsLive is_live) const {
    for (int64_t i = 0; i < num_texts; ++i) {
      if (!is_live(slots[i])) return 1 + i;
    }
    return 0;
  }
};

}  // namespace fd
