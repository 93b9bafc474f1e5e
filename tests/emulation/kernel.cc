// SPDX-License-Identifier: Apache-2.0
// A small kernel that uses every operation of device.h, and the ways to break it that the emulator must refuse; at the
// end one that adds two arrays, for tests of streams, and one that counts its blocks, for tests of limits and order.
//
// out[16, 8] = a[16, K] b[8, K]^T in bfloat16, K cut into pieces of kPiece: each block computes one piece, the block
// that arrives last adds the pieces in order. counts[s] are the numbers of negative (0) and other (1) sums of pieces.

#include "common/export.h"
#include "gpu_ops/device.h"

namespace {

using namespace fd::gpu;

constexpr int kRows = 16, kColumns = 8, kStage = 64, kStages = 2, kPiece = kStage * 3, kThreads = 64;
constexpr int kOutputs = kRows * kColumns;

// What is broken.
enum Mutant : int {
  kNothing,
  kNoBarrierAfterWait,
  kNoBarrierBeforeReuse,
  kNoWait,
  kNoCommit,
  kNoMask,
  kOneStageTooMany,
  kWrongStride,
  kMisaligned,
  kSharedTooSmall,
  kBarrierInBranch,
  kTwoWriters,
  kLaneMissingInShuffle,
  kCopyReadTooEarly,
  kOutputOfOtherBlock,
  kNoBarrierBeforeSums,
  kScratchBeforeWritten,
  kReadOnlyOfWritten,
  kReadsCounter,
  kWritesInput,
  kBeyondOutput,
  kEndsBeforeBarrier,
  kLastWaitTooShort,
  kCountsTooFewBlocks,
  kNoLastBlock,
  kMatrixInBranch,
  kBeyondShared,
  kWarpBarrierForBlock,
  kPartialWarp,
  kEmptyGrid,
  kCopyNeverAwaited,
  kWrongBarrier,
  kDivisionByZero,
  kShiftByWidth,
  kFloatOutOfRange,
  kNotANumber,
  kNumMutants
};

struct Shared {
  uint16_t a[kStages][kRows][kStage];
  uint16_t b[kStages][kColumns][kStage];
  float sums[2][kOutputs];
};

// Chunk c of 16 bytes of row r lies at c ^ (r % 8), so that the rows of a matrix lie in different banks.
FD_DEVICE uint16_t* chunk(uint16_t* row, int r, int c) { return row + (c ^ r % 8) * 8; }

template <int kMutant>
FD_DEVICE void fetch(Shared& shared, int slot, const uint16_t* a, const uint16_t* b, int begin, int k) {
  const int stride = kMutant == kWrongStride ? k + 64 : k;
  for (int i = static_cast<int>(thread_index()); i < (kRows + kColumns) * 8; i += kThreads) {
    const int row = i / 8, c = i % 8, column = begin + c * 8;
    const bool is_valid = column < k || kMutant == kNoMask;
    const int shift = kMutant == kMisaligned ? 1 : 0;
    if (row < kRows)
      copy_async16(chunk(shared.a[slot][row], row, c), a + row * stride + column + shift, is_valid);
    else
      copy_async16(chunk(shared.b[slot][row - kRows], row, c), b + (row - kRows) * stride + column, is_valid);
  }
  if (kMutant != kNoCommit) copy_async_commit();
}

template <int kMutant>
FD_DEVICE void multiply(Shared& shared, int slot, float (&sum)[4]) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  for (int step = 0; step < 2; ++step) {
    const int first = warp * 4 + step * 2;  // chunk
    const int row = lane % 16;
    if (kMutant == kMatrixInBranch && lane > 15) continue;
    const Matrices4 a = load_matrix_x4(chunk(shared.a[slot][row], row, first + lane / 16));
    const int column = lane % 8;
    const Matrices4 b = load_matrix_x4(chunk(shared.b[slot][column], column, first + lane / 8 % 2));
    mma_bf16(sum, a.word, {b.word[0], b.word[1]});
  }
}

