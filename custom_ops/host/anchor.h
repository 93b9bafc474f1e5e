// SPDX-License-Identifier: Apache-2.0
// Where a text stood in a source that it was copying: an edited token or line ends a match, but the text mostly comes
// back close behind the place that it left. Two tokens say where, long before a match has grown again.
//
//   source   ... a b c d e f g h i j k ...   window: the tokens around `d`, copied, so that the source may leave memory
//   text     ... a b c d x y g h             left behind `d`; "g h" is evidence of 2 that `i j k` follow
//
// Of several places the one with the most evidence counts, then the nearest; the place that was left, where the text
// goes on if something was inserted there, comes last.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/tail.h"

namespace fd {

constexpr int kLongMatch = 16;    // tokens copied without an edit that make a source
constexpr int kMaxEvidence = 16;  // more are all the same

struct Resumption {
  int evidence = 0;  // tokens of the text that lie before `place` in the window, 0: it has not come back
  int place = 0;     // of the window: what follows
};

class Anchor {
 public:
  // The text has just said source[place - match_len .. place) of a source that reaches from `first` to `end`.
  template <class TokenAt>
  void set(int64_t first, int64_t place, int64_t end, int match_len, TokenAt token_at) {
    begin_ = std::max(first, place - kMaxEvidence);
    size_ = static_cast<int>(std::min(end, place + kAhead) - begin_);
    for (int i = 0; i < size_; ++i) window_[i] = token_at(begin_ + i);
    at_ = static_cast<int>(place - begin_);
    match_len_ = match_len;
    is_left_ = false;
    num_said_ = 0;
  }
  // The text is elsewhere, but may come to what lies ahead.
  void leave() { is_left_ = true; }
  // False while the text goes on in the window and much of it lies ahead.
  bool is_worn() const { return is_left_ || size_ - at_ < kAhead / 2; }

  void extend(const int32_t* tokens, int64_t num_tokens);
  // Behind the text and `tail`, which counts as text here.
  Resumption find(const Tail& tail) const;

  int match_len() const { return match_len_; }
  int num_following(int place) const { return size_ - place; }
  const int32_t* following(int place) const { return window_ + place; }
  int64_t position(int place) const { return begin_ + place; }  // in the source

 private:
  static constexpr int kAhead = 112;
  static constexpr int kMaxSaid = 64;  // tokens after which a text that was left is forgotten

  int evidence(int place) const;

  int64_t begin_ = 0;  // position of the window in the source
  int size_ = 0, at_ = 0, match_len_ = 0, num_said_ = 0;
  bool is_left_ = false;
  int32_t window_[kMaxEvidence + kAhead] = {};
  int32_t said_[kMaxSaid] = {};  // since the source was left
};

}  // namespace fd
