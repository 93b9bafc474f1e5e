// SPDX-License-Identifier: Apache-2.0
// The state of suffix decoding: the text of every live request, and the outputs of finished ones, which requests of
// the same salt share. Knows integers and salts only; which request a slot stands for is the caller's business. Not
// thread-safe.
//
//   outputs      | removed ...... | ==== counted ==== | ---- waiting ---- |
//   positions    0             evicted_           inserted_          tape end
//
// Outputs enter when their request finishes and leave in the same order, each as a whole; both happen suffix by suffix,
// a bounded number per call, so that no step of the engine waits for a long output; the end of a request, for which its
// neighbours wait, does none of it.
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

constexpr int64_t kWorkPerStep = 64;  // suffixes: 0.06 ms, up to 0.3 ms among 20 million tokens

// One request's prompt and output.
class LiveText {
 public:
  explicit LiveText(int max_depth);
  void extend(const int32_t* tokens, int64_t num_tokens);
  Found propose(const DraftRules& rules, const Tail& tail, int cap) const;
  // What follows if the text goes on with what it was copying; only what scores above the best match, from as many
  // tokens as that.
  Found resume(const DraftRules& rules, const Tail& tail, int cap, const Found& best) const;
  // Notes that the text is where a match was found in itself.
  void anchor_in(const Found& match);
  Anchor& anchor() { return anchor_; }
  const Anchor& anchor() const { return anchor_; }
  // Writes the last tokens, at most `max_depth`, and the tail to `out`; returns their number.
  int write_context(const Tail& tail, int32_t* out) const;
  int64_t num_bytes() const { return static_cast<int64_t>(sizeof(*this)) + tape_.num_bytes() + forest_.num_bytes(); }
  std::string check_integrity() const;

 private:
  int window() const { return static_cast<int>(tape_.end() - num_closed_); }

  int max_depth_;
  TokenTape tape_;
  SuffixForest forest_;
  uint32_t root_;
  uint64_t num_closed_ = 0;  // suffixes that have their full depth and are in the tree
  Anchor anchor_;
};

// Those who share outputs. Lives while a request or an output of theirs does.
struct SaltTree {
  std::string salt;
  uint32_t root;
  int64_t num_users;
  uint64_t newest_begin = 0, newest_end = 0;  // of the last output that was added
};

class SharedOutputs {
 public:
  SharedOutputs(int max_depth, int64_t max_outputs, int64_t max_bytes);
  SaltTree* acquire(const std::string& salt);
  void release(SaltTree* tree);

  // Queues an output; one that could not fit beside nothing else is left out.
  void add(SaltTree* tree, const int32_t* tokens, int64_t num_tokens);
  // Removes and inserts up to this many suffixes; returns how many.
  int64_t work(int64_t num_suffixes);
  // Lets the anchor stand where a match was found.
  void anchor_in(const Found& match, Anchor* anchor) const;
  // Lets the anchor wait for a text that repeats the last output.
  void expect_newest(const SaltTree& tree, Anchor* anchor) const;
  // Only what scores above `bar`.
  Found propose(const SaltTree& tree, const LiveText& text, const Tail& tail, const DraftRules& rules, int cap,
                double bar) const;

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
  void copy_to(Anchor* anchor, uint64_t begin, uint64_t place, uint64_t end, int match_len) const;
  bool must_evict() const;
  void insert_one();
  void evict_one();

  int max_depth_;
  int64_t max_outputs_, max_bytes_;  // max_outputs_ below 0: bounded by bytes only
  TokenTape tape_;
  SuffixForest forest_;
  std::deque<Output> outputs_;
  size_t inserting_ = 0;  // index in outputs_
  uint64_t evicted_ = 0, inserted_ = 0;
  int64_t salt_bytes_ = 0, num_evicted_ = 0;
  std::unordered_map<std::string, std::unique_ptr<SaltTree>> salts_;
};

struct SuffixLimits {
  int64_t max_outputs;  // 0: nothing is shared
  int64_t max_bytes;    // of the shared outputs
};

class SuffixCache {
 public:
  SuffixCache(const DraftRules& rules, const SuffixLimits& limits);
  bool start(int64_t slot, const std::string& salt, const int32_t* tokens, int64_t num_tokens);  // false: in use
  bool is_live(int64_t slot) const { return live(slot) != nullptr; }
  void extend(int64_t slot, const int32_t* tokens, int64_t num_tokens);  // a live one, as the next
  void propose(int64_t slot, const Tail& tail, int cap, Found* best, bool* is_shared);
  bool finish(int64_t slot, const int32_t* output, int64_t num_tokens);
  SharedOutputs& shared() { return shared_; }
  int64_t num_live_bytes() const;
  std::string check_integrity() const;

 private:
  struct Live {
    std::unique_ptr<LiveText> text;
    SaltTree* tree = nullptr;
    bool is_anchor_shared = false;  // it stands in an output
  };
  // Keeps the anchor with the text's last long match.
  void move_anchor(Live& live, const Found& match, bool is_shared) const;
  const Live* live(int64_t slot) const;

  DraftRules rules_;
  bool is_sharing_;
  SharedOutputs shared_;
  std::vector<Live> live_;
};

}  // namespace fd
