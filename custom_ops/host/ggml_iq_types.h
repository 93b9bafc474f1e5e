// SPDX-License-Identifier: Apache-2.0
// The IQ types whose values are rows of a grid: blocks of 256 values. ggml_types.h says what a type defines. Codes are
// the integers of the grids with their signs, so that scales contain the fractions of the definition. An index into a
// grid has as many bits as the grid has rows, whatever the bytes of a file.
#pragma once

#include <array>

#include "host/ggml_grids.h"
#include "host/ggml_k_types.h"

namespace fd::ggml {

template <int kRows, int kRowValues>
using Grid = std::array<std::array<int8_t, kRowValues>, kRows>;

constexpr int digit_of(char c) { return c <= '9' ? c - '0' : c - 'a' + 10; }

// Reads the rows of ggml_grids.h.
template <int kRowValues, int kSize, int kNumValues>
constexpr auto read_grid(const char (&digits)[kSize], const int8_t (&values)[kNumValues]) {
  constexpr int kDigits = kRowValues == 8 ? 4 : 3, kBits = kRowValues == 8 ? 2 : 3;
  Grid<(kSize - 1) / kDigits, kRowValues> grid{};
  for (int row = 0; row < (kSize - 1) / kDigits; ++row) {
    int packed = 0;
    for (int i = 0; i < kDigits; ++i) packed = packed << 4 | digit_of(digits[row * kDigits + i]);
    for (int i = 0; i < kRowValues; ++i) grid[row][i] = values[packed >> kBits * i & ((1 << kBits) - 1)];
  }
  return grid;
}

constexpr int8_t kMagnitudes2[] = {8, 25, 43}, kMagnitudes3Xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kMagnitudes3S[] = {1, 3, 5, 7, 9, 11, 13, 15}, kEightTernaries[] = {-8, 0, 8};
constexpr Grid<256, 8> kGrid2Xxs = read_grid<8>(kGrid2XxsDigits, kMagnitudes2);
constexpr Grid<512, 8> kGrid2Xs = read_grid<8>(kGrid2XsDigits, kMagnitudes2);
constexpr Grid<1024, 8> kGrid2S = read_grid<8>(kGrid2SDigits, kMagnitudes2);
constexpr Grid<256, 4> kGrid3Xxs = read_grid<4>(kGrid3XxsDigits, kMagnitudes3Xxs);
constexpr Grid<512, 4> kGrid3S = read_grid<4>(kGrid3SDigits, kMagnitudes3S);
constexpr Grid<2048, 8> kEightGrid1 = read_grid<8>(kGrid1Digits, kEightTernaries);  // times 8, for the eighths added

// Writes eight magnitudes from 1 on, negated where a bit of `signs` is set.
inline void write_signed(uint64_t magnitudes, uint32_t signs, int8_t* codes) {
  const uint64_t negated = bytes_of_bits(signs);
  const uint64_t bytes = (magnitudes ^ negated * 255) + negated;  // no sum leaves its byte
  std::memcpy(codes, &bytes, 8);
}

template <size_t kRows>
inline uint64_t eight_magnitudes(const std::array<std::array<int8_t, 8>, kRows>& grid, uint32_t row) {
  uint64_t bytes;
  std::memcpy(&bytes, grid[row].data(), 8);
  return bytes;
}

template <size_t kRows>
inline uint64_t eight_magnitudes(const std::array<std::array<int8_t, 4>, kRows>& grid, uint32_t first,
                                 uint32_t second) {
  uint64_t bytes;
  std::memcpy(&bytes, grid[first].data(), 4);
  std::memcpy(reinterpret_cast<uint8_t*>(&bytes) + 4, grid[second].data(), 4);
  return bytes;
}

// Returns eight signs of which seven are stored: the number of negative ones is even.
inline uint32_t eight_signs(uint32_t seven) { return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7; }

inline int nibble(const uint8_t* bytes, int index) { return bytes[index / 2] >> index % 2 * 4 & 15; }

struct IQ2_XXS : Block256<66, 32, 0, -1> {
  static constexpr int kTypeId = 16;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 8; ++group) {
      const uint8_t* indexes = block + 2 + 8 * group;
      const uint32_t packed = load<uint32_t>(indexes + 4);
      scales[group] = scale(block) * (0.5f + static_cast<float>(packed >> 28)) * 0.25f;
      for (int i = 0; i < 4; ++i)
        write_signed(eight_magnitudes(kGrid2Xxs, indexes[i]), eight_signs(packed >> 7 * i & 127u),
                     codes + 32 * group + 8 * i);
    }
  }
};

