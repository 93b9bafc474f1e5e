// SPDX-License-Identifier: Apache-2.0
// Drafts from suffix trees (SuffixDecoding, arXiv 2411.04975). For every length m whose last m tokens have occurred
// before, the draft follows the most frequent continuation while the probability of the path, the product of
// count(next) / count(here), is at least min_prob. Its score is the sum of these probabilities: the expected number of
// accepted tokens. The draft with the highest score is chosen, and among equal scores the one with the longest m.
//
// A tree of depth D serves matches of up to D - max_drafts tokens, so that the tree contains all continuations of a
// match.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/suffix_forest.h"
#include "host/tail.h"

namespace fd {

constexpr int kMaxDrafts = 64;

struct DraftLimits {
  int max_depth;    // D
  int max_drafts;   // at most D / 2
  double factor;    // a match of m tokens drafts at most m * factor tokens
  double min_prob;  // of a path
  int max_match() const { return max_depth - max_drafts; }
  // Returns the maximum draft length for a match.
  int max_tokens(int match_len, int cap) const {
    const int by_factor = static_cast<int>(std::min(match_len * factor + 1e-9, static_cast<double>(max_drafts)));
    return std::min(by_factor, cap);
  }
};

struct SuffixDraft {
  double score = 0;
  int match_len = 0, num_tokens = 0;
  bool is_located = false;  // the match is in a tree; its latest occurrence ends before `position` of the tape
  uint32_t position = 0;
  int32_t tokens[kMaxDrafts];
};

// The nodes of the last m tokens of a text in one tree; each m is looked up once.
class MatchPoints {
 public:
  MatchPoints(const SuffixForest& forest, uint32_t root, const int32_t* text_end, int max_match);
  uint32_t node(int match_len);
  uint32_t count(int match_len) { return node(match_len) == 0 ? 0 : forest_.node(node(match_len)).count; }
  // Writes the position of the match.
  void locate(int match_len, SuffixDraft* out);

 private:
  static constexpr uint32_t kUnknown = ~uint32_t{0};
  const SuffixForest& forest_;
  uint32_t root_;
  const int32_t* text_end_;
  uint32_t nodes_[kMaxDepth + 1];
};

// Matches a text with the tree of other texts. The end of one of them counts as a continuation that matches no token.
class CachedMatcher {
 public:
  CachedMatcher(const SuffixForest& forest, uint32_t root, const int32_t* text_end, int max_match)
      : forest_(forest), points_(forest, root, text_end, max_match) {}
  uint32_t count(int match_len) { return points_.count(match_len); }
  void locate(int match_len, SuffixDraft* out) { points_.locate(match_len, out); }
  void walk(int match_len, int max_tokens, double min_prob, SuffixDraft* out);

 private:
  const SuffixForest& forest_;
  MatchPoints points_;
};

// Matches a text with itself: with its tree, which contains the suffixes of full depth, and with the window of its last
// tokens and the tail, where shorter suffixes start; these are compared directly. An occurrence that reaches the end of
// the text continues in the draft itself.
class OwnMatcher {
 public:
  OwnMatcher(const SuffixForest& forest, uint32_t root, int window, const Tail& tail, int max_match);
  uint32_t count(int match_len);
  void locate(int match_len, SuffixDraft* out) { points_.locate(match_len, out); }
  void walk(int match_len, int max_tokens, double min_prob, SuffixDraft* out);

 private:
  struct Next {
    int32_t token;
    uint32_t count;
  };
  Next from_tree(uint32_t node, int depth) const;
  uint32_t step(uint32_t node, int depth, int32_t token) const;  // the node after one more token, 0 if there is none
  Next best_next(uint32_t node, int depth, const uint16_t* ends, int num_ends, int drafted) const;

  const SuffixForest& forest_;
  int window_, num_ends_ = 0;  // the window with its tail
  static constexpr int kMaxWindow = kMaxDepth + kMaxTail;
  int32_t text_[kMaxWindow + kMaxDrafts];  // the window, the tail, then the draft
  uint16_t ends_[kMaxWindow];              // indices in text_ at which matches end, latest first
  uint8_t match_lens_[kMaxWindow];         // lengths of those matches
  MatchPoints points_;
};

// Returns the largest m in [low, high] whose count is above `floor`, or 0; counts decrease with m.
template <class Matcher>
int longest_above(Matcher& matcher, int low, int high, uint32_t floor) {
  if (low > high || matcher.count(low) <= floor) return 0;
  if (matcher.count(high) > floor) return high;
  for (int step = 1; low + step < high; step *= 2) {  // most matches are short, and short matches are looked up quickly
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

// Tries matches from the longest to the shortest and skips those that cannot win: a match as frequent as a longer one
// has the same continuations, and a score cannot exceed the maximum draft length. Drafts must score above min_score.
// Scores that differ by rounding only are equal, because sums of fractions depend on their order.
constexpr double kRounding = 1e-12;
template <class Matcher>
SuffixDraft best_draft(Matcher& matcher, int max_match, const DraftLimits& limits, int cap, double min_score) {
  SuffixDraft best;
  best.score = min_score;
  for (int m = longest_above(matcher, 1, max_match, 0); m > 0;) {
    if (limits.max_tokens(m, cap) <= best.score) break;
    SuffixDraft found;
    matcher.walk(m, limits.max_tokens(m, cap), limits.min_prob, &found);
    if (found.score > best.score + kRounding) {
      best = found;
      best.match_len = m;
      matcher.locate(m, &best);
    }
    int low = 1;
    while (low < m && limits.max_tokens(low, cap) <= best.score) ++low;
    m = longest_above(matcher, low, m - 1, matcher.count(m));
  }
  return best;
}

}  // namespace fd
