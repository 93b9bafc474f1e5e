// SPDX-License-Identifier: Apache-2.0
// Counting suffix trees of bounded depth over the tokens of one tape. Each root is a separate tree; all trees share the
// memory of their nodes.
//
//   node       a string of `depth` tokens, tape[pos .. pos + depth), where pos is that of the most recent inserted
//              suffix that starts with the string
//   count      inserted suffixes that start with the string, including those that end at the node
//   canonical  a node that is not a root has two children, or a suffix ends at it
//   children   a linked list; a hash of (parent, first token of the edge) finds single children. The first child of
//              a node that is not a root has the largest count and, among equal counts, the most recent position. Its
//              `runner_up` is an upper bound of the counts of the other children, so that a removal scans the list
//              only when the count of the first child falls to this bound.
//
// Suffixes are inserted in the order of the tape and removed from the oldest on. `pos` therefore never refers to freed
// tokens: a string that is still counted has occurred in a later suffix.
//
// Descents skip the tokens inside edges (Patricia tree); one comparison at the end checks the path. A suffix automaton
// or array would not do: neither can remove its oldest text in time proportional to that text, and the tree gives the
// count and the most frequent continuation with one read per branch.
//
// Memory: 32 bytes per node, 4 bytes per hash head (one head for one or two nodes), and at most two nodes per inserted
// suffix, typically 1.2 to 1.5. Tokens are in [0, 2^24), depths are at most 255. Not thread-safe.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "host/token_tape.h"

namespace fd {

constexpr int32_t kMaxToken = (1 << 24) - 1;
constexpr int kMaxDepth = 255;

struct SuffixNode {
  uint32_t pos, count;
  uint32_t parent, first_child;
  uint32_t next;  // sibling, 0 at the end
  uint32_t prev;  // sibling; in the first child the `runner_up` bound instead
  uint32_t chain;
  uint32_t token : 24, depth : 8;
};
static_assert(sizeof(SuffixNode) == 32, "two nodes per cache line");

class SuffixForest {
 public:
  // num_heads is the fixed size of the hash table; 0: it grows with the nodes. 2^log2_page nodes are allocated at a
  // time.
  SuffixForest(const TokenTape& tape, int64_t num_heads, int log2_page);

  uint32_t add_root();
  void free_root(uint32_t root);  // its count must be 0

  // Inserts the suffix tape[pos .. pos + length).
  void insert(uint32_t root, uint32_t pos, int length);
  // Prefetches what insertions of `num` suffixes (at most kMaxPrefetch) at pos, pos + 1, ... will read. It descends all
  // their paths together, because a single descent waits for one cache miss after the other.
  void prefetch(uint32_t root, uint32_t pos, int num, int length) const;
  static constexpr int kMaxPrefetch = 32;
  // Removes an inserted suffix.
  void remove(uint32_t root, uint32_t pos, int length);

  // Returns the node at or below the end of the string, or 0 if no inserted suffix starts with the string.
  uint32_t find(uint32_t root, const int32_t* tokens, int length) const;
  uint32_t child(uint32_t parent, int32_t token) const;
  const SuffixNode& node(uint32_t id) const { return pages_[id >> log2_page_][id & (page_ - 1)]; }
  const TokenTape& tape() const { return tape_; }

  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_bytes() const;
  // Returns the bytes that the next insertion may allocate.
  int64_t growth() const { return num_free() >= 2 ? 0 : int64_t{page_} * static_cast<int64_t>(sizeof(SuffixNode)); }

  struct Suffix {
    uint32_t root, pos;
    int length;
  };
  // Recounts `suffixes` one by one; returns "" or what is wrong.
  std::string check_integrity(const std::vector<Suffix>& suffixes, const std::vector<uint32_t>& roots) const;

 private:
  template <class T>
  using Memory = std::unique_ptr<T[], decltype(&std::free)>;

  SuffixNode& at(uint32_t id) { return pages_[id >> log2_page_][id & (page_ - 1)]; }
  int64_t num_free() const { return static_cast<int64_t>(pages_.size() * page_) - 1 - num_nodes_; }
  uint32_t allocate();
  void release(uint32_t id);

  uint32_t& head(uint32_t parent, uint32_t token) const;
  void hash_insert(uint32_t id);
  void hash_erase(uint32_t id);
  void grow_heads();

  uint32_t add_leaf(uint32_t parent, uint32_t pos, int length);
  uint32_t split(uint32_t id, int depth, uint32_t pos);
  void merge_with_only_child(uint32_t id);
  void link(uint32_t parent, uint32_t id);
  void unlink(uint32_t id);
  void push_front(uint32_t parent, uint32_t id);
  void replace_sibling(uint32_t old_id, uint32_t new_id);
  void promote(uint32_t id);
  void restore_front(uint32_t parent);
  bool better(const SuffixNode& a, const SuffixNode& b) const;
  std::string check_node(uint32_t id, uint32_t expected_count) const;

  const TokenTape& tape_;
  const uint64_t seed_;
  const int log2_page_;
  const uint32_t page_;
  std::vector<Memory<SuffixNode>> pages_;
  uint32_t free_ = 0;  // free nodes, linked by `chain`
  uint32_t num_used_ = 1;
  int64_t num_nodes_ = 0;
  bool fixed_heads_;
  int64_t num_heads_;
  Memory<uint32_t> heads_;
};

}  // namespace fd
