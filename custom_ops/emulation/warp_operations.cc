// SPDX-License-Identifier: Apache-2.0
// Operations in which all lanes of a warp take part; the last lane that arrives carries them out for all.

#include <cstring>
#include <set>

#include "emulation/block.h"

namespace fd::gpu::emulation {
namespace {

float bfloat16_at(const uint32_t* words, unsigned index) {
  const uint32_t bits = (words[index / 2] >> (16 * (index % 2)) & 0xFFFFu) << 16;
  return __builtin_bit_cast(float, bits);
}

template <class Byte>
int32_t byte_at(const uint32_t* words, unsigned index) {
  return static_cast<Byte>(words[index / 4] >> (8 * (index % 4)));
}

// How the fragments of a product lie in a warp, for elements of which `kPerWord` share a register.
//
// A has 16 rows and 8 kPerWord columns: lane 4 g + t has of row g (registers 0, 2) and g + 8 (1, 3) the columns from
// kPerWord t (0, 1) and kPerWord (t + 4) (2, 3). B is the same with 8 columns in place of rows. C has rows g, g + 8
// and columns 2 t, 2 t + 1. (PTX ISA, "Matrix fragments for mma.m16n8k16 and m16n8k32".)
template <unsigned kPerWord, class Sum, class Element>
void multiply(Thread* lanes, Element element) {
  constexpr unsigned kDepth = 8 * kPerWord;
  for (unsigned row = 0; row < 16; ++row)
    for (unsigned column = 0; column < 8; ++column) {
      Thread& owner = lanes[row % 8 * 4 + column / 2];
      const unsigned slot = row / 8 * 2 + column % 2;
      Sum sum = __builtin_bit_cast(Sum, owner.in[6 + slot]);
      for (unsigned k = 0; k < kDepth; ++k) {
        const unsigned half = k / (4 * kPerWord), lane = k / kPerWord % 4, part = k % kPerWord;
        const uint32_t* a = &lanes[row % 8 * 4 + lane].in[row / 8 + 2 * half];
        const uint32_t* b = &lanes[column * 4 + lane].in[4 + half];
        sum = element(a, b, part, sum);
      }
      owner.out[slot] = __builtin_bit_cast(uint32_t, sum);
    }
}

void multiply_bf16(Thread* lanes) {
  multiply<2, float>(lanes, [](const uint32_t* a, const uint32_t* b, unsigned part, float sum) {
    return __builtin_fmaf(bfloat16_at(a, part), bfloat16_at(b, part), sum);
  });
}

template <class ByteOfA>
void multiply_bytes(Thread* lanes) {
  multiply<4, int32_t>(lanes, [](const uint32_t* a, const uint32_t* b, unsigned part, int32_t sum) {
    return sum + byte_at<ByteOfA>(a, part) * byte_at<int8_t>(b, part);
  });
}

// Returns how often shared memory is read for eight rows of 16 bytes: rows at the same place of 128 bytes wait for each
// other, unless they are the same row.
unsigned wavefronts(const uintptr_t (&rows)[8]) {
  std::set<uintptr_t> places[8];
  unsigned most = 1;
  for (const uintptr_t row : rows) {
    auto& place = places[row / 16 % 8];
    place.insert(row);
    most = std::max(most, static_cast<unsigned>(place.size()));
  }
  return most;
}

template <bool kTransposed>
void load_matrices(Thread* lanes) {
  Counters& counts = counters();
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uintptr_t rows[8];
    for (unsigned row = 0; row < 8; ++row) std::memcpy(&rows[row], lanes[matrix * 8 + row].in, sizeof(uintptr_t));
    counts.matrix_wavefronts += wavefronts(rows);
    ++counts.least_matrix_wavefronts;
    const auto element = [&](unsigned row, unsigned column) {
      uint16_t bits;
      std::memcpy(&bits, reinterpret_cast<const uint16_t*>(rows[row]) + column, sizeof(bits));
      return uint32_t{bits};
    };
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      const unsigned i = lane / 4, j = lane % 4 * 2;
      const uint32_t first = kTransposed ? element(j, i) : element(i, j);
      const uint32_t second = kTransposed ? element(j + 1, i) : element(i, j + 1);
      lanes[lane].out[matrix] = first | second << 16;
    }
  }
}

template <class Sum>
void run_mma(WarpOperation operation, Sum (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at) {
  static_assert(sizeof(Sum) == 4);
  Machine& self = machine();
  uint32_t* in = self.thread().in;
  std::memcpy(in, a, 16);
  std::memcpy(in + 4, b, 8);
  std::memcpy(in + 6, c, 16);
  if (self.thread_index() % kWarpSize == 0) ++self.counters.mma;
  std::memcpy(c, self.warp_operation(operation, at).out, 16);
}

}  // namespace

uint32_t shuffle_xor(uint32_t value, unsigned mask, Location at) {
  Machine& self = machine();
  self.thread().in[0] = value;
  self.thread().in[1] = mask;
  return self
      .warp_operation(
          [](Thread* lanes) {
            for (unsigned i = 0; i < kWarpSize; ++i) lanes[i].out[0] = lanes[(i ^ lanes[i].in[1]) % kWarpSize].in[0];
          },
          at)
      .out[0];
}

uint32_t shuffle(uint32_t value, unsigned lane, Location at) {
  Machine& self = machine();
  self.thread().in[0] = value;
  self.thread().in[1] = lane;
  return self
      .warp_operation(
          [](Thread* lanes) {
            for (unsigned i = 0; i < kWarpSize; ++i) lanes[i].out[0] = lanes[lanes[i].in[1] % kWarpSize].in[0];
          },
          at)
      .out[0];
}

unsigned warp_ballot(bool predicate, Location at) {
  Machine& self = machine();
  self.thread().in[0] = predicate;
  return self
      .warp_operation(
          [](Thread* lanes) {
            unsigned bits = 0;
            for (unsigned i = 0; i < kWarpSize; ++i) bits |= lanes[i].in[0] << i;
            for (unsigned i = 0; i < kWarpSize; ++i) lanes[i].out[0] = bits;
          },
          at)
      .out[0];
}

Matrices4 load_matrix_x4(const void* row, bool is_transposed, Location at) {
  Machine& self = machine();
  const uintptr_t address = reinterpret_cast<uintptr_t>(row);
  if (self.has_checks) self.check(address, 16, false, false, nullptr, &at);
  std::memcpy(self.thread().in, &address, sizeof(address));
  const Thread& done = self.warp_operation(is_transposed ? &load_matrices<true> : &load_matrices<false>, at);
  return {{done.out[0], done.out[1], done.out[2], done.out[3]}};
}

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at) {
  run_mma(&multiply_bf16, c, a, b, at);
}

void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at) {
  run_mma(&multiply_bytes<int8_t>, c, a, b, at);
}

void mma_u8_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Location at) {
  run_mma(&multiply_bytes<uint8_t>, c, a, b, at);
}

}  // namespace fd::gpu::emulation
