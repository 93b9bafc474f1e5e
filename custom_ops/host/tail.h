// SPDX-License-Identifier: Apache-2.0
// Tokens that are guessed to follow a text already: drafts that other drafts are to extend. They count as text for one
// call and are not kept.
#pragma once

#include <cstdint>

namespace fd {

constexpr int32_t kMaxTail = 16;

struct Tail {
  const int32_t* tokens = nullptr;
  int32_t num_tokens = 0;  // at most kMaxTail
};

// Tails of a batch: tokens[cu_tokens[i] .. cu_tokens[i + 1]) is that of entry i; without any, cu_tokens is null.
struct Tails {
  const int32_t* cu_tokens;
  const int32_t* tokens;
  Tail at(int64_t i) const {
    return cu_tokens == nullptr ? Tail{} : Tail{tokens + cu_tokens[i], cu_tokens[i + 1] - cu_tokens[i]};
  }
};

}  // namespace fd
