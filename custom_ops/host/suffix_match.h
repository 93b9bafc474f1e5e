// SPDX-License-Identifier: Apache-2.0
// What will follow a text, by what followed its last tokens before (SuffixDecoding, arXiv 2411.04975): for every length
// m whose last m tokens have occurred, the path of most frequent continuations while its probability, the product of
// count(next) / count(here), holds; its score is the sum of the probabilities, the expected number of right tokens. The
// best score wins, among equals the longest m.
//
// A tree of depth D serves matches of up to D - reach tokens and drafts of up to `reach`, so that every match counted
// has all its continuation in the tree.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/suffix_forest.h"
#include "host/tail.h"

namespace fd {

constexpr int kMaxReach = 64;

struct DraftRules {
  int max_depth;    // D
  int reach;        // most draft tokens, at most D / 2
  double factor;    // a match of m tokens drafts at most m * factor
  double min_prob;  // of the path
  int max_match() const { return max_depth - reach; }
  int budget(int match_len, int cap) const {
    const int by_factor = static_cast<int>(std::min(match_len * factor + 1e-9, static_cast<double>(reach)));
    return std::min(by_factor, cap);
  }
};

struct Found {
  double score = 0;
  int match_len = 0, num_tokens = 0;
  bool is_placed = false;  // the match lies in a tree, and its last occurrence there ends before `place` of the tape
  uint32_t place = 0;
  int32_t tokens[kMaxReach];
};

// Where the last m tokens of a text occur in one tree; looked up once per m.
class MatchPoints {
 public:
  MatchPoints(const SuffixForest& forest, uint32_t root, const int32_t* text_end, int max_match);
  uint32_t node(int match_len);
  uint32_t count(int match_len) { return node(match_len) == 0 ? 0 : forest_.node(node(match_len)).count; }
  // Writes where the match lies.
  void place(int match_len, Found* out);

 private:
  static constexpr uint32_t kUnknown = ~uint32_t{0};
  const SuffixForest& forest_;
  uint32_t root_;
  const int32_t* text_end_;
  uint32_t nodes_[kMaxDepth + 1];
};

// Other texts' tree. The end of a text counts as a continuation that nothing can match.
class SharedMatcher {
 public:
  SharedMatcher(const SuffixForest& forest, uint32_t root, const int32_t* text_end, int max_match)
      : forest_(forest), points_(forest, root, text_end, max_match) {}
  uint32_t count(int match_len) { return points_.count(match_len); }
  void place(int match_len, Found* out) { points_.place(match_len, out); }
  void walk(int match_len, int budget, double min_prob, Found* out);

 private:
  const SuffixForest& forest_;
  MatchPoints points_;
};

// A text's own tree, which holds the suffixes of full depth, and the window of its last tokens, where the shorter ones
// begin; these, and the tail behind them, are compared directly. An occurrence that reaches the end of the text goes on
// in the draft itself.
class OwnMatcher {
 public:
  OwnMatcher(const SuffixForest& forest, uint32_t root, int window, const Tail& tail, int max_match);
  uint32_t count(int match_len);
  void place(int match_len, Found* out) { points_.place(match_len, out); }
  void walk(int match_len, int budget, double min_prob, Found* out);

 private:
  struct Next {
    int32_t token;
    uint32_t count;
  };
  Next from_tree(uint32_t node, int depth) const;
  uint32_t step(uint32_t node, int depth, int32_t token) const;  // the node one token further, 0 if none
  Next best_next(uint32_t node, int depth, const uint16_t* ends, int num_ends, int drafted) const;

  const SuffixForest& forest_;
  int window_, num_ends_ = 0;  // the window with its tail
  static constexpr int kMaxWindow = kMaxDepth + kMaxTail;
  int32_t text_[kMaxWindow + kMaxReach];  // the window, the tail, then the draft
  uint16_t ends_[kMaxWindow];             // places before the draft where matches end, latest first
  uint8_t match_lens_[kMaxWindow];        // of those matches
  MatchPoints points_;
};

// The largest m in [low, high] whose count is above `floor`, 0 if none; counts fall with m.
template <class Matcher>
int longest_above(Matcher& matcher, int low, int high, uint32_t floor) {
  if (low > high || matcher.count(low) <= floor) return 0;
  if (matcher.count(high) > floor) return high;
  for (int step = 1; low + step < high; step *= 2) {  // most matches are short, and short ones are looked up fast
    if (matcher.count(low + step) <= floor) {
      high = low + step;
      break;
    }
    low += step;
  }
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (matcher.count(middle) > floor ? low : high) = middle;
  }
  return low;
}

// Tries matches from the longest down and leaves out those that cannot win: a match as frequent as a longer one has the
// same continuations, and no score exceeds its budget. A draft that does not score above `bar` is none. Scores that
// differ by rounding alone are equal: thirds add up to one in some orders only.
constexpr double kRounding = 1e-12;
template <class Matcher>
Found best_draft(Matcher& matcher, int max_match, const DraftRules& rules, int cap, double bar) {
  Found best;
  best.score = bar;
  for (int m = longest_above(matcher, 1, max_match, 0); m > 0;) {
    if (rules.budget(m, cap) <= best.score) break;
    Found found;
    matcher.walk(m, rules.budget(m, cap), rules.min_prob, &found);
    if (found.score > best.score + kRounding) {
      best = found;
      best.match_len = m;
      matcher.place(m, &best);
    }
    int low = 1;
    while (low < m && rules.budget(low, cap) <= best.score) ++low;
    m = longest_above(matcher, low, m - 1, matcher.count(m));
  }
  return best;
}

}  // namespace fd
