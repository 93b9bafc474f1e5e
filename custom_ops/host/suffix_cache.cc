// SPDX-License-Identifier: Apache-2.0
#include "host/suffix_cache.h"

namespace fd {
namespace {

constexpr int kLog2LiveChunk = 10, kLog2SharedChunk = 12;
constexpr int kLog2Page = 10, kLog2HugePage = 16;  // in nodes: 32 KiB and 2 MiB
constexpr int64_t kMinHugeCache = 64 << 20;        // bytes; caches from this size on use huge pages
constexpr int64_t kBytesPerHead = 40;              // bytes of the cache per hash head: about one head per node
constexpr int64_t kMaxBytesPerToken = 96;          // two nodes, the token, and unused parts of chunks and pages
constexpr int64_t kBytesPerSalt = 256;             // map entry, string headers and root
constexpr int64_t kSuffixesPerStart = 512;         // the prefill that follows takes much longer
constexpr int64_t kSuffixesPerToken = 2;           // one to insert and one to evict
constexpr int kMinResumeMatch = 2;
constexpr int kNewestOutputMatch = 2 * kLongMatch;  // assumed match length of the latest output

}  // namespace

LiveText::LiveText(int max_depth)
    : max_depth_(max_depth),
      tape_(max_depth, kLog2LiveChunk),
      forest_(tape_, 0, kLog2Page),
      root_(forest_.add_root()) {}

void LiveText::extend(const int32_t* tokens, int64_t num_tokens) {
  tape_.append(tokens, num_tokens);
  anchor_.extend(tokens, num_tokens);
  const auto num_more = static_cast<int64_t>(tape_.end() - num_closed_) - max_depth_ + 1;
  if (0 < num_more && num_more <= SuffixForest::kMaxPrefetch) {  // the tree of a whole prompt stays in the caches
    forest_.prefetch(root_, static_cast<uint32_t>(num_closed_), static_cast<int>(num_more), max_depth_);
  }
  for (; num_closed_ + max_depth_ <= tape_.end(); ++num_closed_) {
    forest_.insert(root_, static_cast<uint32_t>(num_closed_), max_depth_);
  }
}

int LiveText::write_context(const Tail& tail, int32_t* out) const {
  const int size = static_cast<int>(std::min<uint64_t>(max_depth_, tape_.end()));
  if (size > 0) std::copy_n(tape_.at(static_cast<uint32_t>(tape_.end() - size)), size, out);
  std::copy_n(tail.tokens, tail.num_tokens, out + size);
  return size + tail.num_tokens;
}

SuffixDraft LiveText::propose(const DraftLimits& limits, const Tail& tail, int cap) const {
  if (window() == 0) return {};
  OwnMatcher matcher(forest_, root_, window(), tail, limits.max_match());
  return best_draft(matcher, std::min(limits.max_match(), window() + tail.num_tokens), limits, cap, 0);
}

void LiveText::set_anchor(const SuffixDraft& match) {
  anchor_.set(0, match.position, static_cast<int64_t>(tape_.end()), match.match_len,
              [this](int64_t i) { return *tape_.at(static_cast<uint32_t>(i)); });
}

// The match before the divergence counts half. A match of r tokens after it is assumed to be right with probability
// r / (r + 1), which is also the expected share of accepted drafts.
SuffixDraft LiveText::resume(const DraftLimits& limits, const Tail& tail, int cap, const SuffixDraft& best) const {
  const Resumption found = anchor_.find(tail);
  const double prob = found.match_len / (found.match_len + 1.0);
  if (found.match_len < std::max(kMinResumeMatch, best.match_len) || prob < limits.min_prob) return {};
  const int num_tokens =
      std::min(limits.max_tokens(anchor_.copied_len() / 2 + found.match_len, cap), anchor_.num_following(found.index));
  if (num_tokens * prob <= best.score + kRounding) return {};
  SuffixDraft draft;
  draft.score = num_tokens * prob;
  draft.match_len = found.match_len;
  draft.num_tokens = num_tokens;
  std::copy_n(anchor_.following(found.index), num_tokens, draft.tokens);
  return draft;
}

std::string LiveText::check_integrity() const {
  std::vector<SuffixForest::Suffix> suffixes;
  for (uint32_t pos = 0; pos < num_closed_; ++pos) suffixes.push_back({root_, pos, max_depth_});
  return forest_.check_integrity(suffixes, {root_});
}

CachedOutputs::CachedOutputs(int max_depth, int64_t max_outputs, int64_t max_bytes)
    : max_depth_(max_depth),
      max_outputs_(max_outputs),
      max_bytes_(max_bytes),
      tape_(max_depth, kLog2SharedChunk),
      forest_(tape_, max_bytes / kBytesPerHead, max_bytes < kMinHugeCache ? kLog2Page : kLog2HugePage) {}

SaltTree* CachedOutputs::acquire(const std::string& salt) {
  std::unique_ptr<SaltTree>& tree = salts_[salt];
  if (tree == nullptr) {
    tree.reset(new SaltTree{salt, forest_.add_root(), 0});
    salt_bytes_ += kBytesPerSalt + 2 * static_cast<int64_t>(salt.size());
  }
  ++tree->num_users;
  return tree.get();
}

void CachedOutputs::release(SaltTree* tree) {
  if (--tree->num_users > 0) return;
  forest_.free_root(tree->root);
  salt_bytes_ -= kBytesPerSalt + 2 * static_cast<int64_t>(tree->salt.size());
  salts_.erase(std::string(tree->salt));
}

void CachedOutputs::add(SaltTree* tree, const int32_t* tokens, int64_t num_tokens) {
  const int64_t room = max_bytes_ - max_bytes_ / kBytesPerHead * static_cast<int64_t>(sizeof(uint32_t));
  if (num_tokens == 0 || num_tokens > room / kMaxBytesPerToken) return;
  outputs_.push_back({tape_.end(), tape_.end() + num_tokens, tree});
  tree->newest_begin = tape_.end();
  tree->newest_end = tape_.end() + num_tokens;
  tape_.append(tokens, num_tokens);
  ++tree->num_users;
}

bool CachedOutputs::must_evict() const {
  if (outputs_.empty()) return false;
  if (evicted_ > outputs_.front().begin) return true;
  if (max_outputs_ >= 0 && num_outputs() > max_outputs_) return true;
  return num_bytes() + (num_waiting() > 0 ? forest_.growth() : 0) > max_bytes_;
}

void CachedOutputs::insert_suffix() {
  const Output& output = outputs_[inserting_];
  forest_.insert(output.tree->root, static_cast<uint32_t>(inserted_), length(inserted_, output));
  if (++inserted_ == output.end) ++inserting_;
}

void CachedOutputs::evict_suffix() {
  const Output front = outputs_.front();
  if (evicted_ == inserted_) {
    if (++inserted_ == front.end) ++inserting_;  // evicted before it was inserted
  } else {
    forest_.remove(front.tree->root, static_cast<uint32_t>(evicted_), length(evicted_, front));
  }
  if (++evicted_ < front.end) return;
  outputs_.pop_front();
  ++num_evicted_;
  --inserting_;
  release(front.tree);
  tape_.drop_before(evicted_);
}

int64_t CachedOutputs::process(int64_t num_suffixes) {
  for (int64_t done = 0; done < num_suffixes; ++done) {
    if (must_evict()) {
      evict_suffix();
    } else if (num_waiting() > 0) {
      insert_suffix();
    } else {
      return done;
    }
  }
  return num_suffixes;
}

void CachedOutputs::set_anchor_at(Anchor* anchor, uint64_t begin, uint64_t position, uint64_t end,
                                  int match_len) const {
  anchor->set(static_cast<int64_t>(begin), static_cast<int64_t>(position), static_cast<int64_t>(end), match_len,
              [this](int64_t i) { return *tape_.at(static_cast<uint32_t>(i)); });
}

void CachedOutputs::set_anchor(const SuffixDraft& match, Anchor* anchor) const {
  const uint64_t position = evicted_ + static_cast<uint32_t>(match.position - static_cast<uint32_t>(evicted_));
  const auto output = std::partition_point(outputs_.begin(), outputs_.end(),
                                           [position](const Output& output) { return output.end < position; });
  set_anchor_at(anchor, position - match.match_len, position, output->end, match.match_len);
}

void CachedOutputs::anchor_to_newest(const SaltTree& tree, Anchor* anchor) const {
  if (tree.newest_begin < evicted_ || tree.newest_end == tree.newest_begin) return;
  set_anchor_at(anchor, tree.newest_begin, tree.newest_begin, tree.newest_end, kNewestOutputMatch);
  anchor->mark_diverged();
}

SuffixDraft CachedOutputs::propose(const SaltTree& tree, const LiveText& text, const Tail& tail,
                                   const DraftLimits& limits, int cap, double min_score) const {
  if (forest_.node(tree.root).count == 0) return {};
  int32_t context[kMaxDepth + kMaxTail];
  const int size = text.write_context(tail, context), max_match = std::min(limits.max_match(), size);
  if (max_match == 0) return {};
  CachedMatcher matcher(forest_, tree.root, context + size, max_match);
  return best_draft(matcher, max_match, limits, cap, min_score);
}

int64_t CachedOutputs::num_bytes() const {
  return tape_.num_bytes() + forest_.num_bytes() + salt_bytes_ + num_outputs() * int64_t{sizeof(Output)};
}

std::string CachedOutputs::check_integrity() const {
  std::vector<SuffixForest::Suffix> suffixes;
  std::unordered_map<const SaltTree*, int64_t> num_users;
  uint64_t pos = evicted_;
  for (const Output& output : outputs_) {
    ++num_users[output.tree];
    if (pos < output.begin || pos >= output.end) return "outputs: not in order";
    for (; pos < output.end; ++pos) {
      if (pos >= inserted_) continue;
      suffixes.push_back({output.tree->root, static_cast<uint32_t>(pos), length(pos, output)});
    }
  }
  if (pos != tape_.end()) return "outputs: tokens that belong to none";
  std::vector<uint32_t> roots;
  for (const auto& [salt, tree] : salts_) {
    roots.push_back(tree->root);
    if (tree->num_users < num_users[tree.get()]) return "salt: fewer users than outputs";
  }
  return forest_.check_integrity(suffixes, roots);
}

SuffixCache::SuffixCache(const DraftLimits& limits, const CacheLimits& cache_limits)
    : limits_(limits),
      caches_outputs_(cache_limits.max_outputs != 0),
      cached_(limits.max_depth, cache_limits.max_outputs, caches_outputs_ ? cache_limits.max_bytes : 0) {}

const SuffixCache::Live* SuffixCache::live(int64_t slot) const {
  const bool exists = slot >= 0 && slot < static_cast<int64_t>(live_.size()) && live_[slot].text != nullptr;
  return exists ? &live_[slot] : nullptr;
}

bool SuffixCache::start(int64_t slot, const std::string& salt, const int32_t* tokens, int64_t num_tokens) {
  if (slot < 0 || live(slot) != nullptr) return false;
  if (slot >= static_cast<int64_t>(live_.size())) live_.resize(slot + 1);
  live_[slot].text = std::make_unique<LiveText>(limits_.max_depth);
  live_[slot].text->extend(tokens, num_tokens);
  if (caches_outputs_) {
    live_[slot].tree = cached_.acquire(salt);
    live_[slot].is_anchor_shared = true;
    cached_.anchor_to_newest(*live_[slot].tree, &live_[slot].text->anchor());
  }
  cached_.process(kSuffixesPerStart);
  return true;
}

void SuffixCache::extend(int64_t slot, const int32_t* tokens, int64_t num_tokens) {
  live_[slot].text->extend(tokens, num_tokens);
  cached_.process(kSuffixesPerToken * num_tokens);
}

void SuffixCache::propose(int64_t slot, const Tail& tail, int cap, SuffixDraft* best, bool* is_shared) {
  Live& found = live_[slot];
  *best = found.text->propose(limits_, tail, cap);
  *is_shared = false;
  if (found.tree != nullptr) {
    const SuffixDraft other = cached_.propose(*found.tree, *found.text, tail, limits_, cap, best->score);
    *is_shared = other.num_tokens > 0;
    if (*is_shared) *best = other;
  }
  if (tail.num_tokens == 0) update_anchor(found, *best, *is_shared);
  const SuffixDraft resumed = found.text->resume(limits_, tail, cap, *best);
  if (resumed.num_tokens == 0) return;
  *best = resumed;
  *is_shared = found.is_anchor_shared;
}

void SuffixCache::update_anchor(Live& live, const SuffixDraft& match, bool is_shared) const {
  if (match.match_len < kLongMatch || !match.is_located || !live.text->anchor().needs_update()) return;
  live.is_anchor_shared = is_shared;
  if (is_shared) {
    cached_.set_anchor(match, &live.text->anchor());
  } else {
    live.text->set_anchor(match);
  }
}

bool SuffixCache::finish(int64_t slot, const int32_t* output, int64_t num_tokens) {
  if (live(slot) == nullptr) return false;
  const Live finished = std::move(live_[slot]);
  live_[slot] = {};
  if (finished.tree != nullptr) {
    cached_.add(finished.tree, output, num_tokens);
    cached_.release(finished.tree);
  }
  return true;
}

int64_t SuffixCache::num_live_bytes() const {
  int64_t bytes = static_cast<int64_t>(live_.capacity() * sizeof(Live));
  for (const Live& live : live_) bytes += live.text == nullptr ? 0 : live.text->num_bytes();
  return bytes;
}

std::string SuffixCache::check_integrity() const {
  for (size_t slot = 0; slot < live_.size(); ++slot) {
    const std::string wrong = live_[slot].text == nullptr ? "" : live_[slot].text->check_integrity();
    if (!wrong.empty()) return "slot " + std::to_string(slot) + ": " + wrong;
  }
  const std::string wrong = cached_.check_integrity();
  return wrong.empty() ? "" : "cached: " + wrong;
}

}  // namespace fd
