// SPDX-License-Identifier: Apache-2.0
// Log-probabilities of chosen ids and of the most probable ones, in three launches that read the logits twice.
//
// The first has a block for each slice of a row, which finds its largest logit, counts the ids before the chosen one,
// and writes the order keys of its `num_kept` best ids in order. The second has the same blocks, which sum the masses
// of their ids relative to the row's largest logit; masses are integers. In the third, the place of a key in its row is
// the number of keys before it, which is searched for in each slice.

#include "common/export.h"
#include "common/sampling.h"
#include "gpu_ops/count.h"
#include "gpu_ops/slice_keys.h"

namespace {

using namespace fd::gpu;

constexpr int kMaxWarps = kSortThreads / static_cast<int>(kWarpSize);
constexpr int kStagedKeys = 4096;         // keys of a row that the last launch copies to shared memory
constexpr float kNegligible = 29.0f;      // ids whose logits are this far below the largest have no mass
constexpr unsigned kMaxGridRows = 65535;  // the limit of the second dimension of a grid
constexpr float kInfinity = __builtin_inff();

// What the launches have in common: `first_row` is the row of the first block, and `max_rows` the number of rows, which
// the device may know to be smaller.
struct Sizes {
  int first_row, max_rows, vocab_size, num_slices, num_kept;
};

// Returns where the results of a slice are.
FD_DEVICE int64_t result_index(const Sizes& sizes, int slice) {
  return int64_t{block_index().y} * sizes.num_slices + slice;
}

struct SummaryShared {
  float largest[kMaxWarps];
  int32_t before[kMaxWarps];
};

struct SelectShared {
  SummaryShared summary;
  SelectedKeys keys;
};

struct SortShared {
  SummaryShared summary;
  uint64_t keys[kSliceIds];
};

struct MassShared {
  uint64_t masses[kSliceThreads / kWarpSize];
};

struct StagedKeys {
  uint64_t keys[kStagedKeys];
};

// What a thread sees of its slice.
struct Summary {
  fd::Cutoff before_chosen;  // allows the ids before the chosen one
  float largest = -kInfinity;
  bool is_bad = false;  // a logit is NaN or infinity
  int32_t before = 0;

  FD_DEVICE void add(const LogitsSlice& slice, int place, const float (&x)[kSliceChunk]) {
#pragma unroll
    for (int i = 0; i < kSliceChunk; ++i) {
      const int id = slice.first_id + place + i;
      largest = x[i] > largest ? x[i] : largest;
      is_bad |= !(x[i] < kInfinity);
      before += slice.contains(id) && fd::is_allowed(before_chosen, x[i], id) ? 1 : 0;
    }
  }

