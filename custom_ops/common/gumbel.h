// SPDX-License-Identifier: Apache-2.0
// Gumbel noise from a random word, and the logarithm that computes it. For the word x and w = (x + 1/2) / 2^32,
//   gumbel = -log(-log1p(-w)),
// so that large noise comes from small w, where floats are dense. For w > 1/2 the same value is computed from
// 1 - w = (~x + 1/2) / 2^32, where floats are dense again. Range: [-3.130, 22.874].
//
// Measured errors against double precision: log_positive at most 0.94 ulp; exponential_from_word at most 1.5e-7
// relative; gumbel at most 3e-7 absolute below 4 and 0.8 ulp above.
#pragma once

#include "common/philox.h"

namespace fd {

constexpr float kLn2 = 0x1.62e43p-1f;  // 2.7e-9 relative from ln 2: enough for |k| <= 34 in one fused operation
constexpr float kSqrtHalf = 0x1.6a09e6p-1f;
constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;
constexpr float kLargestGumbel = 22.875f;  // above all noise
constexpr float kSmallestGumbel = -3.25f;  // below all noise

// Returns k * ln 2 + log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]. The cubic remainder (log(1+f) - f + f^2/2) / f^3
// is a minimax fit of degree 7; the relative error of the result is 5.9e-9.
template <class L>
FD_RULE typename L::F log_reduced(typename L::F k, typename L::F f) {
  typename L::F p = L::set(-0x1.41ee06p-4f);
  p = L::fma(p, f, L::set(0x1.07d0eep-3f));
  p = L::fma(p, f, L::set(-0x1.0ce07cp-3f));
  p = L::fma(p, f, L::set(0x1.226e4ap-3f));
  p = L::fma(p, f, L::set(-0x1.54788ap-3f));
  p = L::fma(p, f, L::set(0x1.99a596p-3f));
  p = L::fma(p, f, L::set(-0x1.000220p-2f));
  p = L::fma(p, f, L::set(0x1.55554ap-2f));
  p = L::fma(p, f, L::set(-0.5f));
  return L::fma(k, L::set(kLn2), L::fma(p, L::mul(f, f), f));
}

// Splits x > 0 (normal) into 2^k * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)).
template <class L>
FD_RULE void split_power(typename L::F x, typename L::F* k, typename L::F* f) {
  const typename L::U above = L::sub(L::bits(x), L::set(kSqrtHalfBits));
  *k = L::to_float(L::template shift_right_signed<23>(above));
  const typename L::U mantissa = L::add(L::bit_and(above, L::set(0x7fffffu)), L::set(kSqrtHalfBits));
  *f = L::add(L::from_bits(mantissa), L::set(-1.0f));
}

// Returns the natural logarithm of a positive normal float.
template <class L>
FD_RULE typename L::F log_positive(typename L::F x) {
  typename L::F k, f;
  split_power<L>(x, &k, &f);
  return log_reduced<L>(k, f);
}

// Returns -log1p(-w) for the word x: an exponential variate in [2^-33, 22.874].
template <class L>
FD_RULE typename L::F exponential_from_word(typename L::U x) {
  using F = typename L::F;
  const typename L::U complement = L::template shift_right_signed<31>(x);  // all ones where w > 1/2
  const F half_open = L::add(L::to_float(L::bit_xor(x, complement)), L::set(0.5f));
  const F p = L::mul(half_open, L::set(0x1p-32f));  // min(w, 1 - w), in (0, 1/2]
  F k_upper, f_upper;
  split_power<L>(p, &k_upper, &f_upper);
  // Below 1/2: 1 - w = 1 + (-w), or 2^-1 * (1 + (1 - 2w)) once 1 - w falls below sqrt(1/2); 1 - 2w is exact there.
  const auto halved = L::greater(p, L::set(1.0f - kSqrtHalf));
  const F k_lower = L::select(halved, L::set(-1.0f), L::set(0.0f));
  const F f_lower = L::select(halved, L::fma(p, L::set(-2.0f), L::set(1.0f)), L::mul(p, L::set(-1.0f)));
  const auto upper = L::is_negative(x);
  return L::mul(log_reduced<L>(L::select(upper, k_upper, k_lower), L::select(upper, f_upper, f_lower)), L::set(-1.0f));
}

template <class L>
FD_RULE typename L::F gumbel_from_word(typename L::U x) {
  return L::mul(log_positive<L>(exponential_from_word<L>(x)), L::set(-1.0f));
}

// Returns an upper bound of the noise of these words: noise = -log(-log1p(-w)) <= -log(w), and the bits of a float,
// read as an integer, are a piecewise linear lower bound of its binary logarithm.
template <class L>
FD_RULE typename L::F noise_bound(typename L::U words) {
  const typename L::U half = L::bit_and(L::template shift_right_signed<1>(words), L::set(0x7fffffffu));
  const typename L::F linear = L::to_float(L::bits(L::to_float(half)));  // at most (log2(half) + 127) * 2^23
  return L::fma(linear, L::set(-kLn2 * 0x1p-23f), L::set((31.0f + 127.0f) * kLn2 + 0.01f));
}

}  // namespace fd