template <int kMutant>
FD_DEVICE void store_sums(Shared& shared, const float (&sum)[4]) {
  const int lane = static_cast<int>(lane_index()), warp = static_cast<int>(warp_index());
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    const int target = kMutant == kTwoWriters ? 0 : warp;
    shared.sums[target][row * kColumns + column] = sum[i];
  }
  if (kMutant == kBeyondShared) shared.sums[1][kOutputs + lane * 8] = 0.0f;
}

// Counts the signs of a warp's sums with shuffles and one atomic addition per warp.
template <int kMutant>
FD_DEVICE void count_signs(float value, int32_t* counts) {
  const unsigned negative = warp_ballot(value < 0.0f);
  int number = value < 0.0f ? 1 : 0;
  for (unsigned mask = 16; mask > 0; mask /= 2) {
    if (kMutant == kLaneMissingInShuffle && lane_index() == 3) continue;
    number += shuffle_xor(number, mask);
  }
  if (lane_index() != 0) return;
  atomic_add(&counts[0], number);
  atomic_add(&counts[1], static_cast<int32_t>(kWarpSize) - __builtin_popcount(negative));
  if (kMutant == kReadsCounter && counts[0] < 0) counts[1] = 0;
}

// Integer operations whose results on a GPU differ from those of a CPU.
template <int kMutant>
FD_DEVICE int undefined(int zero) {
  if (kMutant == kDivisionByZero) return 7 / zero;
  if (kMutant == kShiftByWidth) return 7 >> (zero + 32);
  if (kMutant == kFloatOutOfRange) return static_cast<int>(2147483648.0f + static_cast<float>(zero));
  if (kMutant == kNotANumber) return static_cast<int>(static_cast<float>(zero) / static_cast<float>(zero));
  return 0;
}

template <int kMutant>
FD_KERNEL void product(In<uint16_t> a, In<uint16_t> b, Scratch<float> pieces, Out<int32_t> arrivals,
                       Out<int32_t> counts, Out<float> out, int k) {
  Shared& shared = shared_memory<Shared>();
  const int piece = static_cast<int>(block_index().x), thread = static_cast<int>(thread_index());
  const int num_pieces = static_cast<int>(grid_size().x);
  const int num_stages = kPiece / kStage + (kMutant == kOneStageTooMany ? 1 : 0);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  sum[0] = static_cast<float>(undefined<kMutant>(num_pieces - static_cast<int>(grid_size().x))) * 0.0f;
  if (kMutant == kScratchBeforeWritten) sum[0] = pieces.data[piece * kOutputs] * 0.0f;
  fetch<kMutant>(shared, 0, a.data, b.data, piece * kPiece, k);
  for (int stage = 0; stage < num_stages; ++stage) {
    if (stage + 1 < num_stages)
      fetch<kMutant>(shared, (stage + 1) % kStages, a.data, b.data, piece * kPiece + (stage + 1) * kStage, k);
    else if (kMutant != kLastWaitTooShort)
      copy_async_commit();  // an empty group, so that the wait below always has the same meaning
    if (kMutant == kCopyReadTooEarly && shared.a[stage % kStages][0][0] == 1) sum[0] += 1.0f;
    if (kMutant != kNoWait) copy_async_wait<1>();
    if (kMutant == kWarpBarrierForBlock)
      sync_warp();
    else if (kMutant != kNoBarrierAfterWait)
      sync_block();
    multiply<kMutant>(shared, stage % kStages, sum);
    if (kMutant == kBarrierInBranch) {
      if (warp_index() == 0) sync_block();
    } else if (kMutant == kWrongBarrier && warp_index() == 0) {
      sync_block();
    } else if (kMutant != kNoBarrierBeforeReuse) {
      sync_block();
    }
  }
  if (kMutant == kCopyNeverAwaited) fetch<kMutant>(shared, 0, a.data, b.data, piece * kPiece, k);
  if (kMutant == kEndsBeforeBarrier && thread == 5) return;
  store_sums<kMutant>(shared, sum);
  if (kMutant != kNoBarrierBeforeSums) sync_block();
  for (int i = thread; i < kOutputs; i += kThreads) {
    const float value = shared.sums[0][i] + shared.sums[1][i];
    const int beyond = kMutant == kBeyondOutput ? num_pieces * kOutputs - 8 : 0;
    pieces.data[piece * kOutputs + i + beyond] = value;
    count_signs<kMutant>(value, counts.data);
  }
  if (kMutant == kWritesInput && thread == 0) const_cast<uint16_t*>(a.data)[0] = 0;
  if (kMutant == kOutputOfOtherBlock && thread == 0 && num_pieces > 1)
    out.data[0] = pieces.data[(piece + 1) % num_pieces * kOutputs];
  const int count = num_pieces - (kMutant == kCountsTooFewBlocks ? 1 : 0);
  if (kMutant != kNoLastBlock && !last_block(arrivals.data, count)) return;
  if (kMutant == kNoLastBlock && piece != 0) return;
  for (int i = thread * 4; i < kOutputs; i += kThreads * 4) {
    Bytes16 total = {{0, 0, 0, 0}};
    for (int p = 0; p < num_pieces; ++p) {
      const float* address = pieces.data + p * kOutputs + i;
      const Bytes16 next = kMutant == kReadOnlyOfWritten ? load16_readonly(address) : load16(address);
      for (int j = 0; j < 4; ++j)
        total.word[j] = bit_cast<uint32_t>(bit_cast<float>(total.word[j]) + bit_cast<float>(next.word[j]));
    }
    store16(out.data + i, total);
  }
}

