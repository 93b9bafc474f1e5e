// SPDX-License-Identifier: Apache-2.0
// The parts of sampling that all backends share: the exponential, probability masses as integers, the order of token
// ids and the cutoff between the allowed set and the other ids.
//
// The mass of an id is exp(logit - largest logit), truncated to a multiple of 2^-40 and kept as an integer. Integer
// sums are exact, so the sum over a vocabulary, and with it the set that top_p allows, does not depend on the order of
// additions, the number of threads or the vector width. Ids whose logits are more than 28 below the largest have mass
// 0; together they would add less than 1.4e-7 of the largest mass.
#pragma once

#include "common/gumbel.h"

namespace fd {

constexpr float kGreedyTemperature = 1e-5f;
constexpr int kMassBits = 40;
constexpr float kMinExponent = -80.0f;  // its mass is 0, and its exponential is still a normal float

// Columns of SamplingBatch.float_params and int_params (fastdeploy/ops/sampling.py).
enum FloatParam { kTemperature, kTopP, kMinP, kRepetition, kPresence, kFrequency, kNumFloatParams };
enum IntParam {
  kSeed,
  kPosition,
  kTopK,
  kHistoryBegin,
  kOutputBegin,
  kHistoryEnd,
  kBiasBegin,
  kBiasEnd,
  kBannedBegin,
  kBannedEnd,
  kDraftId,
  kVocabLimit,
  kMaskBegin,
  kNumIntParams
};
constexpr int64_t kNoMask = -1;
enum RowStatus { kRowOk, kRowNan, kRowEmpty, kRowSkipped };

// Returns exp(x) for x in [-80, 0] with an error of at most 1 ulp, from a minimax fit of (exp(r) - 1 - r) / r^2.
template <class L>
FD_RULE typename L::F exp_nonpositive(typename L::F x) {
  const typename L::F shifter = L::set(0x1.8p23f);  // adding it rounds to an integer
  const typename L::F shifted = L::fma(x, L::set(0x1.715476p0f), shifter);
  const typename L::F k = L::add(shifted, L::set(-0x1.8p23f));
  typename L::F r = L::fma(k, L::set(-0x1.62ep-1f), x);  // exact, because this part of ln 2 has few bits
  r = L::fma(k, L::set(-0x1.0bfbe8p-15f), r);
  typename L::F p = L::set(0x1.6db42ap-10f);
  p = L::fma(p, r, L::set(0x1.123b56p-7f));
  p = L::fma(p, r, L::set(0x1.55545ep-5f));
  p = L::fma(p, r, L::set(0x1.55548ep-3f));
  p = L::fma(p, r, L::set(0.5f));
  p = L::add(L::fma(p, L::mul(r, r), r), L::set(1.0f));
  const typename L::U exponent = L::sub(L::bits(shifted), L::bits(shifter));
  return L::from_bits(L::add(L::bits(p), L::template shift_left<23>(exponent)));
}

// Returns exp(logit - largest), 0 < result <= 1, even for a logit of -inf.
template <class L>
FD_RULE typename L::F relative_probability(typename L::F logit, typename L::F largest) {
  const typename L::F x = L::add(logit, L::mul(largest, L::set(-1.0f)));
  const typename L::F minimum = L::set(kMinExponent);
  return exp_nonpositive<L>(L::select(L::greater(x, minimum), x, minimum));
}

// Returns the float 0 < e <= 1 in units of 2^-40, truncated.
FD_RULE uint64_t mass_of(float e) {
  const uint32_t bits = ScalarLanes::bits(e);
  const uint64_t mantissa = (bits & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 23 + 127 - (bits >> 23);
  return shift > 63 ? 0 : (mantissa << kMassBits) >> shift;
}

// Returns whether a prefix of this mass reaches top_p. The ratio is rounded to float, as top_p is, so that three of ten
// equal ids reach 0.3.
FD_RULE bool reaches(uint64_t prefix, uint64_t total, float top_p) {
  return static_cast<float>(static_cast<double>(prefix) / static_cast<double>(total)) >= top_p;
}

// Returns a key whose ascending order is (logit descending, id ascending); -0 and 0 compare equal.
FD_RULE uint64_t order_key(float logit, uint32_t id) {
  const uint32_t bits = ScalarLanes::bits(logit + 0.0f);
  const uint32_t descending = (bits & 0x80000000u) ? bits : ~bits & 0x7fffffffu;
  return (static_cast<uint64_t>(descending) << 32) | id;
}

FD_RULE float key_logit(uint64_t key) {
  const uint32_t descending = static_cast<uint32_t>(key >> 32);
  return ScalarLanes::from_bits((descending & 0x80000000u) ? descending : ~descending & 0x7fffffffu);
}

// The allowed set of a row: logit > cutoff.logit, or equal to it with id <= cutoff.id. A logit of -inf is never
// allowed.
struct Cutoff {
  float logit;
  int32_t id;
};

FD_RULE bool is_allowed(Cutoff cutoff, float logit, int32_t id) {
  return logit > cutoff.logit || (logit == cutoff.logit && id <= cutoff.id);
}

}  // namespace fd
