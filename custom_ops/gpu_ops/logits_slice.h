// SPDX-License-Identifier: Apache-2.0
// A row of fp32 logits in slices, each the work of a block. Rows may begin anywhere in memory: slices begin at
// multiples of 32 bytes, so that whole sectors are read, and where they begin differs from row to row. Results must not
// depend on it: they are joined by integer sums, and by the order of ids.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

constexpr int kSliceIds = 8192, kSliceThreads = 256;
constexpr int kSliceChunk = 4;    // ids that are loaded at once
constexpr int kSectorLogits = 8;  // logits of 32 bytes

// Returns into how many slices a row of this vocabulary is cut; the last one may be empty.
inline int64_t num_slices(int64_t vocab_size) {
  const int64_t before = vocab_size % kSectorLogits == 0 ? 0 : kSectorLogits - 1;
  return (vocab_size + before + kSliceIds - 1) / kSliceIds;
}

struct LogitsSlice {
  const float* logits;  // of id `first_id`
  int first_id;         // negative if the first ids belong to the row before
  int vocab_size;       // ids from this one on belong to the row after

  FD_DEVICE bool contains(int id) const { return id >= 0 && id < vocab_size; }
  FD_DEVICE bool contains_all(int place, int count) const {
    return first_id + place >= 0 && first_id + place + count <= vocab_size;
  }

  // Loads the logits of the chunk at a place of the slice; -inf for ids that are not of this row.
  FD_DEVICE void load_chunk(int place, float (&x)[kSliceChunk]) const {
    if (contains_all(place, kSliceChunk)) {
      load_whole_chunk(place, x);
    } else {
      for (int i = 0; i < kSliceChunk; ++i)
        x[i] = contains(first_id + place + i) ? logits[place + i] : -__builtin_inff();
    }
  }

  // Loads kChunks chunks, of which thread t of kThreads has t, t + kThreads, …
  template <int kThreads, int kChunks>
  FD_DEVICE void load(float (&x)[kChunks][kSliceChunk]) const {
    const int place = static_cast<int>(thread_index()) * kSliceChunk;
    if (contains_all(0, kThreads * kChunks * kSliceChunk)) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) load_whole_chunk(place + j * kThreads * kSliceChunk, x[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) load_chunk(place + j * kThreads * kSliceChunk, x[j]);
    }
  }

 private:
  FD_DEVICE void load_whole_chunk(int place, float (&x)[kSliceChunk]) const {
    const Bytes16 bytes = load16_readonly(logits + place);
    for (int i = 0; i < kSliceChunk; ++i) x[i] = bit_cast<float>(bytes.word[i]);
  }
};

// Returns a slice of a row, where `logits` is [rows, vocab_size] at a multiple of 32 bytes.
FD_DEVICE LogitsSlice slice_of(const float* logits, int64_t row, int vocab_size, int slice) {
  const int64_t begin = row * vocab_size, first = begin / kSectorLogits * kSectorLogits + int64_t{slice} * kSliceIds;
  return LogitsSlice{logits + first, static_cast<int>(first - begin), vocab_size};
}

}  // namespace fd::gpu
