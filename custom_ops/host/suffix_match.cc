// SPDX-License-Identifier: Apache-2.0
#include "host/suffix_match.h"

namespace fd {

MatchPoints::MatchPoints(const SuffixForest& forest, uint32_t root, const int32_t* text_end, int max_match)
    : forest_(forest), root_(root), text_end_(text_end) {
  std::fill_n(nodes_, max_match + 1, kUnknown);
}

uint32_t MatchPoints::node(int match_len) {
  uint32_t& id = nodes_[match_len];
  if (id == kUnknown) id = forest_.find(root_, text_end_ - match_len, match_len);
  return id;
}

void MatchPoints::locate(int match_len, SuffixDraft* out) {
  const uint32_t id = node(match_len);
  out->is_located = id != 0;
  if (id != 0) out->position = forest_.node(id).pos + match_len;
}

void CachedMatcher::walk(int match_len, int max_tokens, double min_prob, SuffixDraft* out) {
  uint32_t id = points_.node(match_len);
  double prob = 1;
  for (int depth = match_len; out->num_tokens < max_tokens; ++depth) {
    const SuffixNode& here = forest_.node(id);
    int32_t token;
    if (depth < here.depth) {
      token = forest_.tape().at(here.pos)[depth];
    } else {
      if (here.first_child == 0) return;
      const SuffixNode& next = forest_.node(here.first_child);
      prob *= static_cast<double>(next.count) / here.count;
      id = here.first_child;
      token = next.token;
    }
    if (prob < min_prob) return;
    out->tokens[out->num_tokens++] = token;
    out->score += prob;
  }
}

OwnMatcher::OwnMatcher(const SuffixForest& forest, uint32_t root, int window, const Tail& tail, int max_match)
    : forest_(forest), window_(window + tail.num_tokens), points_(forest, root, text_ + window_, max_match) {
  std::copy_n(forest.tape().at(static_cast<uint32_t>(forest.tape().end() - window)), window, text_);
  std::copy_n(tail.tokens, tail.num_tokens, text_ + window);
  const int32_t* last = text_ + window_ - 1;
  for (int end = window_ - 1; end > 0; --end) {
    const int limit = std::min(end, max_match);
    int n = 0;
    while (n < limit && text_[end - 1 - n] == last[-n]) ++n;
    if (n == 0) continue;
    ends_[num_ends_] = static_cast<uint16_t>(end);
    match_lens_[num_ends_++] = static_cast<uint8_t>(n);
  }
}

uint32_t OwnMatcher::count(int match_len) {
  const auto longer = [match_len](uint8_t n) { return n >= match_len; };
  return points_.count(match_len) + static_cast<uint32_t>(std::count_if(match_lens_, match_lens_ + num_ends_, longer));
}

OwnMatcher::Next OwnMatcher::from_tree(uint32_t id, int depth) const {
  if (id == 0) return {0, 0};
  const SuffixNode& here = forest_.node(id);
  if (depth < here.depth) return {forest_.tape().at(here.pos)[depth], here.count};
  const SuffixNode& next = forest_.node(here.first_child);
  return {static_cast<int32_t>(next.token), next.count};
}

uint32_t OwnMatcher::step(uint32_t id, int depth, int32_t token) const {
  if (id == 0) return 0;
  const SuffixNode& here = forest_.node(id);
  if (depth == here.depth) return forest_.child(id, token);
  return forest_.tape().at(here.pos)[depth] == token ? id : 0;
}

// Returns the most frequent next token; among equals the most recent one. The window is more recent than the tree.
OwnMatcher::Next OwnMatcher::best_next(uint32_t id, int depth, const uint16_t* ends, int num_ends, int drafted) const {
  Next seen[kMaxWindow];
  int num_seen = 0;
  for (int i = 0; i < num_ends; ++i) {
    const int32_t token = text_[ends[i] + drafted];
    int k = 0;
    while (k < num_seen && seen[k].token != token) ++k;
    if (k == num_seen) {
      const uint32_t next = step(id, depth, token);
      seen[num_seen++] = {token, next == 0 ? 0 : forest_.node(next).count};
    }
    ++seen[k].count;
  }
  Next best{0, 0};
  for (int k = 0; k < num_seen; ++k) {
    if (seen[k].count > best.count) best = seen[k];
  }
  const Next tree = from_tree(id, depth);
  return tree.count > best.count ? tree : best;
}

void OwnMatcher::walk(int match_len, int max_tokens, double min_prob, SuffixDraft* out) {
  uint16_t ends[kMaxWindow];
  int num_ends = 0;
  for (int i = 0; i < num_ends_; ++i) {
    if (match_lens_[i] >= match_len) ends[num_ends++] = ends_[i];
  }
  uint32_t id = points_.node(match_len);
  double prob = 1;
  for (int drafted = 0; drafted < max_tokens; ++drafted) {
    const int depth = match_len + drafted;
    const uint32_t total = (id == 0 ? 0 : forest_.node(id).count) + static_cast<uint32_t>(num_ends);
    const Next next = best_next(id, depth, ends, num_ends, drafted);
    prob *= static_cast<double>(next.count) / total;
    if (prob < min_prob) return;
    out->tokens[drafted] = text_[window_ + drafted] = next.token;
    out->num_tokens = drafted + 1;
    out->score += prob;
    id = step(id, depth, next.token);
    num_ends = static_cast<int>(
        std::copy_if(ends, ends + num_ends, ends, [&](uint16_t end) { return text_[end + drafted] == next.token; }) -
        ends);
  }
}

}  // namespace fd
