// SPDX-License-Identifier: Apache-2.0
// Prompt lookup: for every live sequence, the most recent place of each n-gram, n = min_n .. max_n, kept up to date
// token by token. Knows integers only; which request a slot stands for is the caller's business. Not thread-safe.
//
//   tokens     t0 t1 t2 ... t[L-2] t[L-1]
//   indexed    n-grams that end at L-2 or before: the suffix itself, which ends at L-1, is always looked up against
//              earlier occurrences (they may overlap it)
//   table n    open addressing; a slot holds 1 + the end position of the last occurrence of its n-gram, 0 if free. The
//              n-gram itself is not stored: a hit is compared with the tokens, so hash collisions cannot mislead.
//
// A text that was copying itself for long and left that place (anchor.h) is guessed to come back to it: where as many
// of its last tokens as an n-gram that was found occur close behind that place, this occurrence is preferred to the
// last one.
//
// Memory: 4 to 5 bytes per token, and at most 6.3 bytes per token for each n: 36 bytes for n = 1..5, 55 for eight
// values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "host/anchor.h"
#include "host/tail.h"

namespace fd {

class PositionTable {
 public:
  explicit PositionTable(int n) : n_(n) {}

  // Makes room for this many n-grams.
  void reserve(const std::vector<int32_t>& tokens, int64_t num_ngrams);
  // Notes that the n-gram with this hash ends at `end`, which is later than all noted before.
  void note(const std::vector<int32_t>& tokens, uint32_t hash, int32_t end);
  // Returns the last noted end of the n-gram that ends just before `ngram_end`, or -1.
  int32_t find(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const;

  int n() const { return n_; }
  int64_t num_ngrams() const { return num_ngrams_; }
  int64_t num_bytes() const { return static_cast<int64_t>(slots_.capacity() * sizeof(int32_t)); }
  const std::vector<int32_t>& slots() const { return slots_; }

 private:
  // The slot of this n-gram, or the free slot where it belongs.
  size_t locate(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const;
  void rebuild(const std::vector<int32_t>& tokens, size_t num_slots);

  int n_;
  int64_t num_ngrams_ = 0;
  std::vector<int32_t> slots_;
};

constexpr int32_t kMaxNgram = 16;
constexpr int32_t kMaxMatchLen = 16;  // longer matches are reported as this long

struct Proposal {
  int32_t match_len = 0;   // last tokens of the text that equal those before `first`, at most kMaxMatchLen; 0 if none
  int32_t first = 0;       // position of the first proposed token
  int32_t num_tokens = 0;  // tokens[first], tokens[first + 1], ... and from the end of the text again from `first` on
};

class NgramSequence {
 public:
  NgramSequence(int min_n, int max_n);
  void extend(const int32_t* tokens, int64_t num_tokens);
  // What follows the text and `tail`, which counts as text here: matches may lie in it.
  Proposal propose(const Tail& tail, int32_t cap);
  void write(const Proposal& proposal, const Tail& tail, int32_t* out) const;
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t num_bytes() const;
  std::string check_integrity() const;  // "" or what is wrong

 private:
  int32_t length() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t token(const Tail& tail, int32_t i) const { return i < length() ? tokens_[i] : tail.tokens[i - length()]; }
  // The most recent occurrence of the longest suffix.
  Proposal look_up(const Tail& tail, int32_t cap) const;
  // The continuation of what was being copied, if the last tokens, at least `min_evidence`, say that it goes on.
  Proposal resume(const Tail& tail, int32_t cap, int min_evidence) const;
  // How many of the last tokens equal those before `place`, whatever the length of the n-gram that was looked up.
  int32_t match_len_at(const Tail& tail, int32_t place) const;
  // The last end, behind the indexed ones and before the text's own, of an n-gram that equals ngram[0 .. n), or -1.
  int32_t find_in_tail(const Tail& tail, const int32_t* ngram, int n) const;

  std::vector<int32_t> tokens_;
  std::vector<PositionTable> tables_;  // ascending n
  Anchor anchor_;                      // in this text
};

class NgramIndex {
 public:
  NgramIndex(int min_n, int max_n) : min_n_(min_n), max_n_(max_n) {}
  bool start(int64_t slot, const int32_t* tokens, int64_t num_tokens);  // false if the slot is in use
  bool finish(int64_t slot);                                            // false if it is not
  NgramSequence* sequence(int64_t slot);                                // null if it is not in use
  int64_t num_bytes() const;
  std::string check_integrity() const;

 private:
  int min_n_, max_n_;
  std::vector<std::unique_ptr<NgramSequence>> sequences_;
};

}  // namespace fd
