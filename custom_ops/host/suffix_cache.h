// SPDX-License-Identifier: Apache-2.0
// The state of suffix decoding: the text of every live request, and the cached outputs of finished requests, which
// requests of the same salt share. It identifies texts by slots, which the caller assigns to requests. Not thread-safe.
//
//   outputs      | evicted ...... | === in the tree === | ---- waiting ---- |
//   positions    0             evicted_           inserted_          tape end
//
// Outputs are added when their request finishes and evicted in the same order. Insertion and eviction process a bounded
// number of suffixes per call, so that no engine step waits for a long output. Finishing a request processes none,
// because other requests wait for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/anchor.h"
#include "host/suffix_match.h"

namespace fd {

constexpr int64_t kSuffixesPerStep = 64;  // take 0.06 ms, or up to 0.3 ms with 20 million cached tokens

// The prompt and output of a live request.
class LiveText {
 public:
  explicit LiveText(int max_depth);
  void extend(const int32_t* tokens, int64_t num_tokens);
  SuffixDraft propose(const DraftLimits& limits, const Tail& tail, int cap) const;
  // Returns what follows if the text returned to the source that it was copying. The match must be at least as long as
  // that of `best`, and the score higher.
  SuffixDraft resume(const DraftLimits& limits, const Tail& tail, int cap, const SuffixDraft& best) const;
  // Sets the anchor to a match within this text.
  void set_anchor(const SuffixDraft& match);
  Anchor& anchor() { return anchor_; }
  const Anchor& anchor() const { return anchor_; }
  // Writes up to max_depth last tokens and the tail to `out`; returns the number of tokens.
  int write_context(const Tail& tail, int32_t* out) const;
  int64_t num_bytes() const { return static_cast<int64_t>(sizeof(*this)) + tape_.num_bytes() + forest_.num_bytes(); }
  std::string check_integrity() const;

 private:
  int window() const { return static_cast<int>(tape_.end() - num_closed_); }

  int max_depth_;
  TokenTape tape_;
  SuffixForest forest_;
  uint32_t root_;
  uint64_t num_closed_ = 0;  // suffixes of full depth, which are in the tree
  Anchor anchor_;
};

// The outputs of one salt. It exists while a request or an output uses it.
struct SaltTree {
  std::string salt;
  uint32_t root;
  int64_t num_users;
  uint64_t newest_begin = 0, newest_end = 0;  // positions of the latest output
};

class CachedOutputs {
 public:
  CachedOutputs(int max_depth, int64_t max_outputs, int64_t max_bytes);
  SaltTree* acquire(const std::string& salt);
  void release(SaltTree* tree);

  // Queues an output, unless it would not fit even into an empty cache.
  void add(SaltTree* tree, const int32_t* tokens, int64_t num_tokens);
  // Evicts and inserts up to num_suffixes suffixes; returns how many.
  int64_t process(int64_t num_suffixes);
  // Sets an anchor to a match within the outputs.
  void set_anchor(const SuffixDraft& match, Anchor* anchor) const;
  // Sets an anchor that expects the text to repeat the latest output.
  void anchor_to_newest(const SaltTree& tree, Anchor* anchor) const;
  // Returns the best draft that scores above min_score.
  SuffixDraft propose(const SaltTree& tree, const LiveText& text, const Tail& tail, const DraftLimits& limits, int cap,
                      double min_score) const;

  int64_t num_outputs() const { return static_cast<int64_t>(outputs_.size()); }
  int64_t num_tokens() const { return static_cast<int64_t>(tape_.end() - evicted_); }
  int64_t num_waiting() const { return static_cast<int64_t>(tape_.end() - inserted_); }
  int64_t num_nodes() const { return forest_.num_nodes(); }
  int64_t num_evicted() const { return num_evicted_; }
  int64_t num_bytes() const;
  std::string check_integrity() const;

 private:
  struct Output {
    uint64_t begin, end;
    SaltTree* tree;
  };
  int length(uint64_t pos, const Output& output) const {
    return static_cast<int>(std::min<uint64_t>(max_depth_, output.end - pos));
  }
  void set_anchor_at(Anchor* anchor, uint64_t begin, uint64_t position, uint64_t end, int match_len) const;
  bool must_evict() const;
  void insert_suffix();
  void evict_suffix();

  int max_depth_;
  int64_t max_outputs_, max_bytes_;  // max_outputs_ < 0: limited by bytes only
  TokenTape tape_;
  SuffixForest forest_;
  std::deque<Output> outputs_;
  size_t inserting_ = 0;  // index in outputs_
  uint64_t evicted_ = 0, inserted_ = 0;
  int64_t salt_bytes_ = 0, num_evicted_ = 0;
  std::unordered_map<std::string, std::unique_ptr<SaltTree>> salts_;
};

struct CacheLimits {
  int64_t max_outputs;  // 0: nothing is cached; negative: limited by bytes only
  int64_t max_bytes;    // of the cached outputs
};

class SuffixCache {
 public:
  SuffixCache(const DraftLimits& limits, const CacheLimits& cache_limits);
  bool start(int64_t slot, const std::string& salt, const int32_t* tokens,
             int64_t num_tokens);  // returns false if the slot is in use
  bool is_live(int64_t slot) const { return live(slot) != nullptr; }
  void extend(int64_t slot, const int32_t* tokens, int64_t num_tokens);                       // the slot must be live
  void propose(int64_t slot, const Tail& tail, int cap, SuffixDraft* best, bool* is_shared);  // the slot must be live
  bool finish(int64_t slot, const int32_t* output, int64_t num_tokens);
  CachedOutputs& cached() { return cached_; }
  int64_t num_live_bytes() const;
  std::string check_integrity() const;

 private:
  struct Live {
    std::unique_ptr<LiveText> text;
    SaltTree* tree = nullptr;
    bool is_anchor_shared = false;  // the anchor is in a cached output
  };
  // Sets the anchor to the latest long match of the text.
  void update_anchor(Live& live, const SuffixDraft& match, bool is_shared) const;
  const Live* live(int64_t slot) const;

  DraftLimits limits_;
  bool caches_outputs_;
  CachedOutputs cached_;
  std::vector<Live> live_;
};

}  // namespace fd