  // Joins the threads of a block; the largest logit of a bad slice is infinity.
  FD_DEVICE void write(SummaryShared& shared, float* largest_of_slice, int32_t* before_of_slice) const {
    const float warp_largest = warp_max(largest);
    const bool warp_is_bad = warp_ballot(is_bad) != 0;
    const int32_t warp_before = warp_sum(before);
    if (lane_index() == 0) {
      shared.largest[warp_index()] = warp_is_bad ? kInfinity : warp_largest;
      shared.before[warp_index()] = warp_before;
    }
    sync_block();
    if (thread_index() != 0) return;
    float block_largest = shared.largest[0];
    int32_t block_before = shared.before[0];
    for (unsigned warp = 1; warp < block_size() / kWarpSize; ++warp) {
      const float other = shared.largest[warp];
      block_largest = other > block_largest ? other : block_largest;
      block_before += shared.before[warp];
    }
    *largest_of_slice = block_largest;
    *before_of_slice = block_before;
  }
};

enum Keys { kNoKeys, kSelectedKeys, kSortedKeys };

template <Keys kKeys>
FD_KERNEL void summarise_slices(In<float> logits, In<int32_t> rows, In<int32_t> chosen, Out<float> largest,
                                Out<int32_t> before, Out<uint64_t> keys, In<int32_t> device_rows, Sizes sizes) {
  const int row = sizes.first_row + static_cast<int>(block_index().y);
  if (row >= read_count(device_rows, sizes.max_rows)) return;
  const int index = static_cast<int>(block_index().x);
  const int64_t logits_row = rows.data[row], result = result_index(sizes, index);
  const LogitsSlice slice = slice_of(logits.data, logits_row, sizes.vocab_size, index);
  const int id = chosen.data[row];
  Summary summary{{logits.data[logits_row * sizes.vocab_size + id], id - 1}};
  if constexpr (kKeys == kSortedKeys) {
    SortShared& shared = shared_memory<SortShared>();
    for (int place = static_cast<int>(thread_index()) * kSliceChunk; place < kSliceIds;
         place += kSortThreads * kSliceChunk) {
      float x[kSliceChunk];
      slice.load_chunk(place, x);
      summary.add(slice, place, x);
      for (int i = 0; i < kSliceChunk; ++i) shared.keys[place + i] = key_at(slice, place + i, x[i]);
    }
    summary.write(shared.summary, largest.data + result, before.data + result);
    sort_keys(shared.keys, num_unsorted_keys(slice));
    for (int i = static_cast<int>(thread_index()); i < sizes.num_kept; i += kSortThreads)
      keys.data[result * sizes.num_kept + i] = shared.keys[i];
  } else {
    float x[kThreadChunks][kSliceChunk];
    slice.load<kSliceThreads>(x);
#pragma unroll
    for (int j = 0; j < kThreadChunks; ++j) summary.add(slice, place_of(j), x[j]);
    if constexpr (kKeys == kSelectedKeys) {
      SelectShared& shared = shared_memory<SelectShared>();
      summary.write(shared.summary, largest.data + result, before.data + result);
      select_keys(shared.keys, slice, x, sizes.num_kept, keys.data + result * sizes.num_kept);
    } else {
      summary.write(shared_memory<SummaryShared>(), largest.data + result, before.data + result);
    }
  }
}

// Returns the largest logit of the row, infinity if it holds NaN.
FD_DEVICE float largest_of_row(const float* largest, const Sizes& sizes) {
  float found = -kInfinity;
  for (int slice = 0; slice < sizes.num_slices; ++slice) {
    const float other = largest[result_index(sizes, slice)];
    found = other > found ? other : found;
  }
  return found;
}

FD_KERNEL void sum_masses(In<float> logits, In<int32_t> rows, In<float> largest, Out<uint64_t> masses,
                          In<int32_t> device_rows, Sizes sizes) {
  const int row = sizes.first_row + static_cast<int>(block_index().y);
  if (row >= read_count(device_rows, sizes.max_rows)) return;
  const int index = static_cast<int>(block_index().x);
  const float row_largest = largest_of_row(largest.data, sizes);
  const bool has_mass = row_largest < kInfinity && row_largest > -kInfinity;
  uint64_t mass = 0;
  if (has_mass && row_largest - largest.data[result_index(sizes, index)] <= kNegligible) {
    float x[kThreadChunks][kSliceChunk];
    slice_of(logits.data, rows.data[row], sizes.vocab_size, index).load<kSliceThreads>(x);
#pragma unroll
    for (int j = 0; j < kThreadChunks; ++j)
      for (int i = 0; i < kSliceChunk; ++i)
        mass += fd::mass_of(fd::relative_probability<fd::ScalarLanes>(x[j][i], row_largest));
  }
  MassShared& shared = shared_memory<MassShared>();
  mass = warp_sum(mass);
  if (lane_index() == 0) shared.masses[warp_index()] = mass;
  sync_block();
  if (thread_index() != 0) return;
  for (unsigned warp = 1; warp < kSliceThreads / kWarpSize; ++warp) mass += shared.masses[warp];
  masses.data[result_index(sizes, index)] = mass;
}

// Returns how many of `count` ascending keys come before a key.
FD_DEVICE int count_before(const uint64_t* keys, int count, uint64_t key) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (keys[middle] < key)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

// Turns logits of a row into log-probabilities; NaN if it has no mass.
struct RowLogprob {
  float largest, log_total;
  bool has_mass;

