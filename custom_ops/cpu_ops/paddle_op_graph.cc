// SPDX-License-Identifier: Apache-2.0
// Captures and replays kernel launches.
#include <cxxabi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <typeinfo>

#include "common/export.h"
#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"
#include "cpu_ops/sampling_kernels.h"

namespace fd {
namespace {

thread_local std::unique_ptr<OpGraph> capturing;

// Raises if a slot or block is outside the cache, if lengths contradict each other, or if there are no angles for a
// position.
template <class Args>
void check_paged(const char* op, const Args& a) {
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
            "at least the new rows, at most the block table's length", a.kv_lens[seq]);
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int32_t block = a.block_tables[seq * a.max_blocks + i];
      require(block >= 0 && block < a.cache.num_blocks, op, "block_tables", "a block of the cache", block);
    }
  }
  if (a.rotary.cos_sin == nullptr) return;
  const int64_t last = a.rotary.num_positions - 1;
  for (int64_t row = 0; row < a.rows; ++row)
    if (const int64_t position = a.rotary.positions[row]; __builtin_expect(position < 0 || position > last, 0))
      raise_invalid(op, "positions", "0.." + std::to_string(last), std::to_string(position));
}

void check(const AttentionArgs& a) { check_paged("append_attention", a); }
void check(const LatentAttentionArgs& a) { check_paged("append_latent_attention", a); }

