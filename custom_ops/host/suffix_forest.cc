// SPDX-License-Identifier: Apache-2.0
#include "host/suffix_forest.h"

#include <map>
#include <numeric>
#include <random>

#include "host/huge_pages.h"

namespace fd {
namespace {

constexpr int64_t kMinHeads = 64;
constexpr size_t kCacheLine = 64;

// Differs between processes, so that no client can send a text whose branches all hash to one head. Results do not
// depend on it.
uint64_t hash_seed() {
  static const uint64_t seed = [] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32 | device()) | 1;
  }();
  return seed;
}

void* checked(void* memory, size_t num_bytes) {
  if (memory == nullptr) throw std::bad_alloc();
  advise_huge_pages(memory, num_bytes);
  return memory;
}

// The system zeroes pages at their first access, so a large table uses no memory before it is filled.
uint32_t* zeroed(int64_t size) {
  return static_cast<uint32_t*>(checked(std::calloc(size, sizeof(uint32_t)), size * sizeof(uint32_t)));
}

SuffixNode* allocate_page(size_t size) {
  const size_t num_bytes = size * sizeof(SuffixNode);
  const size_t alignment = num_bytes % kHugePage == 0 ? kHugePage : kCacheLine;
  return static_cast<SuffixNode*>(checked(std::aligned_alloc(alignment, num_bytes), num_bytes));
}

int common_prefix(const int32_t* a, const int32_t* b, int limit) {
  int n = 0;
  while (n < limit && a[n] == b[n]) ++n;
  return n;
}

}  // namespace

SuffixForest::SuffixForest(const TokenTape& tape, int64_t num_heads, int log2_page)
    : tape_(tape),
      seed_(hash_seed()),
      log2_page_(log2_page),
      page_(uint32_t{1} << log2_page),
      fixed_heads_(num_heads > 0),
      num_heads_(std::max(num_heads, kMinHeads)),
      heads_(zeroed(num_heads_), &std::free) {}

uint32_t SuffixForest::allocate() {
  ++num_nodes_;
  if (free_ != 0) {
    const uint32_t id = free_;
    free_ = at(id).chain;
    return id;
  }
  if (num_used_ >> log2_page_ == pages_.size()) pages_.emplace_back(allocate_page(page_), &std::free);
  return num_used_++;
}

void SuffixForest::release(uint32_t id) {
  --num_nodes_;
  at(id).chain = free_;
  free_ = id;
}

uint32_t SuffixForest::add_root() {
  const uint32_t id = allocate();
  at(id) = {};
  return id;
}

void SuffixForest::free_root(uint32_t root) { release(root); }

uint32_t& SuffixForest::head(uint32_t parent, uint32_t token) const {
  uint64_t key = ((static_cast<uint64_t>(parent) << 24 | token) ^ seed_) * 0xd6e8feb86659fd93u;
  key = (key ^ key >> 32) * 0xd6e8feb86659fd93u;
  return heads_[(key >> 32) * static_cast<uint64_t>(num_heads_) >> 32];
}

uint32_t SuffixForest::child(uint32_t parent, int32_t token) const {
  uint32_t id = head(parent, token);
  while (id != 0 && (node(id).parent != parent || node(id).token != static_cast<uint32_t>(token))) id = node(id).chain;
  return id;
}

void SuffixForest::hash_insert(uint32_t id) {
  if (!fixed_heads_ && num_nodes_ > 2 * num_heads_) grow_heads();
  uint32_t& first = head(at(id).parent, at(id).token);
  at(id).chain = first;
  first = id;
}

void SuffixForest::hash_erase(uint32_t id) {
  uint32_t* link = &head(at(id).parent, at(id).token);
  while (*link != id) link = &at(*link).chain;
  *link = at(id).chain;
}

void SuffixForest::grow_heads() {
  auto old = std::move(heads_);
  const int64_t num_old = num_heads_;
  num_heads_ *= 2;
  heads_.reset(zeroed(num_heads_));
  for (int64_t i = 0; i < num_old; ++i) {
    for (uint32_t id = old[i], next = 0; id != 0; id = next) {
      next = at(id).chain;
      uint32_t& first = head(at(id).parent, at(id).token);
      at(id).chain = first;
      first = id;
    }
  }
}

// Compares positions by their distance from the end of the tape, because positions wrap around.
bool SuffixForest::better(const SuffixNode& a, const SuffixNode& b) const {
  const uint32_t end = static_cast<uint32_t>(tape_.end());
  return a.count != b.count ? a.count > b.count : end - a.pos < end - b.pos;
}

void SuffixForest::push_front(uint32_t parent, uint32_t id) {
  const uint32_t front = at(parent).first_child;
  at(id).next = front;
  at(id).prev = front == 0 ? 0 : at(front).count;
  if (front != 0) at(front).prev = id;
  at(parent).first_child = id;
}

