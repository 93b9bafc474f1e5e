// SPDX-License-Identifier: Apache-2.0
// A first-in-first-out text of tokens. Positions only grow (modulo 2^32); memory follows what is kept, in whole chunks.
//
//   chunk i      [ 2^log2_chunk tokens | the first `reach` tokens of chunk i+1 once more ]
//
// so that `reach` tokens from any position lie side by side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>

namespace fd {

class TokenTape {
 public:
  TokenTape(int reach, int log2_chunk) : reach_(reach), log2_chunk_(log2_chunk), chunk_(uint32_t{1} << log2_chunk) {}

  void append(const int32_t* tokens, int64_t num_tokens) {
    for (int64_t i = 0; i < num_tokens; ++i, ++end_) {
      const uint32_t rel = static_cast<uint32_t>(end_ - base_), offset = rel & (chunk_ - 1);
      if (rel >> log2_chunk_ == chunks_.size()) chunks_.emplace_back(new int32_t[chunk_ + reach_]);
      chunks_.back()[offset] = tokens[i];
      if (offset < static_cast<uint32_t>(reach_) && chunks_.size() > 1) {
        chunks_[chunks_.size() - 2][chunk_ + offset] = tokens[i];
      }
    }
  }

  // Lets go of the chunks that lie before `position` as a whole.
  void drop_before(uint64_t position) {
    for (; !chunks_.empty() && base_ + chunk_ <= position; base_ += chunk_) chunks_.pop_front();
  }

  // The token at `position`; as many as `reach` follow it, as far as they are written.
  const int32_t* at(uint32_t position) const {
    const uint32_t rel = position - static_cast<uint32_t>(base_);
    return chunks_[rel >> log2_chunk_].get() + (rel & (chunk_ - 1));
  }

  uint64_t end() const { return end_; }
  int64_t num_bytes() const { return static_cast<int64_t>(chunks_.size() * (chunk_ + reach_) * sizeof(int32_t)); }

 private:
  int reach_, log2_chunk_;
  uint32_t chunk_;  // at least `reach`
  uint64_t base_ = 0, end_ = 0;
  std::deque<std::unique_ptr<int32_t[]>> chunks_;
};

}  // namespace fd
