// SPDX-License-Identifier: Apache-2.0
// Writes scales and codes of quantized weights as linear_quant.cc reads them.
#pragma once

#include "cpu_ops/interleave.h"
#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {
namespace {

FD_INLINE float magnitude(float x) { return x < 0 ? -x : x; }

// Returns the bits of an fp16 number.
FD_INLINE uint16_t half_bits(float x) {
  const float scaled = magnitude(x) * 0x1p-112f;  // its exponent is that of fp16
  return static_cast<uint16_t>(ScalarLanes::bits(scaled) >> 13 | (x < 0 ? 0x8000u : 0u));
}

// Joins the codes of eight k to a word, in place: bits 8 * i and 8 * i + 4 begin those of k = i and 4 + i.
void join_nibbles(uint8_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; i += 8) {
    uint32_t low, high;
    std::memcpy(&low, codes + i, 4);
    std::memcpy(&high, codes + i + 4, 4);
    low |= high << 4;
    std::memcpy(codes + i / 2, &low, 4);
  }
}

// Writes the words of sixteen outputs [16][padded_k] as blocks of 64 bytes.
void write_blocks(const uint8_t* codes, int64_t num_words, int64_t padded_k, uint8_t* blocks) {
  const auto word = [=](int64_t lane, int64_t index) {
    uint32_t bits;
    std::memcpy(&bits, codes + lane * padded_k + 4 * index, 4);
    return bits;
  };
#if defined(FD_ISA_AVX512)
  const auto load = [=](int64_t lane, int64_t index) {
    return _mm512_loadu_si512(codes + lane * padded_k + 4 * index);
  };
#else
  const auto load = nullptr;
#endif
  interleave(kPanel, num_words, reinterpret_cast<uint32_t*>(blocks), load, word);
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
