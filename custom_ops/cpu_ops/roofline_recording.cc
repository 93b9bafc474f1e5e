// SPDX-License-Identifier: Apache-2.0
// Times the launches of a recording one by one: the kernels, or the loops of their attainable floor. And counts what
// each has to do. For benchmarks, after a step whose tensors the launches still refer to.
#include <ctime>

#include "common/paths.h"
#include "cpu_ops/recording.h"
#include "cpu_ops/roofline_loops.h"

namespace fd {
namespace {

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The loops of one path.
struct Loops {
  int64_t (*linear)(const LinearArgs&, const LoopForm&);
  int64_t (*linear_quantized)(const QuantizedLinearArgs&, const LoopForm&);
  int64_t (*attention)(const AttentionArgs&, const LoopForm&);
  int64_t (*row_limbs)(Quantization);  // integer products of a row and a weight
};

#define FD_LOOPS(path) \
  Loops { path::linear_loop, path::linear_quantized_loop, path::attention_loop, path::row_limbs }

const Loops& loops() {
  static const Loops table = [] { FD_RETURN_FOR_PATH(FD_LOOPS) }();
  return table;
}

// Runs what a launch cannot do without; returns the lines that it has multiplied, once for every row.
struct RunLoop {
  const LoopForm& form;
  int64_t operator()(const LinearArgs& a) const { return loops().linear(a, form); }
  int64_t operator()(const QuantizedLinearArgs& a) const { return loops().linear_quantized(a, form); }
  int64_t operator()(const AttentionArgs& a) const { return loops().attention(a, form); }
  template <class Other>
  int64_t operator()(const Other&) const {
    return 0;
  }
};

// Bytes that a launch must read, and its operations by the arithmetic that they are done in.
struct Work {
  double bytes, pair_operations, integer_operations;
};

struct CountWork {
  Work operator()(const LinearArgs& a) const {
    const double width = a.dtype == DType::kBfloat16 ? 2 : 4;
    return {width * static_cast<double>(packed_size(a.n, a.k, a.gated)), products(a), 0};
  }
  Work operator()(const QuantizedLinearArgs& a) const {
    const auto bytes = static_cast<double>(quantized_size(a.quantization, a.n, a.k, a.gated));
    return {bytes, 0, static_cast<double>(loops().row_limbs(a.quantization)) * products(a)};
  }
  Work operator()(const AttentionArgs& a) const {
    const double width = a.cache.dtype == DType::kInt8 ? 1 : a.cache.dtype == DType::kBfloat16 ? 2 : 4;
    double positions = 0, seen = 0;
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
      const double rows = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
      positions += a.kv_lens[seq];
      seen += rows * (a.kv_lens[seq] - (rows - 1) / 2);
    }
    const auto per_position = static_cast<double>(a.cache.num_kv_heads * (a.cache.key_width() + a.cache.value_width()));
    return {width * per_position * positions, 4 * static_cast<double>(a.num_heads * a.cache.head_dim) * seen, 0};
  }
  template <class Other>
  Work operator()(const Other&) const {
    return {};
  }

 private:
  static double products(const LinearArgs& a) {
    return (a.gated ? 4.0 : 2.0) * static_cast<double>(a.rows * a.n * a.k);
  }
};

}  // namespace
}  // namespace fd

#define FD_EXPORT extern "C" __attribute__((visibility("default")))

// Runs each launch's loop in its form and writes its seconds and the lines that it has multiplied, or, where `forms` is
// null, the kernel and its seconds. On the calling thread's processor time or on the wall's.
FD_EXPORT void fd_time_launches(const void* recording, int64_t num_rows, int64_t num_seqs, const fd::LoopForm* forms,
                                bool on_thread_time, double* seconds, int64_t* lines) {
  const clockid_t clock = on_thread_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  double last = fd::seconds_of(clock);
  for (const fd::Launch& recorded : static_cast<const fd::Recording*>(recording)->launches) {
    const fd::Launch launch = fd::resized(recorded, num_rows, num_seqs);
    if (forms == nullptr)
      fd::perform(launch);
    else
      *lines++ = std::visit(fd::RunLoop{*forms++}, launch);
    const double now = fd::seconds_of(clock);
    *seconds++ = now - last;
    last = now;
  }
}

// Writes, for each launch, its bytes, its operations in fp32 or bf16, and those in integers: [launches][3].
FD_EXPORT void fd_count_work(const void* recording, int64_t num_rows, int64_t num_seqs, double* work) {
  for (const fd::Launch& recorded : static_cast<const fd::Recording*>(recording)->launches) {
    const fd::Work one = std::visit(fd::CountWork(), fd::resized(recorded, num_rows, num_seqs));
    *work++ = one.bytes, *work++ = one.pair_operations, *work++ = one.integer_operations;
  }
}

// Returns the integer products that a row of this format's inputs takes per weight.
FD_EXPORT int64_t fd_row_limbs(int64_t quantization) {
  return fd::loops().row_limbs(static_cast<fd::Quantization>(quantization));
}