struct IQ2_XS : Block256<74, 16, 0, -1> {
  static constexpr int kTypeId = 17;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 16; ++group)
      scales[group] = scale(block) * (0.5f + static_cast<float>(nibble(block + 66, group))) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const uint32_t packed = load<uint16_t>(block + 2 + 2 * i);
      write_signed(eight_magnitudes(kGrid2Xs, packed & 511u), eight_signs(packed >> 9), codes + 8 * i);
    }
  }
};

struct IQ2_S : Block256<82, 16, 0, -1> {
  static constexpr int kTypeId = 22;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 16; ++group)
      scales[group] = scale(block) * (0.5f + static_cast<float>(nibble(block + 74, group))) * 0.25f;
    for (int i = 0; i < 32; ++i) {
      const int index = block[2 + i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8;
      write_signed(eight_magnitudes(kGrid2S, index), block[34 + i], codes + 8 * i);
    }
  }
};

struct IQ3_XXS : Block256<98, 32, 0, -1> {
  static constexpr int kTypeId = 18;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 8; ++group) {
      const uint32_t packed = load<uint32_t>(block + 66 + 4 * group);
      scales[group] = scale(block) * (0.5f + static_cast<float>(packed >> 28)) * 0.5f;
      for (int i = 0; i < 4; ++i) {
        const uint8_t* indexes = block + 2 + 8 * group + 2 * i;
        write_signed(eight_magnitudes(kGrid3Xxs, indexes[0], indexes[1]), eight_signs(packed >> 7 * i & 127u),
                     codes + 32 * group + 8 * i);
      }
    }
  }
};

struct IQ3_S : Block256<110, 32, 0, -1> {
  static constexpr int kTypeId = 21;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 8; ++group)
      scales[group] = scale(block) * static_cast<float>(1 + 2 * nibble(block + 106, group));
    for (int i = 0; i < 32; ++i)
      write_signed(eight_magnitudes(kGrid3S, index(block, 2 * i), index(block, 2 * i + 1)), block[74 + i],
                   codes + 8 * i);
  }

 private:
  static uint32_t index(const uint8_t* block, int i) { return block[2 + i] | (block[66 + i / 8] >> i % 8 & 1u) << 8; }
};

// Writes a row of the ternary grid plus or minus an eighth, times 8.
inline void write_ternaries(int index, bool is_below, int8_t* codes) {
  for (int i = 0; i < 8; ++i) codes[i] = static_cast<int8_t>(kEightGrid1[index][i] + (is_below ? -1 : 1));
}

struct IQ1_S : Block256<50, 32, 0, -1> {
  static constexpr int kTypeId = 19;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    for (int group = 0; group < 8; ++group) {
      const int packed = load<uint16_t>(block + 34 + 2 * group);
      scales[group] = scale(block) * static_cast<float>(2 * (packed >> 12 & 7) + 1) * 0.125f;
      for (int i = 0; i < 4; ++i) {
        const int index = block[2 + 4 * group + i] | (packed >> 3 * i & 7) << 8;
        write_ternaries(index, (packed & 0x8000) != 0, codes + 32 * group + 8 * i);
      }
    }
  }
};

// The fp16 scale is in the highest four bits of each of the last four words.
struct IQ1_M {
  static constexpr int kTypeId = 29;
  static constexpr int kValues = 256, kBytes = 56, kGroup = 16;
  static constexpr bool kHasMinimum = false;

  static void decode(const uint8_t* block, int8_t* codes, float* scales, float*) {
    const float unit = float_of_half(scale_bits(block));
    for (int group = 0; group < 16; ++group)
      scales[group] = unit * static_cast<float>(2 * (word(block, group / 4) >> group % 4 * 3 & 7) + 1) * 0.125f;
    for (int i = 0; i < 32; ++i) {
      const int packed = nibble(block + 32, i);
      write_ternaries(block[i] | (packed & 7) << 8, (packed & 8) != 0, codes + 8 * i);
    }
  }
  static bool has_bad_scale(const uint8_t* block) {
    return (scale_bits(block) & kHalfInfinityBits) == kHalfInfinityBits;
  }

 private:
  static int word(const uint8_t* block, int index) { return load<uint16_t>(block + 48 + 2 * index); }
  static uint16_t scale_bits(const uint8_t* block) {
    int bits = 0;
    for (int i = 0; i < 4; ++i) bits |= word(block, i) >> 12 << 4 * i;
    return static_cast<uint16_t>(bits);
  }
};

}  // namespace fd::ggml
