// SPDX-License-Identifier: Apache-2.0
#include "host/anchor.h"

namespace fd {

void Anchor::extend(const int32_t* tokens, int64_t num_tokens) {
  for (int64_t i = 0; i < num_tokens && size_ > 0; ++i) {
    if (!has_diverged_ && next_ < size_ && window_[next_] == tokens[i]) {
      ++next_;
      continue;
    }
    has_diverged_ = true;
    if (num_diverged_ == kMaxDiverged) {
      size_ = 0;
    } else {
      diverged_[num_diverged_++] = tokens[i];
    }
  }
}

int Anchor::match_len_at(int index) const {
  const int limit = std::min({kMaxResumeMatch, num_diverged_, index});
  int n = 0;
  while (n < limit && window_[index - 1 - n] == diverged_[num_diverged_ - 1 - n]) ++n;
  return n;
}

Resumption Anchor::find(const Tail& tail) const {
  if (tail.num_tokens > 0) {
    Anchor extended = *this;
    extended.extend(tail.tokens, tail.num_tokens);
    return extended.find({});
  }
  Resumption best;
  if (!has_diverged_) return best;
  const auto consider = [&](int index) {
    const int match_len = match_len_at(index);
    if (match_len > best.match_len) best = {match_len, index};
  };
  for (int index = next_ + 1; index < size_; ++index) consider(index);
  if (next_ < size_) consider(next_);
  return best;
}

}  // namespace fd