FD_KERNEL void add(In<float> a, In<float> b, Out<float> out, int n) {
  const int i = static_cast<int>(block_index().x * block_size() + thread_index());
  if (i < n) out.data[i] = a.data[i] + b.data[i];
}

// Counts blocks; the one that arrives last writes its number.
FD_KERNEL void count_blocks(Out<int32_t> arrivals, Out<int32_t> blocks, Out<int32_t> last) {
  const Dim3 block = block_index(), grid = grid_size();
  if (thread_index() == 0) atomic_add(blocks.data, 1);
  if (last_block(arrivals.data, static_cast<int32_t>(grid.x * grid.y * grid.z)) && thread_index() == 0)
    last.data[0] = static_cast<int32_t>((block.z * grid.y + block.y) * grid.x + block.x);
}

// Each block arrives at two counters, one after the other; the last one at each adds what all have written before.
// If `is_broken`, the second number is written after the second arrival.
FD_KERNEL void arrive_twice(Scratch<int32_t> numbers, Out<int32_t> arrivals, Out<int32_t> sums, int is_broken) {
  const int block = static_cast<int>(block_index().x), num_blocks = static_cast<int>(grid_size().x);
  const bool is_first_thread = thread_index() == 0;
  for (int i = 0; i < 2; ++i) {
    int32_t* own = numbers.data + i * num_blocks;
    if (is_first_thread && !(is_broken && i == 1)) own[block] = block + i;
    const bool is_last = last_block(arrivals.data + i, num_blocks);
    if (is_first_thread && is_broken && i == 1) own[block] = block + i;
    if (!is_last || !is_first_thread) continue;
    int32_t sum = 0;
    for (int b = 0; b < num_blocks; ++b) sum += own[b];
    sums.data[i] = sum;
  }
}

// Counts numbers by their remainder in shared memory, and notes which remainders occur. If `broken`: 1, reads before a
// barrier; 2, changes what nothing has written.
FD_KERNEL void count_remainders(In<int32_t> numbers, Out<int32_t> counts, Out<uint32_t> found, int broken) {
  struct Remainders {
    uint64_t counts[8];
    uint32_t found;
  };
  Remainders& shared = shared_memory<Remainders>();
  const unsigned i = thread_index();
  if (i < 8 && broken != 2) shared.counts[i] = 0;
  if (i == 8) shared.found = 0;
  sync_block();
  const unsigned remainder = static_cast<unsigned>(numbers.data[i]) % 8;
  atomic_add(&shared.counts[remainder], uint64_t{1});
  atomic_or(&shared.found, 1u << remainder);
  if (broken != 1) sync_block();
  if (i < 8) counts.data[i] = static_cast<int32_t>(shared.counts[i]);
  if (i == 8) found.data[0] = shared.found;
}

