// SPDX-License-Identifier: Apache-2.0
// Codes of an int8 cache as operands of bfloat16 products, which hold them exactly. `load_matrix_x4` moves pairs of
// bytes, so the order of elements differs from that of bfloat16 rows:
//
// - Keys: a word holds four consecutive elements, of which a product takes the first two as elements 2c and 2c + 1 of a
//   step and the others as 2c + 8 and 2c + 9 (c = lane % 4). `permute` orders the elements of queries in the same way.
// - Values: of the 16 elements in a 16-byte chunk, one product takes the even ones and the next one the odd ones.
#pragma once

#include "gpu_ops/attention_config.h"

namespace fd::gpu {

// Returns the codes in bytes `low` and `high` of a word as bfloat16.
FD_DEVICE uint32_t widen_codes(uint32_t word, int low, int high) {
  const auto widen = [word](int byte) {
    constexpr uint32_t kTwoTo23 = 0x4B000000u;  // of which the mantissa begins with a code plus 128
    const uint32_t code = (word >> 8 * byte & 0xFF) ^ 0x80;
    return bit_cast<float>(kTwoTo23 | code) - 8388736.0f;
  };
  return round_bf16x2(widen(low), widen(high));  // exact
}

// Returns keys for one step of a product.
template <class Product>
FD_DEVICE typename Product::B widen_keys(uint32_t word) {
  return {{widen_codes(word, 0, 1), widen_codes(word, 2, 3)}};
}

// Returns the even or the odd elements of values for one step of a product.
template <class Product>
FD_DEVICE typename Product::B widen_values(const typename Product::B& codes, int is_odd) {
  return {{widen_codes(codes.word[0], is_odd, 2 + is_odd), widen_codes(codes.word[1], is_odd, 2 + is_odd)}};
}

// Stores a 16-byte chunk of a row of queries.
template <class Queries>
FD_DEVICE void permute(Queries& queries, int row, int chunk, const Bytes16& bytes) {
  for (int odd = 0; odd < 2; ++odd) {
    auto* half = reinterpret_cast<uint64_t*>(queries.chunk(row, chunk / 2 * 2 + odd)) + chunk % 2;
    *half = bytes.word[odd] | uint64_t{bytes.word[2 + odd]} << 32;
  }
}

}  // namespace fd::gpu