void SuffixForest::link(uint32_t parent, uint32_t id) {
  const uint32_t front = at(parent).first_child;
  if (front == 0 || better(at(id), at(front))) return push_front(parent, id);
  const uint32_t second = at(front).next;
  at(id).next = second;
  at(id).prev = front;
  at(front).next = id;
  if (second != 0) at(second).prev = id;
  at(front).prev = std::max(at(front).prev, at(id).count);
}

void SuffixForest::unlink(uint32_t id) {
  const SuffixNode& removed = at(id);
  if (at(removed.parent).first_child != id) {
    at(removed.prev).next = removed.next;
    if (removed.next != 0) at(removed.next).prev = removed.prev;
    return;
  }
  at(removed.parent).first_child = removed.next;
  if (removed.next != 0)
    at(removed.next).prev = removed.prev;  // the bound still holds for the others; see restore_front
}

// Called after the count of `id` has increased: it may be the best child now.
void SuffixForest::promote(uint32_t id) {
  const uint32_t parent = at(id).parent, front = at(parent).first_child;
  if (front == id) return;
  if (!better(at(id), at(front))) {
    at(front).prev = std::max(at(front).prev, at(id).count);
    return;
  }
  unlink(id);
  push_front(parent, id);
}

// Moves the best child to the front after a count has decreased, unless the bound shows that it is there.
void SuffixForest::restore_front(uint32_t parent) {
  const uint32_t front = at(parent).first_child;
  if (front == 0 || at(parent).depth == 0 || at(front).count > at(front).prev) return;
  uint32_t best = front, runner_up = 0;
  for (uint32_t id = at(front).next; id != 0; id = at(id).next) {
    if (better(at(id), at(best))) {
      runner_up = at(best).count;
      best = id;
    } else {
      runner_up = std::max(runner_up, at(id).count);
    }
  }
  if (best != front) {
    unlink(best);
    push_front(parent, best);
  }
  at(best).prev = runner_up;
}

void SuffixForest::replace_sibling(uint32_t old_id, uint32_t new_id) {
  const SuffixNode& old = at(old_id);
  at(new_id).next = old.next;
  at(new_id).prev = old.prev;
  if (old.next != 0) at(old.next).prev = new_id;
  uint32_t& before = at(old.parent).first_child == old_id ? at(old.parent).first_child : at(old.prev).next;
  before = new_id;
}

uint32_t SuffixForest::add_leaf(uint32_t parent, uint32_t pos, int length) {
  const uint32_t id = allocate();
  const int32_t token = tape_.at(pos)[at(parent).depth];
  at(id) = {pos, 1, parent, 0, 0, 0, 0, static_cast<uint32_t>(token), static_cast<uint32_t>(length)};
  hash_insert(id);
  link(parent, id);
  return id;
}

// Inserts and returns a node of `depth` tokens above `id`, for a suffix at `pos` that differs from `id` after that
// depth.
uint32_t SuffixForest::split(uint32_t id, int depth, uint32_t pos) {
  const uint32_t upper = allocate();
  hash_erase(id);
  SuffixNode& lower = at(id);
  at(upper) = {pos, lower.count + 1, lower.parent, id, 0, 0, 0, lower.token, static_cast<uint32_t>(depth)};
  replace_sibling(id, upper);
  hash_insert(upper);
  lower.parent = upper;
  lower.token = tape_.at(lower.pos)[depth];
  lower.next = lower.prev = 0;
  hash_insert(id);
  return upper;
}

void SuffixForest::insert(uint32_t root, uint32_t pos, int length) {
  const int32_t* text = tape_.at(pos);
  uint32_t path[kMaxDepth + 1];
  int num_path = 0;
  uint32_t deepest = root;
  while (static_cast<int>(at(deepest).depth) < length) {
    const uint32_t id = child(deepest, text[at(deepest).depth]);
    if (id == 0) break;
    path[num_path++] = deepest = id;
  }
  const int known = std::min(static_cast<int>(at(deepest).depth), length);
  const int common = deepest == root ? 0 : common_prefix(text, tape_.at(at(deepest).pos), known);

  ++at(root).count;
  uint32_t last = root;
  int i = 0;
  for (; i < num_path && static_cast<int>(at(path[i]).depth) <= common; ++i) {
    last = path[i];
    ++at(last).count;
    at(last).pos = pos;
    promote(last);
  }
  if (static_cast<int>(at(last).depth) < common) {
    last = split(path[i], common, pos);
    promote(last);
  }
  if (common < length) add_leaf(last, pos, length);
}

