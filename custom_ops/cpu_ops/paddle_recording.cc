// SPDX-License-Identifier: Apache-2.0
#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <typeinfo>

#include "cpu_ops/checks.h"
#include "cpu_ops/recording.h"

namespace fd {
namespace {

thread_local std::unique_ptr<Recording> current;
std::atomic<int64_t> num_launches{0};

// Refuses slots and blocks that lie outside the cache, and lengths that contradict each other.
void check(const AttentionArgs& a) {
  constexpr const char* op = "append_attention";
  const int64_t num_slots = a.cache.num_blocks * a.cache.block_size;
  for (int64_t row = 0; row < a.rows; ++row)
    require(a.slot_mapping[row] >= 0 && a.slot_mapping[row] < num_slots, op, "slot_mapping", "a slot of the cache",
            a.slot_mapping[row]);
  require(a.cu_seqlens_q[0] == 0, op, "cu_seqlens_q", "0 first", a.cu_seqlens_q[0]);
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t num_new = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
    require(num_new >= 0 && a.cu_seqlens_q[seq + 1] <= a.rows, op, "cu_seqlens_q", "ascending up to num_rows",
            a.cu_seqlens_q[seq + 1]);
    const int64_t num_blocks = (a.kv_lens[seq] + a.cache.block_size - 1) / a.cache.block_size;
    require(a.kv_lens[seq] >= num_new && num_blocks <= a.max_blocks, op, "kv_lens",
            "the new rows at least, the block table's length at most", a.kv_lens[seq]);
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int32_t block = a.block_tables[seq * a.max_blocks + i];
      require(block >= 0 && block < a.cache.num_blocks, op, "block_tables", "a block of the cache", block);
    }
  }
  if (a.rotary.cos_sin == nullptr) return;
  const int64_t last = a.rotary.num_positions - 1;
  for (int64_t row = 0; row < a.rows; ++row)
    if (const int64_t position = a.rotary.positions[row]; __builtin_expect(position < 0 || position > last, 0))
      refuse(op, "positions", "0.." + std::to_string(last), std::to_string(position));
}

void check(const GatherArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    if (__builtin_expect(a.ids[row] < 0 || a.ids[row] >= a.table_rows, 0))
      refuse(a.op, a.op[0] == 'e' ? "token_ids" : "rows", "0.." + std::to_string(a.table_rows - 1),
             std::to_string(a.ids[row]) + " at row " + std::to_string(row));
}

void check(const ScatterArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    require(a.ids[row] >= 0 && a.ids[row] < a.out_rows, "scatter_rows", "rows", "rows of out", a.ids[row]);
}

void scatter(const ScatterArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    std::memcpy(static_cast<char*>(a.out) + a.ids[row] * a.row_bytes, static_cast<const char*>(a.x) + row * a.row_bytes,
                static_cast<size_t>(a.row_bytes));
}

struct Perform {
  void operator()(const LinearArgs& a) const { kernels().linear(a); }
  void operator()(const QuantizedLinearArgs& a) const { kernels().linear_quantized(a); }
  void operator()(const RmsNormArgs& a) const { kernels().rms_norm(a); }
  void operator()(const GatherArgs& a) const {
    check(a);
    kernels().gather(a);
  }
  void operator()(const ScatterArgs& a) const {
    check(a);
    scatter(a);
  }
  void operator()(const AttentionArgs& a) const {
    check(a);
    kernels().append_attention(a);
  }
};

// Returns the launch for other numbers of rows and sequences than those it was recorded with.
template <class Args>
Args resized(Args args, int64_t num_rows, int64_t num_seqs) {
  require(num_rows <= args.rows, "replay", "num_rows", "at most the rows recorded", num_rows);
  args.rows = num_rows;
  if constexpr (std::is_same_v<Args, AttentionArgs>) {
    require(num_seqs <= args.num_seqs, "replay", "num_seqs", "at most the sequences recorded", num_seqs);
    args.num_seqs = num_seqs;
  }
  return args;
}

