// SPDX-License-Identifier: Apache-2.0
// Sixteen fp32 lanes and 32 bf16 lanes in vector types of the compiler, for any processor. Included by vec.h only.
#pragma once

namespace fd {
namespace FD_ISA {

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef int32_t I4 __attribute__((vector_size(16)));
struct FP32Vec16 {
  F4 part[4];
};
struct BF16Vec32 {
  U4 part[4];
};

#define FD_EACH(expression)      \
  FP32Vec16 result;              \
  for (int i = 0; i < 4; ++i) {  \
    result.part[i] = expression; \
  }                              \
  return result

FD_INLINE FP32Vec16 splat(float x) { FD_EACH((F4{x, x, x, x})); }
FD_INLINE FP32Vec16 load(const float* p) {
  FP32Vec16 x;
  std::memcpy(&x, p, 64);
  return x;
}
FD_INLINE void store(float* p, FP32Vec16 x) { std::memcpy(p, &x, 64); }
FD_INLINE FP32Vec16 add(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] + b.part[i]); }
FD_INLINE FP32Vec16 sub(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] - b.part[i]); }
FD_INLINE FP32Vec16 mul(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] * b.part[i]); }
FD_INLINE FP32Vec16 div(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] / b.part[i]); }
FD_INLINE FP32Vec16 sqrt(FP32Vec16 a) {
  float lanes[kLanes];
  std::memcpy(lanes, &a, 64);
  for (float& lane : lanes) lane = __builtin_sqrtf(lane);
  std::memcpy(&a, lanes, 64);
  return a;
}
FD_INLINE FP32Vec16 max(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] > b.part[i] ? a.part[i] : b.part[i]); }
FD_INLINE FP32Vec16 min(FP32Vec16 a, FP32Vec16 b) { FD_EACH(a.part[i] < b.part[i] ? a.part[i] : b.part[i]); }
FD_INLINE FP32Vec16 fma(FP32Vec16 a, FP32Vec16 b, FP32Vec16 c) { FD_EACH(a.part[i] * b.part[i] + c.part[i]); }
// Exact for |x| < 2^22: adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
FD_INLINE FP32Vec16 round_to_int(FP32Vec16 x) {
  const F4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  FD_EACH((x.part[i] + magic) - magic);
}
FD_INLINE FP32Vec16 scale_by_power(FP32Vec16 x, FP32Vec16 n) {
  FP32Vec16 result;
  for (int i = 0; i < 4; ++i) {
    const U4 bits = (U4)(__builtin_convertvector(n.part[i], I4) + 127) << 23;
    result.part[i] = x.part[i] * (F4)bits;
  }
  return result;
}
FD_INLINE FP32Vec16 zero_where_below(FP32Vec16 x, float limit, FP32Vec16 value) {
  const F4 bound = {limit, limit, limit, limit};
  const F4 none = {0, 0, 0, 0};
  FD_EACH(x.part[i] < bound ? none : value.part[i]);
}
FD_INLINE FP32Vec16 replace_tail(FP32Vec16 x, int n, float other) {
  const F4 rest = {other, other, other, other};
  FD_EACH((I4{4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3} < n) ? x.part[i] : rest);
}
FD_INLINE FP32Vec16 load_bf16(const uint16_t* p) {
  FP32Vec16 result;
  for (int i = 0; i < 4; ++i) {
    const uint16_t* q = p + 4 * i;
    const U4 bits = {q[0], q[1], q[2], q[3]};
    result.part[i] = (F4)(bits << 16);
  }
  return result;
}
// Converts finite fp16 numbers.
FD_INLINE FP32Vec16 load_half(const uint16_t* p) {
  FP32Vec16 result;
  for (int i = 0; i < 4; ++i) {
    const uint16_t* q = p + 4 * i;
    const U4 bits = {q[0], q[1], q[2], q[3]};
    const F4 magnitude = (F4)((bits & 0x7fff) << 13) * 0x1p112f;
    result.part[i] = (F4)((U4)magnitude | (bits & 0x8000) << 16);
  }
  return result;
}
FD_INLINE void store_bf16(uint16_t* p, FP32Vec16 x) {
  for (int i = 0; i < 4; ++i) {
    const U4 bits = (U4)x.part[i];
    const U4 rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    const U4 narrow = x.part[i] == x.part[i] ? rounded : (bits >> 16) | 0x40;
    for (int j = 0; j < 4; ++j) p[4 * i + j] = static_cast<uint16_t>(narrow[j]);
  }
}
FD_INLINE BF16Vec32 load_pairs(const void* p) {
  BF16Vec32 x;
  std::memcpy(&x, p, 64);
  return x;
}
#undef FD_EACH

}  // namespace FD_ISA
}  // namespace fd