template <int kMutant>
int run(const uint16_t* a, const uint16_t* b, float* pieces, int32_t* arrivals, int32_t* counts, float* out, int k) {
  const unsigned num_pieces = static_cast<unsigned>((k + kPiece - 1) / kPiece);
  const unsigned threads = kMutant == kPartialWarp ? kThreads - 8 : kThreads;
  const size_t bytes = sizeof(Shared) - (kMutant == kSharedTooSmall ? 4 : 0);
  return launch(product<kMutant>, {kMutant == kEmptyGrid ? 0 : num_pieces, 1, 1}, threads, bytes, nullptr,
                In<uint16_t>(a, size_t(kRows * k)), In<uint16_t>(b, size_t(kColumns * k)),
                Scratch<float>(pieces, num_pieces * kOutputs), Out<int32_t>(arrivals, 1), Out<int32_t>(counts, 2),
                Out<float>(out, kOutputs), k);
}

using Run = int (*)(const uint16_t*, const uint16_t*, float*, int32_t*, int32_t*, float*, int);

template <int kMutant>
Run find(int mutant) {
  if constexpr (kMutant == kNumMutants)
    return nullptr;
  else
    return mutant == kMutant ? &run<kMutant> : find<kMutant + 1>(mutant);
}

}  // namespace

FD_EXPORT int fd_test_num_mutants() { return kNumMutants; }

FD_EXPORT int fd_test_product(int mutant, const uint16_t* a, const uint16_t* b, float* pieces, int32_t* arrivals,
                              int32_t* counts, float* out, int k) {
  return find<0>(mutant)(a, b, pieces, arrivals, counts, out, k);
}

// out[n] = a[n] + b[n] in fp32, in the order of a stream.
FD_EXPORT int fd_test_add(const float* a, const float* b, float* out, int n, void* stream) {
  const size_t size = static_cast<size_t>(n);
  return launch(add, {static_cast<unsigned>(n + 63) / 64, 1, 1}, 64, 0, stream, In<float>(a, size), In<float>(b, size),
                Out<float>(out, size), n);
}

// result: the number of blocks that ran, and the last one.
FD_EXPORT int fd_test_count_blocks(unsigned x, unsigned y, unsigned z, unsigned threads, size_t shared_bytes,
                                   int32_t* arrivals, int32_t* result, void* stream) {
  return launch(count_blocks, {x, y, z}, threads, shared_bytes, stream, Out<int32_t>(arrivals, 1),
                Out<int32_t>(result, 1), Out<int32_t>(result + 1, 1));
}

// numbers: [64]; counts: [8]; found: [1].
FD_EXPORT int fd_test_count_remainders(const int32_t* numbers, int32_t* counts, uint32_t* found, int broken) {
  return launch(count_remainders, {1, 1, 1}, 64, 72, nullptr, In<int32_t>(numbers, 64), Out<int32_t>(counts, 8),
                Out<uint32_t>(found, 1), broken);
}

// numbers: [2, num_blocks]; arrivals, sums: [2].
FD_EXPORT int fd_test_arrive_twice(int32_t* numbers, int32_t* arrivals, int32_t* sums, unsigned num_blocks,
                                   int is_broken) {
  return launch(arrive_twice, {num_blocks, 1, 1}, kWarpSize, 0, nullptr, Scratch<int32_t>(numbers, 2 * num_blocks),
                Out<int32_t>(arrivals, 2), Out<int32_t>(sums, 2), is_broken);
}
