// SPDX-License-Identifier: Apache-2.0
#include "host/ngram_index.h"

#include <algorithm>
#include <random>

namespace fd {
namespace {

constexpr double kMaxLoad = 0.8;
constexpr double kGrowth = 1.25;  // keeps the load above 0.64, to limit the bytes per token
constexpr size_t kMinEntries = 16;

// Differs between processes, so that no client can send a prompt whose n-grams all hash to one entry. Results do not
// depend on it.
uint64_t hash_seed() {
  static const uint64_t seed = [] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }();
  return seed;
}

// The hash of an n-gram, computed from its last token backwards, so that one pass gives the hashes of all lengths.
struct BackwardHash {
  uint64_t state = hash_seed();
  void push(int32_t token) {
    state = (state ^ static_cast<uint32_t>(token)) * 0xd6e8feb86659fd93u;
    state ^= state >> 32;
  }
  uint32_t value() const { return static_cast<uint32_t>((state * 0xd6e8feb86659fd93u) >> 32); }
};

uint32_t hash_before(const int32_t* ngram_end, int n) {
  BackwardHash hash;
  for (int i = 1; i <= n; ++i) hash.push(ngram_end[-i]);
  return hash.value();
}

}  // namespace

size_t PositionTable::locate(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const {
  size_t index = (static_cast<uint64_t>(hash) * entries_.size()) >> 32;
  for (;; index = index + 1 == entries_.size() ? 0 : index + 1) {
    if (entries_[index] == 0) return index;
    if (std::equal(ngram_end - n_, ngram_end, tokens.data() + entries_[index] - n_)) return index;
  }
}

void PositionTable::rebuild(const std::vector<int32_t>& tokens, size_t num_entries) {
  std::vector<int32_t> old(num_entries);
  old.swap(entries_);
  for (int32_t entry : old) {
    const int32_t* ngram_end = tokens.data() + entry;
    if (entry != 0) entries_[locate(tokens, hash_before(ngram_end, n_), ngram_end)] = entry;
  }
}

void PositionTable::reserve(const std::vector<int32_t>& tokens, int64_t num_ngrams) {
  const size_t wanted = std::max(kMinEntries, static_cast<size_t>(static_cast<double>(num_ngrams) / kMaxLoad) + 1);
  if (wanted > entries_.size()) rebuild(tokens, wanted);
}

void PositionTable::record(const std::vector<int32_t>& tokens, uint32_t hash, int32_t end) {
  if (static_cast<double>(num_ngrams_ + 1) > kMaxLoad * static_cast<double>(entries_.size())) {
    rebuild(tokens, std::max(kMinEntries, static_cast<size_t>(kGrowth * static_cast<double>(entries_.size()))));
  }
  const size_t index = locate(tokens, hash, tokens.data() + end + 1);
  if (entries_[index] == 0) ++num_ngrams_;
  entries_[index] = end + 1;
}

int32_t PositionTable::find(const std::vector<int32_t>& tokens, uint32_t hash, const int32_t* ngram_end) const {
  return entries_.empty() ? -1 : entries_[locate(tokens, hash, ngram_end)] - 1;
}

NgramSequence::NgramSequence(int min_n, int max_n) {
  for (int n = min_n; n <= max_n; ++n) tables_.emplace_back(n);
}

void NgramSequence::extend(const int32_t* tokens, int64_t num_tokens) {
  const int64_t before = static_cast<int64_t>(tokens_.size());
  const int64_t after = before + num_tokens;
  if (static_cast<size_t>(after) > tokens_.capacity()) {
    tokens_.reserve(std::max<size_t>(after, static_cast<size_t>(kGrowth * static_cast<double>(tokens_.capacity()))));
  }
  tokens_.insert(tokens_.end(), tokens, tokens + num_tokens);
  anchor_.extend(tokens, num_tokens);
  if (before == 0) {
    for (PositionTable& table : tables_) table.reserve(tokens_, after);
  }
  for (int64_t end = std::max<int64_t>(before - 1, 0); end + 1 < after; ++end) {
    BackwardHash hash;
    int n = 0;
    for (PositionTable& table : tables_) {
      if (table.n() > end + 1) break;
      for (; n < table.n(); ++n) hash.push(tokens_[end - n]);
      table.record(tokens_, hash.value(), static_cast<int32_t>(end));
    }
  }
}

int32_t NgramSequence::find_in_tail(const Tail& tail, const int32_t* ngram, int n) const {
  for (int32_t end = length() + tail.num_tokens - 2; end >= std::max(length(), n) - 1; --end) {
    int i = 0;
    while (i < n && token(tail, end - i) == ngram[n - 1 - i]) ++i;
    if (i == n) return end;
  }
  return -1;
}

Proposal NgramSequence::propose(const Tail& tail, int32_t cap) {
  const Proposal found = look_up(tail, cap);
  if (found.match_len == 0) return found;
  if (tail.num_tokens == 0 && anchor_.needs_update() && match_len_at(tail, found.first) >= kLongMatch) {
    anchor_.set(0, found.first, length(), kLongMatch, [this](int64_t i) { return tokens_[i]; });
  }
  Proposal best = resume(tail, cap, found.match_len);
  if (best.match_len == 0) best = found;
  best.match_len = match_len_at(tail, best.first);
  return best;
}

int32_t NgramSequence::match_len_at(const Tail& tail, int32_t position) const {
  const int32_t num_all = length() + tail.num_tokens, limit = std::min(position, kMaxMatchLen);
  int32_t n = 0;
  while (n < limit && token(tail, position - 1 - n) == token(tail, num_all - 1 - n)) ++n;
  return n;
}

Proposal NgramSequence::resume(const Tail& tail, int32_t cap, int min_match_len) const {
  const Resumption found = anchor_.find(tail);
  if (found.match_len < min_match_len) return {};
  return {found.match_len, static_cast<int32_t>(anchor_.source_position(found.index)), cap};
}

Proposal NgramSequence::look_up(const Tail& tail, int32_t cap) const {
  const int32_t num_all = length() + tail.num_tokens, num_last = std::min(num_all, kMaxNgram);
  int32_t last[kMaxNgram];
  for (int32_t i = 0; i < num_last; ++i) last[i] = token(tail, num_all - num_last + i);
  const int32_t* ngram_end = last + num_last;
  for (auto table = tables_.rbegin(); table != tables_.rend() && cap > 0; ++table) {
    const int n = table->n();
    if (n > num_all) continue;
    int32_t end = find_in_tail(tail, ngram_end - n, n);
    if (end < 0) end = table->find(tokens_, hash_before(ngram_end, n), ngram_end);
    if (end >= 0) return {n, end + 1, cap};
  }
  return {};
}

// A match that reaches the end of the text is a repetition, which the proposal continues with the same period.
void NgramSequence::write(const Proposal& proposal, const Tail& tail, int32_t* out) const {
  const int32_t period = length() + tail.num_tokens - proposal.first;
  for (int32_t i = 0; i < proposal.num_tokens; ++i) out[i] = token(tail, proposal.first + i % period);
}

int64_t NgramSequence::num_bytes() const {
  int64_t bytes = static_cast<int64_t>(sizeof(*this) + tokens_.capacity() * sizeof(int32_t));
  for (const PositionTable& table : tables_) bytes += static_cast<int64_t>(sizeof(table)) + table.num_bytes();
  return bytes;
}

std::string NgramSequence::check_integrity() const {
  const int32_t length = static_cast<int32_t>(tokens_.size());
  for (const PositionTable& table : tables_) {
    const std::string name = "table " + std::to_string(table.n());
    int64_t used = 0, distinct = 0;
    for (int32_t entry : table.entries()) {
      used += entry != 0;
      if (entry != 0 && (entry < table.n() || entry >= length)) return name + ": position out of range";
    }
    for (int32_t end = table.n() - 1; end + 1 < length; ++end) {
      const int32_t* ngram_end = tokens_.data() + end + 1;
      const int32_t found = table.find(tokens_, hash_before(ngram_end, table.n()), ngram_end);
      if (found < end) return name + ": the n-gram that ends at " + std::to_string(end) + " is not indexed";
      distinct += found == end;
    }
    if (used != distinct || used != table.num_ngrams()) return name + ": number of n-grams differs";
  }
  return "";
}

bool NgramIndex::start(int64_t slot, const int32_t* tokens, int64_t num_tokens) {
  if (slot < 0 || sequence(slot) != nullptr) return false;
  if (slot >= static_cast<int64_t>(sequences_.size())) sequences_.resize(slot + 1);
  sequences_[slot] = std::make_unique<NgramSequence>(min_n_, max_n_);
  sequences_[slot]->extend(tokens, num_tokens);
  return true;
}

bool NgramIndex::finish(int64_t slot) {
  if (sequence(slot) == nullptr) return false;
  sequences_[slot].reset();
  return true;
}

NgramSequence* NgramIndex::sequence(int64_t slot) {
  return slot >= 0 && slot < static_cast<int64_t>(sequences_.size()) ? sequences_[slot].get() : nullptr;
}

int64_t NgramIndex::num_bytes() const {
  int64_t bytes = static_cast<int64_t>(sequences_.capacity() * sizeof(sequences_[0]));
  for (const auto& sequence : sequences_) bytes += sequence ? sequence->num_bytes() : 0;
  return bytes;
}

std::string NgramIndex::check_integrity() const {
  for (size_t slot = 0; slot < sequences_.size(); ++slot) {
    const std::string wrong = sequences_[slot] ? sequences_[slot]->check_integrity() : "";
    if (!wrong.empty()) return "slot " + std::to_string(slot) + ": " + wrong;
  }
  return "";
}

}  // namespace fd
