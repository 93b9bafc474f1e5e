// SPDX-License-Identifier: Apache-2.0
// The host library's C ABI. Calls return 0, or 1 + the index of the first entry whose slot is wrong; nothing throws.
#include <cstring>

#include "host/ngram_index.h"

#define FD_API extern "C" __attribute__((visibility("default")))

using fd::NgramIndex;

FD_API void* fd_ngram_create(int32_t min_n, int32_t max_n) { return new NgramIndex(min_n, max_n); }

FD_API void fd_ngram_destroy(void* index) { delete static_cast<NgramIndex*>(index); }

FD_API int64_t fd_ngram_start(void* index, int64_t slot, const int32_t* tokens, int64_t num_tokens) {
  return static_cast<NgramIndex*>(index)->start(slot, tokens, num_tokens) ? 0 : 1;
}

FD_API int64_t fd_ngram_finish(void* index, int64_t slot) {
  return static_cast<NgramIndex*>(index)->finish(slot) ? 0 : 1;
}

// Appends tokens[cu_tokens[i] .. cu_tokens[i + 1]) to the sequence of slots[i].
FD_API int64_t fd_ngram_extend_batch(void* index, const int32_t* slots, const int32_t* cu_tokens, const int32_t* tokens,
                                     int64_t num_slots) {
  for (int64_t i = 0; i < num_slots; ++i) {
    fd::NgramSequence* sequence = static_cast<NgramIndex*>(index)->sequence(slots[i]);
    if (sequence == nullptr || cu_tokens[i] > cu_tokens[i + 1]) return 1 + i;
    sequence->extend(tokens + cu_tokens[i], cu_tokens[i + 1] - cu_tokens[i]);
  }
  return 0;
}

// Writes up to caps[i] <= stride tokens that follow sequence and tail to drafts[i * stride], their number and the
// length of the matched suffix.
FD_API int64_t fd_ngram_propose_batch(void* index, const int32_t* slots, const int32_t* caps, const int32_t* cu_tails,
                                      const int32_t* tails, int64_t num_slots, int64_t stride, int32_t* drafts,
                                      int32_t* counts, int32_t* match_lens) {
  for (int64_t i = 0; i < num_slots; ++i) {
    const fd::NgramSequence* sequence = static_cast<NgramIndex*>(index)->sequence(slots[i]);
    if (sequence == nullptr || caps[i] > stride) return 1 + i;
    const fd::Tail tail = fd::Tails{cu_tails, tails}.at(i);
    const fd::Proposal found = sequence->propose(tail, caps[i]);
    counts[i] = found.num_tokens;
    match_lens[i] = found.match_len;
    sequence->write(found, tail, drafts + i * stride);
  }
  return 0;
}

FD_API int64_t fd_ngram_num_bytes(void* index) { return static_cast<NgramIndex*>(index)->num_bytes(); }

// Writes "" or what is wrong, cut to the buffer.
FD_API void fd_ngram_check_integrity(void* index, char* message, int64_t size) {
  const std::string wrong = static_cast<NgramIndex*>(index)->check_integrity();
  std::strncpy(message, wrong.c_str(), size - 1);
  message[size - 1] = '\0';
}