void check(const GatherArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row)
    if (__builtin_expect(a.ids[row] < 0 || a.ids[row] >= a.table_rows, 0))
      raise_invalid(a.op, a.op[0] == 'e' ? "token_ids" : "rows", "0.." + std::to_string(a.table_rows - 1),
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

void scatter_logits(const ScatterLogitsArgs& a) {
  for (int64_t i = 0; i < a.num_ids; ++i)
    require(a.ids[i] >= 0 && a.ids[i] < a.vocab_size, "scatter_logits", "ids", "columns of out", a.ids[i]);
  for (int64_t row = 0; row < a.rows; ++row) {
    float* out = a.out + row * a.vocab_size;
    std::fill(out, out + a.vocab_size, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < a.num_ids; ++i) out[a.ids[i]] = a.x[row * a.num_ids + i];
  }
}

float wide(float x) { return x; }
float wide(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}
void store(float* out, float x) { *out = x; }
void store(uint16_t* out, float x) {  // to the nearest bf16, ties to even
  uint32_t word;
  std::memcpy(&word, &x, 4);
  *out = static_cast<uint16_t>(x != x ? 0x7fc0u : (word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

template <class T>
void norm_gelu_typed(const NormGeluArgs& a) {
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.size;
    T* out = static_cast<T*>(a.out) + row * a.size;
    double sum = 0.0;
    for (int64_t i = 0; i < a.size; ++i) sum += double{wide(x[i])} * wide(x[i]);
    const float factor = 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(a.size)) + a.eps);
    for (int64_t i = 0; i < a.size; ++i) {
      const float normed = wide(x[i]) * factor * wide(weight[i]) + wide(bias[i]);
      store(out + i, 0.5f * normed * (1.0f + std::erf(normed * 0.70710678f)));
    }
  }
}

void norm_gelu(const NormGeluArgs& a) {
  a.dtype == DType::kBfloat16 ? norm_gelu_typed<uint16_t>(a) : norm_gelu_typed<float>(a);
}

// `error` is "<field>: expected ..., got ...", or empty.
void raise_if_invalid(const char* op, const std::string& error) {
  if (__builtin_expect(!error.empty(), 0)) PADDLE_THROW(common::errors::InvalidArgument("%s: %s", op, error.c_str()));
}

void check(const VerifyDraftsArgs& a) {
  constexpr const char* op = "verify_draft_tokens";
  for (int64_t b = 0; b < a.num_seqs; ++b) {
    require(a.first_row[b] >= 0, op, "first_row", "at least 0", a.first_row[b]);
    require(a.row_count[b] >= 0, op, "row_count", "at least 0", a.row_count[b]);
    const int64_t end = int64_t{a.first_row[b]} + a.row_count[b];
    require(end <= a.rows, op, "row_count", "ranges within the rows of target, draft_is_allowed and emitted", end);
  }
}

// Raises if the lists of a router name rows or entries that there are not.
void check_entries(const char* op, const int32_t* starts, const int32_t* entries, int64_t num_experts,
                   int64_t num_entries) {
  for (int64_t e = 0; e < num_experts; ++e)
    require(starts[e] >= 0 && starts[e] <= starts[e + 1], op, "starts", "an ascending list from 0", starts[e]);
  require(starts[num_experts] == num_entries, op, "starts", "the number of entries of these rows last",
          starts[num_experts]);
  for (int64_t i = 0; i < num_entries; ++i)
    require(entries[i] >= 0 && entries[i] < num_entries, op, "entries", "entries of these rows", entries[i]);
}

struct Perform {
  void operator()(const LinearArgs& a) const { kernels().linear(a); }
  void operator()(const QuantizedLinearArgs& a) const { kernels().linear_quantized(a); }
  void operator()(const ProjectHeadsArgs& a) const { kernels().project_heads(a); }
  void operator()(const RmsNormArgs& a) const { kernels().rms_norm(a); }
  void operator()(const NormGeluArgs& a) const { norm_gelu(a); }
  void operator()(const GatherArgs& a) const {
    check(a);
    kernels().gather(a);
  }
  void operator()(const QuantizedGatherArgs& a) const {
    check(a);
    kernels().gather_quantized(a);
  }
  void operator()(const ScatterArgs& a) const {
    check(a);
    scatter(a);
  }
  void operator()(const ScatterLogitsArgs& a) const { scatter_logits(a); }
  void operator()(const AttentionArgs& a) const {
    check(a);
    kernels().append_attention(a);
  }
  void operator()(const LatentAttentionArgs& a) const {
    check(a);
    kernels().append_latent_attention(a);
  }
  void operator()(const RouteArgs& a) const { kernels().route(a); }
  void operator()(const ExpertsUpArgs& a) const {
    check_entries("experts_up", a.starts, a.entries, a.matrices.count, a.rows * a.num_chosen);
    kernels().experts_up(a);
  }
  void operator()(const ExpertsDownArgs& a) const {
    check_entries("experts_down", a.starts, a.entries, a.matrices.count, a.rows * a.num_chosen);
    kernels().experts_down(a);
  }
  void operator()(const VirtualPaddingArgs& a) const {
    constexpr const char* op = "virtual_padding";
    raise_if_invalid(op, check_step_shape(a.shape));
    virtual_padding(a.shape, a.out);
    require(a.rows == kAsScheduled || a.rows == a.out.totals[0], op, "num_scheduled", "the number of rows of the step",
            a.out.totals[0]);
  }
  void operator()(const SampleArgs& a) const {
    raise_if_invalid("sample", check_sampling_inputs(a.in, a.rows, a.vocab_size));
    sample(a.logits, a.rows, a.vocab_size, a.in, a.out, a.keep_processed, a.stop_at_rejections);
  }
  void operator()(const VerifyDraftsArgs& a) const {
    check(a);
    verify_draft_tokens(a.rule, a.target, a.int_params, a.draft_is_allowed, a.first_row, a.row_count, a.num_seqs,
                        a.num_accepted, a.emitted);
  }
};

template <class Args, class = void>
constexpr bool has_num_seqs = false;

template <class Args>
constexpr bool has_num_seqs<Args, std::void_t<decltype(Args::num_seqs)>> = true;

void resize_seqs(int64_t& captured, int64_t num_seqs) {
  require(num_seqs <= captured, "replay", "num_seqs", "at most the sequences captured", num_seqs);
  captured = num_seqs;
}

template <class Args>
Args resized_args(Args args, int64_t num_rows, int64_t num_seqs) {
  if constexpr (has_num_seqs<Args>) resize_seqs(args.num_seqs, num_seqs);
  if constexpr (std::is_same_v<Args, VirtualPaddingArgs>)
    resize_seqs(args.shape.num_seqs, num_seqs);
  else
    require(num_rows <= args.rows, "replay", "num_rows", "at most the rows captured", num_rows);
  args.rows = num_rows;
  return args;
}

// Whether a launch writes rows to a cache: its arguments name one.
template <class Args, class = void>
constexpr bool writes_cache = false;

template <class Args>
constexpr bool writes_cache<Args, std::void_t<decltype(Args::cache)>> = true;

template <class Args, class = void>
constexpr bool has_weight = false;

template <class Args>
constexpr bool has_weight<Args, std::void_t<decltype(Args::n), decltype(Args::k)>> = true;

std::string sizes_text(std::initializer_list<int64_t> sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? " [" : ", ") + std::to_string(size);
  return text + "]";
}

