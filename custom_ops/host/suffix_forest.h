// SPDX-License-Identifier: Apache-2.0
// Suffix trees of bounded depth that count, over the text of one tape. Roots are separate trees that share the memory:
// nothing is ever reached from one root that was inserted under another.
//
//   node       a string of `depth` tokens, tape[pos .. pos + depth): the most recent inserted suffix that begins with
//   it count      inserted suffixes that begin with the string; those that end exactly there are in no child's count
//   canonical  a node that is not a root has two children, or a suffix ends at it
//   children   a list, found one by one through a hash of (parent, first token of the edge). Of a node that is not a
//              root, the front child is the best: of the largest count, among those the one seen last. No other child
//              counts more than the front's `rival`, so that a removal looks at the whole list only when the front
//              child falls to that bound.
//
// Suffixes are inserted in the order of the tape and removed oldest text first, so `pos` never points at text that has
// gone: a string that is still counted has been seen in a later one.
//
// Descents skip the text inside edges (Patricia): one comparison at the end tells whether the path was right.
// Why not a suffix automaton or array: neither forgets its oldest text at the price of that text, and the tree answers
// "how often, and what mostly follows" in one read per branching.
//
// Memory: 32 bytes per node and 4 per hash head, of which a growing table has one for one or two nodes; at most two
// nodes per inserted suffix, in text 1.2 to 1.5. Tokens are in [0, 2^24), depths up to 255. Not thread-safe.
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
  uint32_t prev;  // sibling; of the front child the `rival` bound instead
  uint32_t chain;
  uint32_t token : 24, depth : 8;
};
static_assert(sizeof(SuffixNode) == 32, "two nodes per cache line");

class SuffixForest {
 public:
  // `num_heads` fixes the hash table; 0 lets it grow with the nodes, of which 2^log2_page are allocated at a time.
  SuffixForest(const TokenTape& tape, int64_t num_heads, int log2_page);

  uint32_t add_root();
  void free_root(uint32_t root);  // a root that counts nothing

  // Counts the suffix tape[pos .. pos + length).
  void insert(uint32_t root, uint32_t pos, int length);
  // Asks for what inserts of `num` suffixes at pos, pos + 1, ..., at most kRun, will read, going down all their paths
  // at once: each by itself waits for one node after the other.
  void fetch(uint32_t root, uint32_t pos, int num, int length) const;
  static constexpr int kRun = 32;
  // Takes back an `insert`.
  void remove(uint32_t root, uint32_t pos, int length);

  // The node that the string ends in or above, 0 if no inserted suffix begins with the string.
  uint32_t find(uint32_t root, const int32_t* tokens, int length) const;
  uint32_t child(uint32_t parent, int32_t token) const;
  const SuffixNode& node(uint32_t id) const { return pages_[id >> log2_page_][id & (page_ - 1)]; }
  const TokenTape& tape() const { return tape_; }

  int64_t num_nodes() const { return num_nodes_; }
  int64_t num_bytes() const;
  // Bytes that the next insert may add.
  int64_t growth() const { return num_free() >= 2 ? 0 : int64_t{page_} * static_cast<int64_t>(sizeof(SuffixNode)); }

  struct Suffix {
    uint32_t root, pos;
    int length;
  };
  // Counts `suffixes` again, one by one; returns "" or what is wrong.
  std::string check_integrity(const std::vector<Suffix>& suffixes, const std::vector<uint32_t>& roots) const;

 private:
  template <class T>
  using Memory = std::unique_ptr<T[], decltype(&std::free)>;

  SuffixNode& at(uint32_t id) { return pages_[id >> log2_page_][id & (page_ - 1)]; }
  int64_t num_free() const { return static_cast<int64_t>(pages_.size() * page_) - 1 - num_nodes_; }
  uint32_t allocate();
  void release(uint32_t id);

  uint32_t& head(uint32_t parent, uint32_t token) const;
  void enter(uint32_t id);  // into the hash
  void leave(uint32_t id);
  void grow_heads();

  uint32_t add_leaf(uint32_t parent, uint32_t pos, int length);
  uint32_t split(uint32_t id, int depth, uint32_t pos);
  void merge_with_only_child(uint32_t id);
  void link(uint32_t parent, uint32_t id);
  void unlink(uint32_t id);
  void push_front(uint32_t parent, uint32_t id);
  void replace_sibling(uint32_t old_id, uint32_t new_id);
  void promote(uint32_t id);
  void choose_front(uint32_t parent);
  bool better(const SuffixNode& a, const SuffixNode& b) const;
  std::string check_node(uint32_t id, uint32_t expected_count) const;

  const TokenTape& tape_;
  const uint64_t seed_;
  const int log2_page_;
  const uint32_t page_;
  std::vector<Memory<SuffixNode>> pages_;
  uint32_t free_ = 0;  // list through `chain`
  uint32_t num_used_ = 1;
  int64_t num_nodes_ = 0;
  bool fixed_heads_;
  int64_t num_heads_;
  Memory<uint32_t> heads_;
};

}  // namespace fd
