// SPDX-License-Identifier: Apache-2.0
// Times the launches of a captured graph one by one, either the kernels or the loops of their attainable floor, and
// counts the work of each launch. The tensors of the last step must still exist. Linked with the operator library,
// which captured the graph.
#include <ctime>

#include "common/export.h"
#include "cpu_ops/op_graph.h"
#include "roofline/loops.h"

namespace fd {
namespace {

double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Adds up visit(matrix, rows, outputs, inputs) over the experts that have rows.
template <class Result, class Visit>
Result for_each_expert(const PackedMatrices& m, const int32_t* starts, const Visit& visit) {
  Result sum{};
  for (int64_t e = 0; e < m.count; ++e)
    if (starts[e + 1] > starts[e])
      sum += visit(m.packed + e * m.matrix_bytes(), starts[e + 1] - starts[e], m.outputs, m.inputs);
  return sum;
}

// Calls visit(args) with the linear layer of one matrix in the format of `m`; returns its result.
template <class Visit>
auto visit_matrix(const PackedMatrices& m, const uint8_t* packed, int64_t rows, int64_t n, int64_t k, Visit&& visit) {
  QuantizedLinearArgs a{};
  a.packed = packed, a.rows = rows, a.n = n, a.k = k;
  a.gated = m.gated, a.dtype = a.out_dtype = m.dtype, a.form = m.form;
  return m.is_quantized ? visit(a) : visit(static_cast<const LinearArgs&>(a));
}

// Adds up visit(linear layer) over the matrices that a launch multiplies.
template <class Result, class Visit>
Result add_up(const ExpertsUpArgs& a, const Visit& visit) {
  const auto of = [&](auto... sizes) { return visit_matrix(a.matrices, sizes..., visit); };
  Result sum = for_each_expert<Result>(a.matrices, a.starts, of);
  if (a.shared != nullptr) sum += of(a.shared, a.rows, a.shared_outputs, a.matrices.inputs);
  return sum;
}
template <class Result, class Visit>
Result add_up(const ExpertsDownArgs& a, const Visit& visit) {
  const auto of = [&](auto... sizes) { return visit_matrix(a.matrices, sizes..., visit); };
  Result sum = for_each_expert<Result>(a.matrices, a.starts, of);
  if (a.shared != nullptr) sum += of(a.shared, a.rows, a.matrices.outputs, a.shared_inputs);
  return sum;
}

template <class Result, class Visit>
Result add_up(const ProjectHeadsArgs& a, const Visit& visit) {
  const PackedMatrices& m = a.matrices;
  Result sum{};
  for (int64_t head = 0; head < m.count; ++head)
    sum += visit_matrix(m, m.packed + head * m.matrix_bytes(), a.rows, m.outputs, m.inputs, visit);
  return sum;
}

// Runs the loop of a launch; returns its lines, counted once per row. Launches without a loop return 0.
struct RunLoop {
  const roofline::LoopForm& form;
  int64_t operator()(const LinearArgs& a) const { return roofline::linear_loop(a, form); }
  int64_t operator()(const QuantizedLinearArgs& a) const { return roofline::linear_quantized_loop(a, form); }
  int64_t operator()(const AttentionArgs& a) const { return roofline::attention_loop(a, form); }
  int64_t operator()(const ExpertsUpArgs& a) const { return add_up<int64_t>(a, *this); }
  int64_t operator()(const ExpertsDownArgs& a) const { return add_up<int64_t>(a, *this); }
  int64_t operator()(const ProjectHeadsArgs& a) const { return add_up<int64_t>(a, *this); }
  template <class Other>
  int64_t operator()(const Other&) const {
    return 0;
  }
};

// Bytes that a launch must read, its operations in fp32 or bf16, and those in integers.
struct Work {
  double bytes, pair_operations, integer_operations;

