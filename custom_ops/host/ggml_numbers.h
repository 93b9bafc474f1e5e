// SPDX-License-Identifier: Apache-2.0
// Reads and rounds the numbers of GGUF files, NaN and infinity included. Files are little-endian, as all processors are
// for which the package is built.
#pragma once

#include <cstdint>
#include <cstring>

namespace fd::ggml {

constexpr uint32_t kSignBit = 0x80000000u, kInfinityBits = 0x7f800000u;
constexpr int32_t kHalfInfinityBits = 0x7c00, kSmallestNormalHalf = 0x0400;

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Reads a number that need not be aligned.
template <class Number>
inline Number load(const uint8_t* from) {
  Number number;
  std::memcpy(&number, from, sizeof(Number));
  return number;
}

// Returns the value of fp16 bits, exactly. There is no branch and no subnormal fp32 number, which costs a hundred times
// as much as others; comparisons are of signed integers: the compiler vectorizes it.
inline float float_of_half(uint16_t half) {
  constexpr int32_t kExponentShift = 112 << 23;  // between the exponents of fp16 and fp32
  const int32_t magnitude = half & 0x7fff;
  const int32_t normal = (magnitude << 13) + kExponentShift + (magnitude >= kHalfInfinityBits ? kExponentShift : 0);
  const auto subnormal = static_cast<int32_t>(bits_of(float_of(bits_of(0.5f) + magnitude) - 0.5f));  // times 2^-24
  const int32_t is_subnormal = -static_cast<int32_t>(magnitude < kSmallestNormalHalf);
  const int32_t unsigned_bits = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return float_of(static_cast<uint32_t>(unsigned_bits | (half & 0x8000) << 16));
}

inline float half_at(const uint8_t* from) { return float_of_half(load<uint16_t>(from)); }

// Returns the bits of the nearest fp16 number, ties to even: infinity from 65520 on, and NaN for NaN.
inline uint16_t half_of_float(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & ~kSignBit;
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  if (magnitude > kInfinityBits) return sign | 0x7e00;
  if (magnitude < 0x38800000u) {  // 2^-14, below which fp16 holds the multiples of 2^-24, as fp32 does from 0.5 to 1
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  const auto rounded = static_cast<int32_t>((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
  return static_cast<uint16_t>(sign | (rounded < kHalfInfinityBits ? rounded : kHalfInfinityBits));
}

// Returns the bits of the smallest fp16 number that is not below a number from 0 on.
inline uint16_t half_not_below(float x) {
  const uint16_t nearest = half_of_float(x);
  return static_cast<uint16_t>(nearest + (float_of_half(nearest) < x ? 1 : 0));
}

inline float float_of_bfloat16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

// Returns the bits of the nearest bf16 number, ties to even; NaN stays NaN.
inline uint16_t bfloat16_of_float(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits & ~kSignBit) > kInfinityBits ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  return static_cast<uint16_t>(rounded >> 16);
}

// Returns the bits 0..7 as eight bytes that are 0 or 1, the first one in the lowest byte.
inline uint64_t bytes_of_bits(uint32_t bits) {
  constexpr uint64_t kOnes = 0x0101010101010101u, kOneBitEach = 0x8040201008040201u;
  const uint64_t apart = (bits & 255u) * kOnes & kOneBitEach;
  return (apart + 127 * kOnes) >> 7 & kOnes;
}

}  // namespace fd::ggml