  FD_DEVICE float operator()(float logit) const {
    return has_mass ? (logit - largest) - log_total : __builtin_nanf("");
  }
};

FD_DEVICE RowLogprob row_logprob(const float* largest, const uint64_t* masses, const Sizes& sizes) {
  uint64_t total = 0;
  for (int slice = 0; slice < sizes.num_slices; ++slice) total += masses[result_index(sizes, slice)];
  const float sum = static_cast<float>(static_cast<double>(total) * 0x1p-40);
  return {largest_of_row(largest, sizes), fd::log_positive<fd::ScalarLanes>(sum), total > 0};
}

template <bool kIsStaged>
FD_KERNEL void write_logprobs(In<float> logits, In<int32_t> rows, In<int32_t> chosen, In<float> largest,
                              In<int32_t> before, In<uint64_t> masses, In<uint64_t> all_keys, Out<float> chosen_logprob,
                              Out<int32_t> chosen_rank, Out<int32_t> top_ids, Out<float> top_logprobs,
                              In<int32_t> device_rows, Sizes sizes, int top_n, int stride) {
  const int row = sizes.first_row + static_cast<int>(block_index().y);
  if (row >= read_count(device_rows, sizes.max_rows)) return;
  const int thread = static_cast<int>(block_index().x * kSliceThreads + thread_index());
  const int num_keys = sizes.num_slices * sizes.num_kept;
  const RowLogprob logprob = row_logprob(largest.data, masses.data, sizes);
  if (thread == 0) {
    int32_t rank = 1;
    for (int slice = 0; slice < sizes.num_slices; ++slice) rank += before.data[result_index(sizes, slice)];
    chosen_rank.data[row] = rank;
    chosen_logprob.data[row] = logprob(logits.data[int64_t{rows.data[row]} * sizes.vocab_size + chosen.data[row]]);
  }
  const uint64_t* keys = all_keys.data + result_index(sizes, 0) * sizes.num_kept;
  if constexpr (kIsStaged) {
    StagedKeys& staged = shared_memory<StagedKeys>();
    for (int i = static_cast<int>(thread_index()); i < num_keys; i += kSliceThreads) staged.keys[i] = keys[i];
    keys = staged.keys;
    sync_block();
  }
  const int64_t first = int64_t{row} * stride;
  const int num_top = !logprob.has_mass ? 0 : top_n < sizes.vocab_size ? top_n : sizes.vocab_size;
  for (int n = num_top + thread; n < top_n; n += static_cast<int>(grid_size().x) * kSliceThreads) {
    top_ids.data[first + n] = -1;
    top_logprobs.data[first + n] = __builtin_nanf("");
  }
  if (thread >= num_keys) return;
  const uint64_t key = keys[thread];
  const int own = thread / sizes.num_kept;
  int place = thread - own * sizes.num_kept;
  for (int slice = 0; slice < sizes.num_slices && place < num_top; ++slice)
    if (slice != own) place += count_before(keys + int64_t{slice} * sizes.num_kept, sizes.num_kept, key);
  if (place >= num_top) return;
  top_ids.data[first + place] = static_cast<int32_t>(key & 0xFFFFFFFFu);
  top_logprobs.data[first + place] = logprob(fd::key_logit(key));
}

// The scratch memory of a row: per slice a mass, num_kept keys, the largest logit, and a count.
int64_t scratch_row_bytes(int64_t num_slices, int64_t num_kept) { return num_slices * (8 + 8 * num_kept + 4 + 4); }

int64_t num_kept_of(int64_t top_n) { return top_n < kSliceIds ? top_n : kSliceIds; }

struct LogprobCall {
  In<float> logits;
  In<int32_t> rows, chosen;
  Out<float> chosen_logprob;
  Out<int32_t> chosen_rank;
  Out<int32_t> top_ids;
  Out<float> top_logprobs;
  In<int32_t> device_rows;
  int top_n, stride;
};

// Computes `num_rows` rows from sizes.first_row on.
int launch_rows(const LogprobCall& call, const Sizes& sizes, unsigned num_rows, void* scratch, void* stream) {
  const size_t slices = static_cast<size_t>(sizes.num_slices) * num_rows;
  const size_t num_keys = slices * static_cast<size_t>(sizes.num_kept);
  auto* masses = static_cast<uint64_t*>(scratch);
  uint64_t* keys = masses + slices;
  auto* largest = reinterpret_cast<float*>(keys + num_keys);
  auto* before = reinterpret_cast<int32_t*>(largest + slices);
  const Dim3 grid{static_cast<unsigned>(sizes.num_slices), num_rows, 1};
  const auto summarise = [&](auto kernel, int threads, size_t shared_bytes) {
    return launch(kernel, grid, static_cast<unsigned>(threads), shared_bytes, stream, call.logits, call.rows,
                  call.chosen, Out<float>(largest, slices), Out<int32_t>(before, slices), Out<uint64_t>(keys, num_keys),
                  call.device_rows, sizes);
  };
  const int summarised =
      sizes.num_kept == 0              ? summarise(summarise_slices<kNoKeys>, kSliceThreads, sizeof(SummaryShared))
      : sizes.num_kept <= kMaxSelected ? summarise(summarise_slices<kSelectedKeys>, kSliceThreads, sizeof(SelectShared))
                                       : summarise(summarise_slices<kSortedKeys>, kSortThreads, sizeof(SortShared));
  if (summarised != kSuccess) return summarised;
  if (const int code = launch(sum_masses, grid, kSliceThreads, sizeof(MassShared), stream, call.logits, call.rows,
                              In<float>(largest, slices), Out<uint64_t>(masses, slices), call.device_rows, sizes))
    return code;
  const int row_keys = sizes.num_slices * sizes.num_kept;
  const bool is_staged = row_keys <= kStagedKeys;
  const Dim3 key_grid{
      static_cast<unsigned>(row_keys <= kSliceThreads ? 1 : (row_keys + kSliceThreads - 1) / kSliceThreads), num_rows,
      1};
  return launch(is_staged ? write_logprobs<true> : write_logprobs<false>, key_grid, kSliceThreads,
                is_staged ? sizeof(StagedKeys) : 0, stream, call.logits, call.rows, call.chosen,
                In<float>(largest, slices), In<int32_t>(before, slices), In<uint64_t>(masses, slices),
                In<uint64_t>(keys, num_keys), call.chosen_logprob, call.chosen_rank, call.top_ids, call.top_logprobs,
                call.device_rows, sizes, call.top_n, call.stride);
}

}  // namespace

