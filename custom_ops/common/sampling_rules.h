// SPDX-License-Identifier: Apache-2.0
// The rules of sampling for one id and for one row, shared by all backends: how an id's logit is edited, which filters
// a row has, when it fails, and which rows are skipped.
#pragma once

#include "common/sampling.h"

namespace fd {

constexpr float kPlusInfinity = __builtin_inff();
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLeastMinP = 0x1p-126f;  // a smaller one is off

// The cutoff that allows every id with a finite logit.
constexpr Cutoff kAllFinite = {kMinusInfinity, -1};

// The sampling parameters of one row.
struct RowParams {
  const float* f;    // [kNumFloatParams]
  const int64_t* i;  // [kNumIntParams]

  FD_RULE bool greedy() const { return !(f[kTemperature] >= kGreedyTemperature); }
  FD_RULE bool penalised() const { return f[kRepetition] != 1.0f || f[kPresence] != 0.0f || f[kFrequency] != 0.0f; }
  FD_RULE bool biased() const { return i[kBiasBegin] < i[kBiasEnd]; }
  FD_RULE bool bans() const { return i[kBannedBegin] < i[kBannedEnd]; }
  FD_RULE bool masked() const { return i[kMaskBegin] != kNoMask; }
  FD_RULE bool edits() const { return penalised() || biased() || bans() || masked(); }
  FD_RULE bool has_top_k(int32_t num_ids) const { return i[kTopK] > 0 && i[kTopK] < num_ids; }
  FD_RULE bool has_top_p() const { return f[kTopP] < 1.0f; }
  FD_RULE bool has_min_p() const { return f[kMinP] >= kLeastMinP; }
  FD_RULE uint64_t seed() const { return static_cast<uint64_t>(i[kSeed]); }
  FD_RULE uint64_t position() const { return static_cast<uint64_t>(i[kPosition]); }

  // Returns the number of ids of the row; those from this one on are never allowed.
  FD_RULE int32_t num_ids(int64_t vocab_size) const {
    const int64_t limit = i[kVocabLimit];
    return static_cast<int32_t>(limit < 0 ? 0 : limit < vocab_size ? limit : vocab_size);
  }
};

// Lists of a row may hold ids outside of the vocabulary; they are ignored.
FD_RULE bool is_token_id(int32_t id, int64_t vocab_size) { return id >= 0 && id < vocab_size; }

// Returns the penalised logit of an id that is in the history, and occurs in its output this often.
FD_RULE float penalised_logit(float logit, const RowParams& row, int32_t occurrences) {
  using L = ScalarLanes;
  const float x = logit > 0.0f ? L::div(logit, row.f[kRepetition]) : L::mul(logit, row.f[kRepetition]);
  if (occurrences == 0) return x;
  return L::fma(-row.f[kFrequency], static_cast<float>(occurrences), L::add(x, -row.f[kPresence]));
}

// Returns the bit of an id in a mask; 0 bans it.
FD_RULE bool mask_allows(const int32_t* mask, int32_t id) { return (mask[id / 32] >> (id % 32)) & 1; }

// Returns the status of a row by its largest logit, or NaN if a logit is NaN; in rows that are not greedy, of the
// scaled logits too.
FD_RULE RowStatus status_of(float largest) {
  if (!(largest < kPlusInfinity)) return kRowNan;
  return largest == kMinusInfinity ? kRowEmpty : kRowOk;
}

// Returns the scaled logit that ids must reach to have at least min_p times the largest probability.
FD_RULE float least_logit(float min_p, float largest) {
  return ScalarLanes::add(largest, log_positive<ScalarLanes>(min_p));
}

// Returns whether a draft is in the allowed set, where `scaled` is its scaled logit.
FD_RULE bool draft_survives(const RowParams& row, int32_t num_ids, Cutoff cutoff, float scaled) {
  const int64_t draft = row.i[kDraftId];
  return draft >= 0 && draft < num_ids && is_allowed(cutoff, scaled, static_cast<int32_t>(draft));
}

// Returns whether a row rejects its draft; the rows after it, up to and with the first one without a draft before it,
// are then skipped.
FD_RULE bool rejects(int64_t draft, int32_t token_id) { return draft >= 0 && token_id != draft; }

// Returns whether an earlier row of the same request rejects its draft: draft(i) is the draft of row i, and
// rejects_draft(i) whether it is rejected.
template <class Draft, class Rejects>
FD_RULE bool follows_rejection(int64_t row, const Draft& draft, const Rejects& rejects_draft) {
  for (; row > 0 && draft(row - 1) >= 0; --row)
    if (rejects_draft(row - 1)) return true;
  return false;
}

}  // namespace fd
