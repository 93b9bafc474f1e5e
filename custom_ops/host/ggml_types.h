// SPDX-License-Identifier: Apache-2.0
// Types of GGUF tensors whose blocks have 32 values, or 64, and ternary ones. What all types define:
//
//   kTypeId           its number in files
//   kValues, kBytes   values and bytes of a block
//   kGroup            consecutive values that share a scale
//   kHasMinimum       whether a value is code * scale + minimum instead of code * scale; codes are then 0 and above
//   decode            writes the codes of a block, in order, and the scales and minimums of its groups: where the file
//                     stores factors, their product in fp32
//   has_bad_scale     whether a value of the block can be NaN or infinite
#pragma once

#include "host/ggml_numbers.h"

namespace fd::ggml {

// The values of IQ4_NL and IQ4_XS, and twice those of E2M1, by their four-bit codes.
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kTwiceE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline bool is_bad_half(const uint8_t* from) { return (load<uint16_t>(from) & kHalfInfinityBits) == kHalfInfinityBits; }

// Writes the low halves of kCount bytes as codes and then the high ones, with kOffset subtracted.
template <int kCount, int kOffset>
inline void split_nibbles(const uint8_t* __restrict bytes, int8_t* __restrict codes) {
  for (int i = 0; i < kCount; ++i) {
    codes[i] = static_cast<int8_t>((bytes[i] & 15) - kOffset);
    codes[kCount + i] = static_cast<int8_t>((bytes[i] >> 4) - kOffset);
  }
}

// Writes the values that a table has for the low halves of kCount bytes, and then for the high ones.
template <int kCount>
inline void look_up_nibbles(const uint8_t* __restrict bytes, const int8_t* __restrict table, int8_t* __restrict codes) {
  for (int i = 0; i < kCount; ++i) {
    codes[i] = table[bytes[i] & 15];
    codes[kCount + i] = table[bytes[i] >> 4];
  }
}

// Sets the bits of `mask` in those of 32 codes whose bit is set.
inline void set_bits(uint32_t which, uint64_t mask, int8_t* codes) {
  for (int i = 0; i < 4; ++i) {
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= bytes_of_bits(which >> 8 * i) * mask;
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// 32 codes with an fp16 scale in front, and an fp16 minimum behind it if there is one.
template <int kBlockBytes, bool kWithMinimum>
struct Block32 {
  static constexpr int kValues = 32, kBytes = kBlockBytes, kGroup = 32;
  static constexpr bool kHasMinimum = kWithMinimum;

  static bool has_bad_scale(const uint8_t* block) {
    return is_bad_half(block) || (kWithMinimum && is_bad_half(block + 2));
  }
};

struct Q4_0 : Block32<18, false> {
  static constexpr int kTypeId = 2;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    scales[0] = half_at(block);
    split_nibbles<16, 8>(block + 2, codes);
  }
};

struct Q4_1 : Block32<20, true> {
  static constexpr int kTypeId = 3;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float* minimums) {
    scales[0] = half_at(block);
    minimums[0] = half_at(block + 2);
    split_nibbles<16, 0>(block + 4, codes);
  }
};

struct Q5_0 : Block32<22, false> {
  static constexpr int kTypeId = 6;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    scales[0] = half_at(block);
    split_nibbles<16, 0>(block + 6, codes);
    set_bits(~load<uint32_t>(block + 2), 0xf0, codes);  // without the fifth bit, a code is its low bits minus 16
  }
};

struct Q5_1 : Block32<24, true> {
  static constexpr int kTypeId = 7;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float* minimums) {
    scales[0] = half_at(block);
    minimums[0] = half_at(block + 2);
    split_nibbles<16, 0>(block + 8, codes);
    set_bits(load<uint32_t>(block + 4), 0x10, codes);
  }
};

struct Q8_0 : Block32<34, false> {
  static constexpr int kTypeId = 8;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    scales[0] = half_at(block);
    std::memcpy(codes, block + 2, 32);
  }
};

struct IQ4_NL : Block32<18, false> {
  static constexpr int kTypeId = 20;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    scales[0] = half_at(block);
    look_up_nibbles<16>(block + 2, kNonLinear, codes);
  }
};

// The scale is a power of two in eight bits, E8M0; it is halved, because the codes are doubled.
struct MXFP4 {
  static constexpr int kTypeId = 39;
  static constexpr int kValues = 32, kBytes = 17, kGroup = 32;
  static constexpr bool kHasMinimum = false;
  static constexpr uint8_t kLargestExponent = 252;  // 12 * 2^(252 - 128) is the largest value that fp32 holds

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    const uint32_t exponent = block[0];
    scales[0] = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    look_up_nibbles<16>(block + 1, kTwiceE2M1, codes);
  }
  static bool has_bad_scale(const uint8_t* block) { return block[0] > kLargestExponent; }
};

// Four scales in eight bits, E4M3, each for 16 values; they are halved, because the codes are doubled.
struct NVFP4 {
  static constexpr int kTypeId = 40;
  static constexpr int kValues = 64, kBytes = 36, kGroup = 16;
  static constexpr bool kHasMinimum = false;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 4; ++group) {
      scales[group] = 0.5f * value_of_scale(block[group]);
      look_up_nibbles<8>(block + 4 + 8 * group, kTwiceE2M1, codes + 16 * group);
    }
  }
  static bool has_bad_scale(const uint8_t*) { return false; }

 private:
  // The sign is ignored; the NaN without one counts as 0, as it does for ggml.
  static float value_of_scale(uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (bits == 0x7f) return 0.0f;
    if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-9f;
    return float_of(static_cast<uint32_t>(exponent + 120) << 23 | static_cast<uint32_t>(mantissa) << 20);
  }
};

// 256 ternary codes with one fp16 scale behind them.
template <int kBlockBytes>
struct TernaryBlock {
  static constexpr int kValues = 256, kBytes = kBlockBytes, kGroup = 256;
  static constexpr bool kHasMinimum = false;

  static bool has_bad_scale(const uint8_t* block) { return is_bad_half(block + kBlockBytes - 2); }
};

// A byte holds five digits in base 3 as a fraction of 256: the next digit is the integer part of three times it.
struct TQ1_0 : TernaryBlock<54> {
  static constexpr int kTypeId = 34;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    scales[0] = half_at(block + 52);
    write_digits<32, 5>(block, codes);
    write_digits<16, 5>(block + 32, codes + 160);
    write_digits<4, 4>(block + 48, codes + 240);
  }

 private:
  template <int kCount, int kDigits>
  static void write_digits(const uint8_t* __restrict bytes, int8_t* __restrict codes) {
    int power = 1;
    for (int digit = 0; digit < kDigits; ++digit, power *= 3)
      for (int i = 0; i < kCount; ++i) {
        const auto fraction = static_cast<uint8_t>(bytes[i] * power);
        codes[digit * kCount + i] = static_cast<int8_t>((fraction * 3 >> 8) - 1);
      }
  }
};

struct TQ2_0 : TernaryBlock<66> {
  static constexpr int kTypeId = 35;

  static void decode(const uint8_t* __restrict block, int8_t* __restrict codes, float* scales, float*) {
    scales[0] = half_at(block + 64);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i)
        codes[32 * part + i] = static_cast<int8_t>((block[part / 4 * 32 + i] >> part % 4 * 2 & 3) - 1);
  }
};

}  // namespace fd::ggml
