// SPDX-License-Identifier: Apache-2.0
// A first-in-first-out sequence of tokens. Positions only increase (modulo 2^32); memory is freed in whole chunks.
//
//   chunk i      [ 2^log2_chunk tokens | a copy of the first `contiguous` tokens of chunk i+1 ]
//
// so that `contiguous` tokens from any position on are contiguous in memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>

namespace fd {

class TokenTape {
 public:
  TokenTape(int contiguous, int log2_chunk)
      : contiguous_(contiguous), log2_chunk_(log2_chunk), chunk_(uint32_t{1} << log2_chunk) {}

  void append(const int32_t* tokens, int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; ++i, ++end_) {
      const uint32_t rel = static_cast<uint32_t>(end_ - base_), offset = rel & (chunk_ - 1);
      if (rel >> log2_chunk_ == chunks_.size()) chunks_.emplace_back(new int32_t[chunk_ + contiguous_]);
      chunks_.back()[offset] = tokens[i];
      if (offset < static_cast<uint32_t>(contiguous_) && chunks_.size() > 1) {
        chunks_[chunks_.size() - 2][chunk_ + offset] = tokens[i];
      }
    }
  }

  // Frees the chunks that end before `position`.
  void drop_before(uint64_t position) {
    for (; !chunks_.empty() && base_ + chunk_ <= position; base_ += chunk_) chunks_.pop_front();
  }

  // Returns a pointer to the token at `position`, after which up to `contiguous` tokens are contiguous.
  const int32_t* at(uint32_t position) const {
    const uint32_t rel = position - static_cast<uint32_t>(base_);
    return chunks_[rel >> log2_chunk_].get() + (rel & (chunk_ - 1));
  }

  uint64_t end() const { return end_; }
  int64_t num_bytes() const { return static_cast<int64_t>(chunks_.size() * (chunk_ + contiguous_) * sizeof(int32_t)); }

 private:
  int contiguous_, log2_chunk_;
  uint32_t chunk_;  // at least `contiguous`
  uint64_t base_ = 0, end_ = 0;
  std::deque<std::unique_ptr<int32_t[]>> chunks_;
};

}  // namespace fd