template <class Args, class = void>
constexpr bool has_weight = false;

template <class Args>
constexpr bool has_weight<Args, std::void_t<decltype(Args::n), decltype(Args::k)>> = true;

// Returns what kind of launch this is, with the size of its weight if it has one: "Linear [3072, 1024]".
template <class Args>
std::string describe(const Args& args) {
  const std::unique_ptr<char, decltype(&std::free)> type(
      abi::__cxa_demangle(typeid(Args).name(), nullptr, nullptr, nullptr), std::free);
  std::string name = type.get();  // fd::LinearArgs
  name = name.substr(name.rfind(':') + 1);
  name = name.substr(0, name.rfind("Args"));
  if constexpr (has_weight<Args>) name += " [" + std::to_string(args.n) + ", " + std::to_string(args.k) + "]";
  return name;
}

// Performs the first `count` launches.
void perform_first(const Recording& recording, size_t count, int64_t num_rows, int64_t num_seqs) {
  require(num_rows >= 0 && num_seqs >= 0, "replay", "num_rows", "counts of at least 0", std::min(num_rows, num_seqs));
  for (size_t i = 0; i < count; ++i)
    std::visit([&](const auto& args) { Perform()(resized(args, num_rows, num_seqs)); }, recording.launches[i]);
  num_launches += static_cast<int64_t>(count);
}

const Recording& recording_at(int64_t address) { return *reinterpret_cast<const Recording*>(address); }

void replay_at(paddle::Tensor&, int64_t recording, int64_t num_rows, int64_t num_seqs) {
  replay(recording_at(recording), num_rows, num_seqs);
}

}  // namespace

void perform(const Launch& launch) {
  std::visit(Perform(), launch);
  ++num_launches;
}

void launch(const Launch& launch) {
  if (current == nullptr) return perform(launch);
  current->launches.push_back(launch);
}

void replay(const Recording& recording, int64_t num_rows, int64_t num_seqs) {
  perform_first(recording, recording.launches.size(), num_rows, num_seqs);
}

void replay_caches(const Recording& recording, int64_t num_rows, int64_t num_seqs) {
  const auto& launches = recording.launches;
  size_t count = launches.size();
  while (count > 0 && !std::holds_alternative<AttentionArgs>(launches[count - 1])) --count;
  perform_first(recording, count, num_rows, num_seqs);
}

}  // namespace fd

#define FD_EXPORT extern "C" __attribute__((visibility("default")))

// From here on, launches of this thread are kept instead of performed.
FD_EXPORT void fd_recording_begin() { fd::current = std::make_unique<fd::Recording>(); }

// Ends it. The caller owns what is returned.
FD_EXPORT void* fd_recording_end() { return fd::current.release(); }

FD_EXPORT void fd_recording_free(void* recording) { delete static_cast<fd::Recording*>(recording); }

FD_EXPORT int64_t fd_recording_size(const void* recording) {
  return static_cast<int64_t>(static_cast<const fd::Recording*>(recording)->launches.size());
}

// Returns the descriptions of all launches, one a line, valid until the thread's next call.
FD_EXPORT const char* fd_recording_describe(const void* recording) {
  static thread_local std::string lines;
  lines.clear();
  for (const fd::Launch& launch : static_cast<const fd::Recording*>(recording)->launches)
    lines += std::visit([](const auto& args) { return fd::describe(args); }, launch) + '\n';
  return lines.c_str();
}

// Launches performed by this process so far, replayed ones included.
FD_EXPORT int64_t fd_num_launches() { return fd::num_launches; }

// `out` is any tensor that the recording writes: it tells Paddle that the operator has an effect.
PD_BUILD_OP(fd_replay)
    .Inputs({"out"})
    .Outputs({"out_"})
    .Attrs({"recording: int64_t", "num_rows: int64_t", "num_seqs: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(fd::replay_at));
