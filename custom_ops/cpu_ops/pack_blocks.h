// SPDX-License-Identifier: Apache-2.0
// Writes codes of quantized weights as the blocks that linear_quant.cc reads.
#pragma once

#include "cpu_ops/interleave.h"
#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {
namespace {

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
