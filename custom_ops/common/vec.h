// SPDX-License-Identifier: Apache-2.0
// Vectors of sixteen fp32 lanes (FP32Vec16) and 32 bf16 lanes (BF16Vec32), and the functions that kernels apply to
// them, for each instruction-set path. A function compiles to the same instructions wherever it is inlined, so the
// result of a lane depends on its operands only.
#pragma once

#include <cstdint>
#include <cstring>

#define FD_INLINE static inline __attribute__((always_inline))

namespace fd {
namespace FD_ISA {

constexpr int kLanes = 16;
constexpr int kMaxScalarReductions = 4;  // vectors; more of them are reduced together

FD_INLINE float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

}  // namespace FD_ISA
}  // namespace fd

#if defined(FD_ISA_AVX512)
#include "common/vec_avx512.h"
#elif defined(FD_ISA_AVX2)
#include "common/vec_avx2.h"
#else
#include "common/vec_portable.h"
#endif

namespace fd {
namespace FD_ISA {

FD_INLINE FP32Vec16 zero() { return splat(0.0f); }

#if !defined(FD_ISA_AVX512_BF16)
FD_INLINE FP32Vec16 round_to_bf16(FP32Vec16 x) {
  uint16_t lanes[kLanes];
  store_bf16(lanes, x);
  return load_bf16(lanes);
}
#endif
#if !defined(FD_ISA_AVX512)
// Writes pairs[2 * i + parity] = x[i] for sixteen i; parity is 0 or 1. The other elements are not written.
FD_INLINE void store_interleaved(uint16_t* pairs, const uint16_t* x, int parity) {
  for (int i = 0; i < kLanes; ++i) pairs[2 * i + parity] = x[i];
}
#endif

}  // namespace FD_ISA
}  // namespace fd

#include "common/vec_pairs.h"

namespace fd {
namespace FD_ISA {

// Load or store the first n of sixteen lanes; loads fill the others with zeros.
FD_INLINE FP32Vec16 load_first(const float* p, int n) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, 4 * static_cast<size_t>(n));
  return load(lanes);
}
FD_INLINE FP32Vec16 load_first(const uint16_t* p, int n) {
  uint16_t lanes[kLanes] = {};
  std::memcpy(lanes, p, 2 * static_cast<size_t>(n));
  return load_bf16(lanes);
}
FD_INLINE void store_first(float* p, FP32Vec16 x, int n) {
  float lanes[kLanes];
  store(lanes, x);
  std::memcpy(p, lanes, 4 * static_cast<size_t>(n));
}
FD_INLINE void store_first(uint16_t* p, FP32Vec16 x, int n) {
  uint16_t lanes[kLanes];
  store_bf16(lanes, x);
  std::memcpy(p, lanes, 2 * static_cast<size_t>(n));
}
// Load or store whole vectors of either element type; uint16_t holds bf16.
FD_INLINE FP32Vec16 load_as_float(const float* p) { return load(p); }
FD_INLINE FP32Vec16 load_as_float(const uint16_t* p) { return load_bf16(p); }
FD_INLINE void store_rounded(float* p, FP32Vec16 x) { store(p, x); }
FD_INLINE void store_rounded(uint16_t* p, FP32Vec16 x) { store_bf16(p, x); }

// Stores sixteen inputs of a row in the form in which products read them.
FD_INLINE void store_row_units(float* p, FP32Vec16 x) { store(p, x); }
#if defined(FD_ISA_AVX512_BF16)
FD_INLINE void store_row_units(RowPair* p, FP32Vec16 x) { store_bf16(reinterpret_cast<uint16_t*>(p), x); }
#else
FD_INLINE void store_row_units(RowPair* p, FP32Vec16 x) { store(reinterpret_cast<float*>(p), x); }
#endif

#if !defined(FD_ISA_AVX512)
// Sums the lanes in a fixed order, pairwise by halves.
FD_INLINE float reduce_sum(FP32Vec16 x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] + lanes[i + width];
  return lanes[0];
}
// The result is unspecified if a lane is NaN.
FD_INLINE float reduce_max(FP32Vec16 x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = 8; width >= 1; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
#endif

// Returns the sum, or the largest lane, of each of the first `count` vectors as one lane each. The other vectors must
// be zeros.
FD_INLINE FP32Vec16 reduce_sum_each(const FP32Vec16 (&x)[kLanes], int count) {
#if defined(FD_ISA_AVX512)
  if (count > kMaxScalarReductions) return reduce_each(x, [](FP32Vec16 a, FP32Vec16 b) { return add(a, b); });
#endif
  float lanes[kLanes] = {};
  for (int r = 0; r < count; ++r) lanes[r] = reduce_sum(x[r]);
  return load(lanes);
}
FD_INLINE FP32Vec16 reduce_max_each(const FP32Vec16 (&x)[kLanes], int count) {
#if defined(FD_ISA_AVX512)
  if (count > kMaxScalarReductions) return reduce_each(x, [](FP32Vec16 a, FP32Vec16 b) { return max(a, b); });
#endif
  float lanes[kLanes] = {};
  for (int r = 0; r < count; ++r) lanes[r] = reduce_max(x[r]);
  return load(lanes);
}

// Returns e^x with a relative error below 2e-7: exactly 0 below -87.3, e^88.3 above 88.3, NaN for NaN.
FD_INLINE FP32Vec16 exp(FP32Vec16 x) {
  const FP32Vec16 limited = max(splat(-87.3f), min(splat(88.3f), x));  // max and min return the second operand for NaN
  const FP32Vec16 n = round_to_int(mul(limited, splat(1.44269504f)));
  FP32Vec16 r = fma(n, splat(-0.693145752f), limited);
  r = fma(n, splat(-1.42860677e-6f), r);
  FP32Vec16 p = splat(1.98412698e-4f);
  p = fma(p, r, splat(1.38888889e-3f));
  p = fma(p, r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return zero_where_below(x, -87.3f, scale_by_power(p, n));
}

}  // namespace FD_ISA
}  // namespace fd