void SuffixForest::prefetch(uint32_t root, uint32_t pos, int num, int length) const {
  uint32_t ids[kMaxPrefetch];  // the current node of each path
  int active[kMaxPrefetch], num_active = num;
  const uint32_t* heads[kMaxPrefetch];
  std::fill_n(ids, num, root);
  std::iota(active, active + num, 0);
  while (num_active > 0) {
    for (int k = 0; k < num_active; ++k) {
      const int i = active[k];
      const SuffixNode& here = node(ids[i]);
      heads[k] = &head(ids[i], tape_.at(pos + i)[here.depth]);
      __builtin_prefetch(heads[k]);
      __builtin_prefetch(&node(here.first_child));  // a child whose count increases is compared with it
    }
    for (int k = 0; k < num_active; ++k) __builtin_prefetch(&node(*heads[k]));
    int num_left = 0;
    for (int k = 0; k < num_active; ++k) {
      const int i = active[k];
      const uint32_t id = child(ids[i], tape_.at(pos + i)[node(ids[i]).depth]);
      if (id != 0) ids[i] = id;
      if (id != 0 && static_cast<int>(node(id).depth) < length) {
        active[num_left++] = i;
      } else {
        __builtin_prefetch(tape_.at(node(ids[i]).pos));
      }
    }
    num_active = num_left;
  }
  asm volatile("");  // otherwise the compiler would remove calls of a function that only prefetches
}

void SuffixForest::remove(uint32_t root, uint32_t pos, int length) {
  const int32_t* text = tape_.at(pos);
  uint32_t path[kMaxDepth + 1];
  int num_path = 0;
  uint32_t id = root;
  --at(root).count;
  while (static_cast<int>(at(id).depth) < length) {
    path[num_path++] = id = child(id, text[at(id).depth]);
    --at(id).count;
  }
  for (; num_path > 0 && at(path[num_path - 1]).count == 0; --num_path) {
    id = path[num_path - 1];
    const uint32_t parent = at(id).parent;
    hash_erase(id);
    unlink(id);
    release(id);
    restore_front(parent);
  }
  for (int i = 0; i < num_path; ++i) {
    if (at(at(path[i]).parent).first_child == path[i]) restore_front(at(path[i]).parent);
  }
  if (num_path > 0) merge_with_only_child(path[num_path - 1]);
}

// Removes a node that was split for a suffix that has been removed.
void SuffixForest::merge_with_only_child(uint32_t id) {
  const uint32_t lower = at(id).first_child;
  if (lower == 0 || at(lower).next != 0 || at(lower).count != at(id).count) return;
  hash_erase(lower);
  hash_erase(id);
  replace_sibling(id, lower);
  at(lower).parent = at(id).parent;
  at(lower).token = at(id).token;
  hash_insert(lower);
  release(id);
}

uint32_t SuffixForest::find(uint32_t root, const int32_t* tokens, int length) const {
  uint32_t id = root;
  while (static_cast<int>(node(id).depth) < length) {
    id = child(id, tokens[node(id).depth]);
    if (id == 0) return 0;
  }
  return common_prefix(tokens, tape_.at(node(id).pos), length) == length ? id : 0;
}

int64_t SuffixForest::num_bytes() const {
  return static_cast<int64_t>(pages_.size() * page_ * sizeof(SuffixNode)) + num_heads_ * int64_t{sizeof(uint32_t)};
}

std::string SuffixForest::check_node(uint32_t id, uint32_t expected_count) const {
  const SuffixNode& n = node(id);
  const bool is_root = n.depth == 0;
  if (n.count != expected_count) return "count differs";
  if (!is_root && child(n.parent, n.token) != id) return "not in the hash";
  uint64_t below = 0;
  int num_children = 0;
  for (uint32_t c = n.first_child, before = 0; c != 0; before = c, c = node(c).next, ++num_children) {
    below += node(c).count;
    if (node(c).parent != id || node(c).depth <= n.depth) return "a child has another parent";
    if (before != 0 && node(c).prev != before) return "the list of children is broken";
    if (is_root || before == 0) continue;
    const SuffixNode& front = node(n.first_child);
    if (better(node(c), front)) return "the best child is not in front";
    if (node(c).count > front.prev) return "a child above the bound";
  }
  if (below > n.count) return "children count more than their parent";
  if (!is_root && num_children < 2 && below == n.count) return "not canonical";
  return "";
}

std::string SuffixForest::check_integrity(const std::vector<Suffix>& suffixes,
                                          const std::vector<uint32_t>& roots) const {
  std::map<uint32_t, uint32_t> counts;
  for (uint32_t root : roots) counts[root] = 0;
  for (const Suffix& suffix : suffixes) {
    const int32_t* text = tape_.at(suffix.pos);
    uint32_t id = suffix.root;
    ++counts[id];
    while (static_cast<int>(node(id).depth) < suffix.length) {
      id = child(id, text[node(id).depth]);
      if (id == 0) return "a suffix is missing";
      ++counts[id];
    }
    if (static_cast<int>(node(id).depth) != suffix.length) return "no node where a suffix ends";
    if (common_prefix(text, tape_.at(node(id).pos), suffix.length) != suffix.length) return "a label differs";
  }
  for (const auto& [id, count] : counts) {
    const std::string wrong = check_node(id, count);
    if (!wrong.empty()) return wrong;
  }
  return static_cast<int64_t>(counts.size()) == num_nodes_ ? "" : "nodes that no suffix needs";
}

}  // namespace fd
