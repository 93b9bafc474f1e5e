// SPDX-License-Identifier: Apache-2.0
// N-gram matching (prompt lookup): the most recent position of each n-gram, n = min_n .. max_n, of every live sequence,
// updated token by token. It identifies sequences by slots, which the caller assigns to requests. Not thread-safe.
//
//   tokens     t0 t1 t2 ... t[L-2] t[L-1]
//   indexed    n-grams that end at L-2 or before. The suffix, which ends at L-1, is looked up among these earlier
//              occurrences, which may overlap it.
//   table n    a hash table with open addressing. An entry is 1 + the end position of the last occurrence of its
//              n-gram, or 0 if it is free. The n-gram is not stored: a hit is compared with the tokens, so hash
//              collisions do no harm.
//
// A sequence that copied a long part of itself and then diverged (anchor.h) is expected to return to it. An occurrence
// shortly after the divergence is preferred to the most recent one, if it matches at least as many tokens as the n-gram
// that was found.
//
// Memory: 4 to 5 bytes per token, and at most 6.3 bytes per token for each n: 36 bytes for n = 1..5.
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

  // Allocates entries for this many n-grams.
  void reserve(const std::vector<int32_t>& tokens, int64_t num_ngrams);
  // Records that the n-gram with this hash ends at `end`, which must be later than all previous ends.
  void record(const std::vector<int32_t>& tokens, uint32_t hash, int32_t end);
  // Returns the latest recorded end of the n-gram that ends just before `ngram_end`, or -1.
  int32_t find(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const;

  int n() const { return n_; }
  int64_t num_ngrams() const { return num_ngrams_; }
  int64_t num_bytes() const { return static_cast<int64_t>(entries_.capacity() * sizeof(int32_t)); }
  const std::vector<int32_t>& entries() const { return entries_; }

 private:
  // Returns the entry of this n-gram, or the free entry where it belongs.
  size_t locate(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const;
  void rebuild(const std::vector<int32_t>& tokens, size_t num_entries);

  int n_;
  int64_t num_ngrams_ = 0;
  std::vector<int32_t> entries_;
};

constexpr int32_t kMaxNgram = 16;
constexpr int32_t kMaxMatchLen = 16;  // longer matches are reported as this long

struct Proposal {
  int32_t match_len = 0;   // last tokens of the text that equal those before `first`, at most kMaxMatchLen; 0 if none
  int32_t first = 0;       // position of the first proposed token
  int32_t num_tokens = 0;  // tokens[first], tokens[first + 1], ...; the end of the text continues at `first` again
};

class NgramSequence {
 public:
  NgramSequence(int min_n, int max_n);
  void extend(const int32_t* tokens, int64_t num_tokens);
  // Proposes what follows the text and `tail`, which counts as text in this call: matches may be in it.
  Proposal propose(const Tail& tail, int32_t cap);
  void write(const Proposal& proposal, const Tail& tail, int32_t* out) const;
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t num_bytes() const;
  std::string check_integrity() const;  // "" or what is wrong

 private:
  int32_t length() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t token(const Tail& tail, int32_t i) const { return i < length() ? tokens_[i] : tail.tokens[i - length()]; }
  // Proposes what followed the most recent occurrence of the longest suffix.
  Proposal look_up(const Tail& tail, int32_t cap) const;
  // Proposes the continuation of the part that was copied, if at least min_match_len last tokens match it again.
  Proposal resume(const Tail& tail, int32_t cap, int min_match_len) const;
  // Returns how many last tokens equal those before `position`, which may be more than the n-gram that was looked up.
  int32_t match_len_at(const Tail& tail, int32_t position) const;
  // Returns the latest end, after the indexed ones and before the end of the text, of an n-gram equal to ngram[0 .. n),
  // or -1.
  int32_t find_in_tail(const Tail& tail, const int32_t* ngram, int n) const;

  std::vector<int32_t> tokens_;
  std::vector<PositionTable> tables_;  // ascending n
  Anchor anchor_;                      // in this text
};

class NgramIndex {
 public:
  NgramIndex(int min_n, int max_n) : min_n_(min_n), max_n_(max_n) {}
  bool start(int64_t slot, const int32_t* tokens, int64_t num_tokens);  // returns false if the slot is in use
  bool finish(int64_t slot);                                            // returns false if the slot is not in use
  NgramSequence* sequence(int64_t slot);                                // returns null if the slot is not in use
  int64_t num_bytes() const;
  std::string check_integrity() const;

 private:
  int min_n_, max_n_;
  std::vector<std::unique_ptr<NgramSequence>> sequences_;
};

}  // namespace fd