// Returns the kind of a launch with the size of its weight, if it has one: "Linear [3072, 1024]" or "Linear with block
// maxima [3072, 1024]"; of heads their number, too: "ProjectHeads [16, 512, 128]".
template <class Args>
std::string describe(const Args& args) {
  const std::unique_ptr<char, decltype(&std::free)> type(
      abi::__cxa_demangle(typeid(Args).name(), nullptr, nullptr, nullptr), std::free);
  std::string name = type.get();  // fd::LinearArgs
  name = name.substr(name.rfind(':') + 1);
  name = name.substr(0, name.rfind("Args"));
  if constexpr (has_weight<Args>) {
    if (args.block_maxima != nullptr) name += " with block maxima";
    name += sizes_text({args.n, args.k});
  }
  if constexpr (std::is_same_v<Args, ProjectHeadsArgs>)
    name += sizes_text({args.matrices.count, args.matrices.outputs, args.matrices.inputs});
  return name;
}

// Performs the first `count` launches.
void perform_first(const OpGraph& graph, size_t count, int64_t num_rows, int64_t num_seqs) {
  require(num_rows >= 0 && num_seqs >= 0, "replay", "num_rows", "counts of at least 0", std::min(num_rows, num_seqs));
  for (size_t i = 0; i < count; ++i)
    std::visit([&](const auto& args) { Perform()(resized_args(args, num_rows, num_seqs)); }, graph.launches[i]);
}

}  // namespace

Launch resized(const Launch& launch, int64_t num_rows, int64_t num_seqs) {
  return std::visit([&](const auto& args) -> Launch { return resized_args(args, num_rows, num_seqs); }, launch);
}

void perform(const Launch& launch) { std::visit(Perform(), launch); }

const float* attach_block_maxima(OpGraph& graph, const float* logits, int64_t vocab_size) {
  const auto attach = [&](auto& args) -> const float* {
    if constexpr (has_weight<std::decay_t<decltype(args)>>) {
      const bool writes_logits = args.out == logits && args.out_dtype == DType::kFloat32 && args.n == vocab_size;
      if (!writes_logits || args.gated) return nullptr;
      graph.block_maxima.push_back(std::make_unique<float[]>(static_cast<size_t>(args.rows * num_blocks(args.n))));
      return args.block_maxima = graph.block_maxima.back().get();
    }
    return nullptr;
  };
  return graph.launches.empty() ? nullptr : std::visit(attach, graph.launches.back());
}

void launch(const Launch& launch) {
  if (capturing == nullptr) return perform(launch);
  Launch captured = launch;
  if (auto* args = std::get_if<SampleArgs>(&captured))
    args->in.block_maxima = attach_block_maxima(*capturing, args->logits, args->vocab_size);
  capturing->launches.push_back(captured);
}

void replay(const OpGraph& graph, int64_t num_rows, int64_t num_seqs) {
  perform_first(graph, graph.launches.size(), num_rows, num_seqs);
}

void replay_caches(const OpGraph& graph, int64_t num_rows, int64_t num_seqs) {
  const auto writes = [](const Launch& launch) {
    return std::visit([](const auto& args) { return writes_cache<std::decay_t<decltype(args)>>; }, launch);
  };
  size_t count = graph.launches.size();
  while (count > 0 && !writes(graph.launches[count - 1])) --count;
  perform_first(graph, count, num_rows, num_seqs);
}

}  // namespace fd

// Begins to capture the launches of this thread.
FD_EXPORT void fd_capture_begin() { fd::capturing = std::make_unique<fd::OpGraph>(); }

// Ends the capture and returns the graph, which the caller must free.
FD_EXPORT void* fd_capture_end() { return fd::capturing.release(); }

FD_EXPORT void fd_graph_free(void* graph) { delete static_cast<fd::OpGraph*>(graph); }

FD_EXPORT int64_t fd_graph_size(const void* graph) {
  return static_cast<int64_t>(static_cast<const fd::OpGraph*>(graph)->launches.size());
}

// Returns one line per launch, valid until the thread's next call.
FD_EXPORT const char* fd_graph_describe(const void* graph) {
  static thread_local std::string lines;
  lines.clear();
  for (const fd::Launch& launch : static_cast<const fd::OpGraph*>(graph)->launches)
    lines += std::visit([](const auto& args) { return fd::describe(args); }, launch) + '\n';
  return lines.c_str();
}

// Performs the launches. Returns null or an error message, which is valid until the thread's next call. This is not a
// Paddle operator, because the cache misses of a call through Paddle take 0.2 ms when the processor's caches hold a
// model's weights.
FD_EXPORT const char* fd_graph_replay(const void* graph, int64_t num_rows, int64_t num_seqs) {
  static thread_local std::string message;
  try {
    fd::replay(*static_cast<const fd::OpGraph*>(graph), num_rows, num_seqs);
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
  return nullptr;
}