// Writes the bytes of scratch memory that fd_logprobs needs for each row that it computes at once.
FD_EXPORT int fd_logprobs_row_bytes(int64_t vocab_size, int64_t top_n, int64_t* bytes) {
  *bytes = scratch_row_bytes(num_slices(vocab_size), num_kept_of(top_n));
  return kSuccess;
}

// logits: [logits_rows, vocab_size] fp32; rows, chosen, chosen_rank: [num_rows] int32; chosen_logprob: [num_rows] fp32;
// top_ids, top_logprobs: [num_rows, stride] int32 and fp32. Rows are computed as many at once as `scratch` is for.
FD_EXPORT int fd_logprobs(const float* logits, int64_t logits_rows, int64_t vocab_size, const int32_t* rows,
                          const int32_t* chosen, float* chosen_logprob, int32_t* chosen_rank, int32_t* top_ids,
                          float* top_logprobs, int64_t stride, int64_t top_n, void* scratch, int64_t scratch_bytes,
                          const int32_t* device_rows, int64_t num_rows, void* stream) {
  constexpr const char* op = "logprobs";
  FD_REQUIRE(op, top_n, top_n >= 0 && top_n <= stride, "0 to the columns of top_ids");
  FD_REQUIRE(op, vocab_size, vocab_size > 0 && vocab_size <= (1 << 24), "1 to 16777216");
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  const auto address = reinterpret_cast<intptr_t>(logits);
  if (address % (kSectorLogits * sizeof(float)) != 0) return refuse(op, "logits", "a multiple of 32 bytes", address);
  const int64_t slices = num_slices(vocab_size), kept = num_kept_of(top_n);
  const int64_t at_once = scratch_bytes / scratch_row_bytes(slices, kept);
  FD_REQUIRE(op, scratch_bytes, at_once > 0, "room for a row");
  const auto count = static_cast<size_t>(num_rows);
  const auto num_top = static_cast<size_t>(num_rows * stride);
  const LogprobCall call{In<float>(logits, static_cast<size_t>(logits_rows * vocab_size)),
                         In<int32_t>(rows, count),
                         In<int32_t>(chosen, count),
                         Out<float>(chosen_logprob, count),
                         Out<int32_t>(chosen_rank, count),
                         Out<int32_t>(top_ids, num_top),
                         Out<float>(top_logprobs, num_top),
                         Count{device_rows, 0}.array(),
                         static_cast<int>(top_n),
                         static_cast<int>(stride)};
  Sizes sizes{0, static_cast<int>(num_rows), static_cast<int>(vocab_size), static_cast<int>(slices),
              static_cast<int>(kept)};
  for (int64_t first = 0; first < num_rows;) {
    int64_t n = num_rows - first < at_once ? num_rows - first : at_once;
    if (n > kMaxGridRows) n = kMaxGridRows;
    sizes.first_row = static_cast<int>(first);
    if (const int code = launch_rows(call, sizes, static_cast<unsigned>(n), scratch, stream)) return code;
    first += n;
  }
  return kSuccess;
}
