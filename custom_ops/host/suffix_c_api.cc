// SPDX-License-Identifier: Apache-2.0
// The C ABI of suffix decoding. Calls return 0, 1 + the index of the first invalid slot, or -1 if a token is out of
// range. If they fail, nothing has changed.
#include <cstring>

#include "common/export.h"
#include "host/suffix_cache.h"
#include "host/text_batch.h"

namespace {

fd::SuffixCache* cache_of(void* cache) { return static_cast<fd::SuffixCache*>(cache); }

bool in_range(const int32_t* tokens, int64_t num_tokens) {
  return std::all_of(tokens, tokens + num_tokens, [](int32_t t) { return t >= 0 && t <= fd::kMaxToken; });
}

}  // namespace

FD_EXPORT void* fd_suffix_create(int32_t max_depth, int32_t max_drafts, double factor, double min_prob,
                                 int64_t max_outputs, int64_t max_bytes) {
  return new fd::SuffixCache({max_depth, max_drafts, factor, min_prob}, {max_outputs, max_bytes});
}

FD_EXPORT void fd_suffix_destroy(void* cache) { delete cache_of(cache); }

FD_EXPORT int64_t fd_suffix_start(void* cache, int64_t slot, const char* salt, int64_t salt_size, const int32_t* tokens,
                                  int64_t num_tokens) {
  if (!in_range(tokens, num_tokens)) return -1;
  return cache_of(cache)->start(slot, std::string(salt, salt_size), tokens, num_tokens) ? 0 : 1;
}

// Appends the added tokens to the texts and proposes up to caps[i] tokens that follow the text of slots[i] and its
// tail.
FD_EXPORT int64_t fd_suffix_draft_batch(void* cache, const fd::TextBatch* batch) {
  fd::SuffixCache& texts = *cache_of(cache);
  const int64_t n = batch->num_texts;
  const int64_t wrong = batch->find_wrong_slot([&](int64_t slot) { return texts.is_live(slot); });
  if (wrong != 0) return wrong;
  if (!in_range(batch->added(0), batch->cu_tokens[n] - batch->cu_tokens[0])) return -1;
  for (int64_t i = 0; i < n; ++i) texts.extend(batch->slots[i], batch->added(i), batch->num_added(i));
  texts.cached().process(fd::kSuffixesPerStep);
  for (int64_t i = 0; i < n; ++i) {
    fd::SuffixDraft best;
    bool is_shared = false;
    texts.propose(batch->slots[i], batch->tail(i), batch->caps[i], &best, &is_shared);
    std::copy_n(best.tokens, best.num_tokens, batch->drafts + i * batch->stride);
    batch->counts[i] = best.num_tokens;
    batch->match_lens[i] = best.match_len;
    batch->is_shared[i] = is_shared;
  }
  return 0;
}

FD_EXPORT int64_t fd_suffix_finish(void* cache, int64_t slot, const int32_t* output, int64_t num_tokens) {
  if (!in_range(output, num_tokens)) return -1;
  return cache_of(cache)->finish(slot, output, num_tokens) ? 0 : 1;
}

FD_EXPORT int64_t fd_suffix_process(void* cache, int64_t num_suffixes) {
  return cache_of(cache)->cached().process(num_suffixes);
}

// Writes the bytes of live texts, then bytes, outputs, tokens, waiting tokens, nodes and evicted outputs of the cache.
FD_EXPORT void fd_suffix_usage(void* cache, int64_t* values) {
  const fd::CachedOutputs& cached = cache_of(cache)->cached();
  const int64_t usage[] = {cache_of(cache)->num_live_bytes(),
                           cached.num_bytes(),
                           cached.num_outputs(),
                           cached.num_tokens(),
                           cached.num_waiting(),
                           cached.num_nodes(),
                           cached.num_evicted()};
  std::copy(std::begin(usage), std::end(usage), values);
}

// Writes "" or what is wrong, truncated to the buffer.
FD_EXPORT void fd_suffix_check_integrity(void* cache, char* message, int64_t size) {
  const std::string wrong = cache_of(cache)->check_integrity();
  std::strncpy(message, wrong.c_str(), size - 1);
  message[size - 1] = '\0';
}
