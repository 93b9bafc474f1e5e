// SPDX-License-Identifier: Apache-2.0
#include "host/anchor.h"

namespace fd {

void Anchor::extend(const int32_t* tokens, int64_t num_tokens) {
  for (int64_t i = 0; i < num_tokens && size_ > 0; ++i) {
    if (!is_left_ && at_ < size_ && window_[at_] == tokens[i]) {
      ++at_;
      continue;
    }
    is_left_ = true;
    if (num_said_ == kMaxSaid) {
      size_ = 0;
    } else {
      said_[num_said_++] = tokens[i];
    }
  }
}

int Anchor::evidence(int place) const {
  const int limit = std::min({kMaxEvidence, num_said_, place});
  int n = 0;
  while (n < limit && window_[place - 1 - n] == said_[num_said_ - 1 - n]) ++n;
  return n;
}

Resumption Anchor::find(const Tail& tail) const {
  if (tail.num_tokens > 0) {
    Anchor behind = *this;
    behind.extend(tail.tokens, tail.num_tokens);
    return behind.find({});
  }
  Resumption best;
  if (!is_left_) return best;
  const auto consider = [&](int place) {
    const int found = evidence(place);
    if (found > best.evidence) best = {found, place};
  };
  for (int place = at_ + 1; place < size_; ++place) consider(place);
  if (at_ < size_) consider(at_);
  return best;
}

}  // namespace fd
