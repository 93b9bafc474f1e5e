// SPDX-License-Identifier: Apache-2.0
// Copies blocks of the KV caches to slots of shared memory, or back, and takes their checksums on the way.
//
//   region r   one tensor of a cache, [num_blocks, num_heads, head_bytes]
//   slot       one block of every region, one after the other
//   checksum   of one slot and head: CRC-32C of the head's bytes in all regions that share the checksum, in their order
#include <cstdint>

#include "common/export.h"
#include "host/crc32c.h"

namespace {

constexpr int kSideBySide = 3;  // pieces with different checksums that are copied together

struct Region {
  uint8_t* blocks;
  int64_t head_bytes;
  int64_t num_heads;
  int64_t first_checksum;  // of head 0; the next heads have the next ones

  int64_t block_bytes() const { return num_heads * head_bytes; }
};

// The arguments of a call, in the order of fastdeploy/ops/block_moves.py.
struct Move {
  const Region* regions;
  int64_t num_regions;
  const int64_t* block_ids;
  uint8_t* const* slots;
  uint32_t* checksums;  // [num_blocks, num_checksums]
  int64_t num_blocks;
  int64_t num_checksums;
  int64_t to_slots;  // 1: from blocks to slots, 0: from slots to blocks

  fd::CopyPiece piece(const Region& region, int64_t offset, int64_t index) const {
    const int64_t block = index / region.num_heads, head = index % region.num_heads;
    uint8_t* cached = region.blocks + block_ids[block] * region.block_bytes() + head * region.head_bytes;
    uint8_t* slot = slots[block] + offset + head * region.head_bytes;
    uint32_t* crc = checksums + block * num_checksums + region.first_checksum + head;
    return to_slots != 0 ? fd::CopyPiece{cached, slot, crc} : fd::CopyPiece{slot, cached, crc};
  }

  void move_region(const Region& region, int64_t offset) const {
    const int64_t num_pieces = num_blocks * region.num_heads;
    fd::CopyPiece pieces[kSideBySide];
    int64_t next = 0;
    for (; next + kSideBySide <= num_pieces; next += kSideBySide) {
      for (int p = 0; p < kSideBySide; ++p) pieces[p] = piece(region, offset, next + p);
      fd::copy_with_crc32c<kSideBySide>(pieces, region.head_bytes);
    }
    for (; next < num_pieces; ++next) {
      pieces[0] = piece(region, offset, next);
      fd::copy_with_crc32c<1>(pieces, region.head_bytes);
    }
  }
};

}  // namespace

// Moves num_blocks blocks and writes their checksums.
FD_EXPORT void fd_move_blocks(const Move* move) {
  const int64_t num_checksums = move->num_blocks * move->num_checksums;
  for (int64_t i = 0; i < num_checksums; ++i) move->checksums[i] = ~0u;
  int64_t offset = 0;
  for (int64_t r = 0; r < move->num_regions; ++r) {
    move->move_region(move->regions[r], offset);
    offset += move->regions[r].block_bytes();
  }
  for (int64_t i = 0; i < num_checksums; ++i) move->checksums[i] = ~move->checksums[i];
}
