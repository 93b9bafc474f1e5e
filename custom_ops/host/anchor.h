// SPDX-License-Identifier: Apache-2.0
// The place in a source from which a text is being copied. An edited token or line ends a match, but the text usually
// returns to the source shortly after the place where it diverged. Two matching tokens suffice to find where, long
// before the match is long again.
//
//   source   ... a b c d e f g h i j k ...   window: a copy of the tokens around `d`; the source itself may be evicted
//   text     ... a b c d x y g h             diverged after `d`; the last 2 tokens match at `g h`: draft `i j k`
//
// The candidate with the longest match is chosen, and among equals the nearest one after the divergence. The place of
// the divergence, where the text continues after an insertion, is tried last.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/tail.h"

namespace fd {

constexpr int kLongMatch = 16;       // tokens copied without an edit that set an anchor
constexpr int kMaxResumeMatch = 16;  // longer matches after a divergence are not distinguished

// Where a text returned to its source.
struct Resumption {
  int match_len = 0;  // last tokens of the text that equal those before `index`; 0: the text has not returned
  int index = 0;      // in the window, of the token that should follow
};

class Anchor {
 public:
  // The last match_len tokens of the text are source[position - match_len .. position). The source is [first, end).
  template <class TokenAt>
  void set(int64_t first, int64_t position, int64_t end, int match_len, TokenAt token_at) {
    begin_ = std::max(first, position - kMaxResumeMatch);
    size_ = static_cast<int>(std::min(end, position + kWindowAhead) - begin_);
    for (int i = 0; i < size_; ++i) window_[i] = token_at(begin_ + i);
    next_ = static_cast<int>(position - begin_);
    copied_len_ = match_len;
    has_diverged_ = false;
    num_diverged_ = 0;
  }
  // Makes the anchor expect a text that has not copied the source yet.
  void mark_diverged() { has_diverged_ = true; }
  // Returns false while the text still copies the window and much of the window is ahead.
  bool needs_update() const { return has_diverged_ || size_ - next_ < kWindowAhead / 2; }

  void extend(const int32_t* tokens, int64_t num_tokens);
  // Returns where the text and `tail`, which counts as text in this call, returned to the source.
  Resumption find(const Tail& tail) const;

  int copied_len() const { return copied_len_; }
  int num_following(int index) const { return size_ - index; }
  const int32_t* following(int index) const { return window_ + index; }
  int64_t source_position(int index) const { return begin_ + index; }

 private:
  static constexpr int kWindowAhead = 112;
  static constexpr int kMaxDiverged = 64;  // tokens after a divergence until the anchor is dropped

  int match_len_at(int index) const;

  int64_t begin_ = 0;  // position of the window in the source
  int size_ = 0;       // tokens in the window
  int next_ = 0;       // index of the token that follows the copied ones
  int copied_len_ = 0, num_diverged_ = 0;
  bool has_diverged_ = false;
  int32_t window_[kMaxResumeMatch + kWindowAhead] = {};
  int32_t diverged_[kMaxDiverged] = {};  // tokens of the text since the divergence
};

}  // namespace fd
