// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli, RFC 3720 appendix B.4), taken while bytes are copied.
//
// The instruction has a latency of three cycles and a throughput of one, so three independent streams are copied side
// by side. Processors without the instruction use one table lookup per byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define FD_CRC_TARGET __attribute__((target("sse4.2")))
#else
#include <array>
#define FD_CRC_TARGET
#endif

namespace fd {

constexpr int kCacheLine = 64;  // bytes

// One piece of a copy: `crc` is that of all bytes before, inverted as the algorithm keeps it between pieces.
struct CopyPiece {
  const uint8_t* source = nullptr;
  uint8_t* target = nullptr;
  uint32_t* crc = nullptr;
};

#if defined(__x86_64__)
FD_CRC_TARGET inline uint32_t crc32c_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
FD_CRC_TARGET inline uint32_t crc32c_byte(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#else
inline uint32_t crc32c_byte(uint32_t crc, uint8_t byte) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> entries{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t entry = i;
      for (int bit = 0; bit < 8; ++bit) entry = (entry >> 1) ^ ((entry & 1) != 0 ? 0x82F63B78u : 0u);
      entries[i] = entry;
    }
    return entries;
  }();
  return (crc >> 8) ^ table[(crc ^ byte) & 0xFF];
}
inline uint32_t crc32c_word(uint32_t crc, uint64_t word) {
  uint8_t bytes[8];
  std::memcpy(bytes, &word, 8);
  for (uint8_t byte : bytes) crc = crc32c_byte(crc, byte);
  return crc;
}
#endif

inline uint64_t load_word(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, 8);
  return word;
}

// Copies kPieces pieces of num_bytes bytes each and advances their checksums. These are of the bytes that arrived, so
// that a source which changes during the copy does not pass.
template <int kPieces>
FD_CRC_TARGET inline void copy_with_crc32c(const CopyPiece* pieces, int64_t num_bytes) {
  uint32_t crc[kPieces];
  for (int p = 0; p < kPieces; ++p) crc[p] = *pieces[p].crc;
  for (int64_t begin = 0; begin < num_bytes; begin += kCacheLine) {
    const int64_t size = std::min<int64_t>(kCacheLine, num_bytes - begin);
    for (int p = 0; p < kPieces; ++p) {
      uint8_t* target = pieces[p].target + begin;
      if (size == kCacheLine) {
        std::memcpy(target, pieces[p].source + begin, kCacheLine);
        for (int i = 0; i < kCacheLine; i += 8) crc[p] = crc32c_word(crc[p], load_word(target + i));
      } else {
        std::memcpy(target, pieces[p].source + begin, size);
        for (int64_t i = 0; i < size; ++i) crc[p] = crc32c_byte(crc[p], target[i]);
      }
    }
  }
  for (int p = 0; p < kPieces; ++p) *pieces[p].crc = crc[p];
}

}  // namespace fd
