// SPDX-License-Identifier: Apache-2.0
// The C ABI of n-gram matching. Calls return 0 or 1 + the index of the first invalid slot.
#include <cstring>

#include "common/export.h"
#include "host/ngram_index.h"
#include "host/text_batch.h"

using fd::NgramIndex;

FD_EXPORT void* fd_ngram_create(int32_t min_n, int32_t max_n) { return new NgramIndex(min_n, max_n); }

FD_EXPORT void fd_ngram_destroy(void* index) { delete static_cast<NgramIndex*>(index); }

FD_EXPORT int64_t fd_ngram_start(void* index, int64_t slot, const int32_t* tokens, int64_t num_tokens) {
  return static_cast<NgramIndex*>(index)->start(slot, tokens, num_tokens) ? 0 : 1;
}

FD_EXPORT int64_t fd_ngram_finish(void* index, int64_t slot) {
  return static_cast<NgramIndex*>(index)->finish(slot) ? 0 : 1;
}

// Appends the added tokens to the texts and proposes up to caps[i] tokens that follow the text of slots[i] and its
// tail.
FD_EXPORT int64_t fd_ngram_draft_batch(void* index, const fd::TextBatch* batch) {
  NgramIndex& texts = *static_cast<NgramIndex*>(index);
  const int64_t wrong = batch->find_wrong_slot([&](int64_t slot) { return texts.sequence(slot) != nullptr; });
  if (wrong != 0) return wrong;
  for (int64_t i = 0; i < batch->num_texts; ++i) {
    fd::NgramSequence& sequence = *texts.sequence(batch->slots[i]);
    sequence.extend(batch->added(i), batch->num_added(i));
    const fd::Proposal found = sequence.propose(batch->tail(i), batch->caps[i]);
    batch->counts[i] = found.num_tokens;
    batch->match_lens[i] = found.match_len;
    sequence.write(found, batch->tail(i), batch->drafts + i * batch->stride);
  }
  return 0;
}

FD_EXPORT int64_t fd_ngram_num_bytes(void* index) { return static_cast<NgramIndex*>(index)->num_bytes(); }

// Writes "" or what is wrong, truncated to the buffer.
FD_EXPORT void fd_ngram_check_integrity(void* index, char* message, int64_t size) {
  const std::string wrong = static_cast<NgramIndex*>(index)->check_integrity();
  std::strncpy(message, wrong.c_str(), size - 1);
  message[size - 1] = '\0';
}
