// SPDX-License-Identifier: Apache-2.0
// Drafts of another proposer that are to be extended. They count as the end of a text for one call and are not stored.
#pragma once

#include <cstdint>

namespace fd {

constexpr int32_t kMaxTail = 16;

struct Tail {
  const int32_t* tokens = nullptr;
  int32_t num_tokens = 0;  // at most kMaxTail
};

// The tails of a batch: entry i is tokens[cu_tokens[i] .. cu_tokens[i + 1]). cu_tokens is null if there are no tails.
struct Tails {
  const int32_t* cu_tokens;
  const int32_t* tokens;
  Tail at(int64_t i) const {
    return cu_tokens == nullptr ? Tail{} : Tail{tokens + cu_tokens[i], cu_tokens[i + 1] - cu_tokens[i]};
  }
};

}  // namespace fd
