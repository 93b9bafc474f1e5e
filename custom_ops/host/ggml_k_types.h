// SPDX-License-Identifier: Apache-2.0
// The K types and IQ4_XS: blocks of 256 values with small integers that multiply an fp16 scale, and perhaps an fp16
// minimum, for each group. ggml_types.h says what a type defines.
#pragma once

#include "host/ggml_types.h"

namespace fd::ggml {

// 256 values with fp16 numbers at these offsets; a negative one stands for none.
template <int kBlockBytes, int kGroupValues, int kScaleAt, int kMinimumAt>
struct Block256 {
  static constexpr int kValues = 256, kBytes = kBlockBytes, kGroup = kGroupValues;
  static constexpr bool kHasMinimum = kMinimumAt >= 0;

  static float scale(const uint8_t* block) { return half_at(block + kScaleAt); }
  static float minimum(const uint8_t* block) { return half_at(block + kMinimumAt); }
  static bool has_bad_scale(const uint8_t* block) {
    return is_bad_half(block + kScaleAt) || (kHasMinimum && is_bad_half(block + kMinimumAt));
  }
};

// Writes the two-bit codes of 64 bytes: those in the lowest bits of 32 bytes, then in the next ones, for each half.
inline void split_pairs_of_bits(const uint8_t* __restrict bytes, int8_t* __restrict codes) {
  for (int part = 0; part < 8; ++part)
    for (int i = 0; i < 32; ++i)
      codes[32 * part + i] = static_cast<int8_t>(bytes[part / 4 * 32 + i] >> part % 4 * 2 & 3);
}

struct Q2_K : Block256<84, 16, 80, 82> {
  static constexpr int kTypeId = 10;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float* minimums) {
    const float scale_unit = scale(block), minimum_unit = minimum(block);
    for (int group = 0; group < 16; ++group) {
      scales[group] = scale_unit * static_cast<float>(block[group] & 15);
      minimums[group] = -(minimum_unit * static_cast<float>(block[group] >> 4));
    }
    split_pairs_of_bits(block + 16, codes);
  }
};

// The third bit of a code is 0 where 4 is subtracted.
struct Q3_K : Block256<110, 16, 108, -1> {
  static constexpr int kTypeId = 11;

  static void decode(const uint8_t* __restrict block, int8_t* __restrict codes, float* scales, float*) {
    const float unit = scale(block);
    for (int group = 0; group < 16; ++group) scales[group] = unit * static_cast<float>(factor(block + 96, group) - 32);
    split_pairs_of_bits(block + 32, codes);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i)
        codes[32 * part + i] = static_cast<int8_t>(codes[32 * part + i] + (block[i] >> part & 1) * 4 - 4);
  }

 private:
  // Six bits: four in the first eight bytes, two in the last four.
  static int factor(const uint8_t* packed, int group) {
    const int low = packed[group % 8] >> group / 8 * 4 & 15;
    return low | (packed[8 + group % 4] >> group / 4 * 2 & 3) << 4;
  }
};

// Q4_K and Q5_K: six bits for the scale and six for the minimum of each of eight groups, in twelve bytes.
template <int kBlockBytes>
struct KBlockWithMinimum : Block256<kBlockBytes, 32, 0, 2> {
  static void decode_factors(const uint8_t* block, float* scales, float* minimums) {
    const uint8_t* packed = block + 4;
    const float scale_unit = half_at(block), minimum_unit = half_at(block + 2);
    for (int group = 0; group < 4; ++group) {
      const int low = packed[group], middle = packed[4 + group], high = packed[8 + group];
      scales[group] = scale_unit * static_cast<float>(low & 63);
      minimums[group] = -(minimum_unit * static_cast<float>(middle & 63));
      scales[4 + group] = scale_unit * static_cast<float>((high & 15) | (low >> 6) << 4);
      minimums[4 + group] = -(minimum_unit * static_cast<float>(high >> 4 | (middle >> 6) << 4));
    }
  }
};

struct Q4_K : KBlockWithMinimum<144> {
  static constexpr int kTypeId = 12;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float* minimums) {
    decode_factors(block, scales, minimums);
    for (int part = 0; part < 4; ++part) split_nibbles<32, 0>(block + 16 + 32 * part, codes + 64 * part);
  }
};

struct Q5_K : KBlockWithMinimum<176> {
  static constexpr int kTypeId = 13;

  static void decode(const uint8_t* __restrict block, int8_t* __restrict codes, float* scales, float* minimums) {
    decode_factors(block, scales, minimums);
    for (int part = 0; part < 4; ++part) split_nibbles<32, 0>(block + 48 + 32 * part, codes + 64 * part);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i)
        codes[32 * part + i] = static_cast<int8_t>(codes[32 * part + i] | (block[16 + i] >> part & 1) << 4);
  }
};

struct Q6_K : Block256<210, 16, 208, -1> {
  static constexpr int kTypeId = 14;

  static void decode(const uint8_t* __restrict block, int8_t* __restrict codes, float* scales, float*) {
    const float unit = scale(block);
    for (int group = 0; group < 16; ++group)
      scales[group] = unit * static_cast<float>(static_cast<int8_t>(block[192 + group]));
    for (int part = 0; part < 2; ++part) split_nibbles<64, 32>(block + 64 * part, codes + 128 * part);
    for (int part = 0; part < 8; ++part)
      for (int i = 0; i < 32; ++i) {
        const int high = block[128 + part / 4 * 32 + i] >> part % 4 * 2 & 3;
        codes[32 * part + i] = static_cast<int8_t>(codes[32 * part + i] + high * 16);
      }
  }
};

struct IQ4_XS : Block256<136, 32, 0, -1> {
  static constexpr int kTypeId = 23;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    const float unit = scale(block);
    const int high = load<uint16_t>(block + 2);
    for (int group = 0; group < 8; ++group) {
      const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
      scales[group] = unit * static_cast<float>((low | (high >> 2 * group & 3) << 4) - 32);
      look_up_nibbles<16>(block + 8 + 16 * group, kNonLinear, codes + 32 * group);
    }
  }
};

}  // namespace fd::ggml