  void operator+=(const Work& other) {
    bytes += other.bytes;
    pair_operations += other.pair_operations;
    integer_operations += other.integer_operations;
  }
};

struct CountWork {
  Work operator()(const LinearArgs& a) const {
    const double width = a.dtype == DType::kBfloat16 ? 2 : 4;
    return {width * static_cast<double>(packed_size(a.n, a.k, a.gated)), products(a), 0};
  }
  Work operator()(const QuantizedLinearArgs& a) const {
    const auto bytes = static_cast<double>(quantized_size(a.form, a.n, a.k, a.gated));
    return {bytes, 0, static_cast<double>(roofline::row_limbs(a.form.quantization)) * products(a)};
  }
  Work operator()(const AttentionArgs& a) const {
    const double width = a.cache.dtype == DType::kInt8 ? 1 : a.cache.dtype == DType::kBfloat16 ? 2 : 4;
    const auto per_position = static_cast<double>(a.cache.num_kv_heads * (a.cache.key_width() + a.cache.value_width()));
    return attention_work(a, width * per_position, 4 * static_cast<double>(a.num_heads * a.cache.head_dim));
  }
  // The latent part of a row is read once, as key and value.
  Work operator()(const LatentAttentionArgs& a) const {
    const double width = a.cache.dtype == DType::kBfloat16 ? 2 : 4;
    const auto products = static_cast<double>(a.num_heads * (a.cache.width() + a.cache.latent_dim));
    return attention_work(a, width * static_cast<double>(a.cache.width()), 2 * products);
  }
  Work operator()(const RouteArgs& a) const {
    const auto products = static_cast<double>(a.num_experts * a.width);
    const double width = a.gate_dtype == DType::kBfloat16 ? 2 : 4;
    return {width * products, 2 * static_cast<double>(a.rows) * products, 0};
  }
  Work operator()(const ExpertsUpArgs& a) const { return add_up<Work>(a, *this); }
  Work operator()(const ExpertsDownArgs& a) const { return add_up<Work>(a, *this); }
  Work operator()(const ProjectHeadsArgs& a) const { return add_up<Work>(a, *this); }
  template <class Other>
  Work operator()(const Other&) const {
    return {};
  }

 private:
  // The work of attention that reads so many bytes per position of a sequence, and has so many operations per pair of a
  // row and a position that it attends to.
  static Work attention_work(const PagedBatch& a, double bytes, double operations) {
    double positions = 0, pairs = 0;
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
      const double rows = a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq];
      positions += a.kv_lens[seq];
      pairs += rows * (a.kv_lens[seq] - (rows - 1) / 2);
    }
    return {bytes * positions, operations * pairs, 0};
  }
  static double products(const LinearArgs& a) {
    return (a.gated ? 4.0 : 2.0) * static_cast<double>(a.rows * a.n * a.k);
  }
};

}  // namespace
}  // namespace fd

// Runs the loop of each launch in its form and writes its seconds and lines, or, if `forms` is null, runs the kernel
// and writes its seconds. Time is that of the calling thread on the processor, or the wall clock.
FD_EXPORT void fd_time_launches(const void* graph, int64_t num_rows, int64_t num_seqs,
                                const fd::roofline::LoopForm* forms, bool on_thread_time, double* seconds,
                                int64_t* lines) {
  const clockid_t clock = on_thread_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  double last = fd::seconds_of(clock);
  for (const fd::Launch& captured : static_cast<const fd::OpGraph*>(graph)->launches) {
    const fd::Launch launch = fd::resized(captured, num_rows, num_seqs);
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
FD_EXPORT void fd_count_work(const void* graph, int64_t num_rows, int64_t num_seqs, double* work) {
  for (const fd::Launch& captured : static_cast<const fd::OpGraph*>(graph)->launches) {
    const fd::Work launch = std::visit(fd::CountWork(), fd::resized(captured, num_rows, num_seqs));
    *work++ = launch.bytes, *work++ = launch.pair_operations, *work++ = launch.integer_operations;
  }
}

// Returns the integer products per weight and row in this format.
FD_EXPORT int64_t fd_row_limbs(int64_t quantization) {
  return fd::roofline::row_limbs(static_cast<fd::Quantization>(quantization));
}
