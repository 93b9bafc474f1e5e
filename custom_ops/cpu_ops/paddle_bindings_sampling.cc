// SPDX-License-Identifier: Apache-2.0
// Paddle bindings of virtual padding, sampling and verification.
#include <algorithm>

#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"
#include "cpu_ops/sampling_kernels.h"

using fd::Argument;
using fd::require;
using paddle::Tensor;

namespace {

constexpr paddle::DataType kFloat = paddle::DataType::FLOAT32;
constexpr paddle::DataType kInt32 = paddle::DataType::INT32;
constexpr paddle::DataType kInt64 = paddle::DataType::INT64;
constexpr paddle::DataType kUint8 = paddle::DataType::UINT8;

// Paddle requires at least one in-place output per operator, so each operator declares one. The other outputs are
// written through input tensors, which is safe because all buffers outlive the step.

// Checks that a CPU tensor has this dtype and at least `count` rows, and returns its data.
template <class T>
T* column(const char* op, const char* name, const Tensor& tensor, paddle::DataType dtype, int64_t count) {
  return Argument{op, name, tensor}.has_dtype(dtype).has_capacity({count}).data<T>();
}

void virtual_padding(const Tensor& num_scheduled, const Tensor& num_computed, const Tensor& num_logits,
                     const Tensor& num_blocks, const Tensor& block_tables, Tensor& totals, const Tensor& cu_seqlens_q,
                     const Tensor& cu_logits_rows, const Tensor& kv_lens, const Tensor& batch_id_per_row,
                     const Tensor& positions, const Tensor& slot_mapping, const Tensor& logits_rows, int64_t num_seqs,
                     int64_t block_size) {
  constexpr const char* op = "virtual_padding";
  require(num_seqs >= 0, op, "num_seqs", "at least 0", num_seqs);
  require(block_size > 0, op, "block_size", "at least 1", block_size);
  Argument{op, "block_tables", block_tables}.has_dtype(kInt32).has_capacity({num_seqs, -1});
  const fd::StepShape shape = {column<int32_t>(op, "num_scheduled", num_scheduled, kInt32, num_seqs),
                               column<int32_t>(op, "num_computed", num_computed, kInt32, num_seqs),
                               column<int32_t>(op, "num_logits", num_logits, kInt32, num_seqs),
                               column<int32_t>(op, "num_blocks", num_blocks, kInt32, num_seqs),
                               block_tables.data<int32_t>(),
                               num_seqs,
                               block_tables.dims()[1],
                               block_size,
                               positions.dims()[0]};
  const fd::StepIndex out = {column<int32_t>(op, "totals", totals, kInt32, 2),
                             column<int32_t>(op, "cu_seqlens_q", cu_seqlens_q, kInt32, num_seqs + 1),
                             column<int32_t>(op, "cu_logits_rows", cu_logits_rows, kInt32, num_seqs + 1),
                             column<int32_t>(op, "kv_lens", kv_lens, kInt32, num_seqs),
                             column<int32_t>(op, "batch_id_per_row", batch_id_per_row, kInt32, shape.max_rows),
                             column<int32_t>(op, "positions", positions, kInt32, shape.max_rows),
                             column<int32_t>(op, "slot_mapping", slot_mapping, kInt32, shape.max_rows),
                             column<int32_t>(op, "logits_rows", logits_rows, kInt32, shape.max_rows)};
  fd::launch(fd::VirtualPaddingArgs{shape, out, fd::kAsScheduled});
}

void sample(const Tensor& logits, const Tensor& float_params, const Tensor& int_params, const Tensor& history,
            const Tensor& bias_ids, const Tensor& bias_values, const Tensor& banned_ids, const Tensor& mask_words,
            Tensor& token_ids, const Tensor& status, const Tensor& draft_is_allowed, int64_t num_rows,
            bool keep_processed, bool stop_at_rejections) {
  constexpr const char* op = "sample";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  Argument{op, "logits", logits}.has_dtype(kFloat).has_capacity({num_rows, -1});
  Argument{op, "float_params", float_params}.has_dtype(kFloat).has_capacity({num_rows, fd::kNumFloatParams});
  Argument{op, "int_params", int_params}.has_dtype(kInt64).has_capacity({num_rows, fd::kNumIntParams});
  const int64_t num_bias = bias_ids.dims()[0];
  const fd::SamplingInputs in = {float_params.data<float>(),
                                 int_params.data<int64_t>(),
                                 column<int32_t>(op, "history", history, kInt32, 0),
                                 column<int32_t>(op, "bias_ids", bias_ids, kInt32, 0),
                                 column<float>(op, "bias_values", bias_values, kFloat, num_bias),
                                 column<int32_t>(op, "banned_ids", banned_ids, kInt32, 0),
                                 column<int32_t>(op, "mask_words", mask_words, kInt32, 0),
                                 history.dims()[0],
                                 num_bias,
                                 banned_ids.dims()[0],
                                 mask_words.dims()[0]};
  const fd::SamplingOutputs out = {column<int32_t>(op, "token_ids", token_ids, kInt32, num_rows),
                                   column<int32_t>(op, "status", status, kInt32, num_rows),
                                   column<uint8_t>(op, "draft_is_allowed", draft_is_allowed, kUint8, num_rows)};
  fd::launch(fd::SampleArgs{Argument{op, "logits", logits}.data<float>(), num_rows, logits.dims()[1], in, out,
                            keep_processed, stop_at_rejections});
}

// Checks that the first `count` values are in 0 .. limit - 1.
void require_below(const char* op, const char* name, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (__builtin_expect(values[i] < 0 || values[i] >= limit, 0))
      fd::raise_invalid(op, name, "0.." + std::to_string(limit - 1), std::to_string(values[i]));
}

void logprobs(const Tensor& logits, const Tensor& rows, const Tensor& chosen, Tensor& chosen_logprob,
              const Tensor& chosen_rank, const Tensor& top_ids, const Tensor& top_logprobs, int64_t num_rows,
              int64_t top_n) {
  constexpr const char* op = "logprobs";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(top_n >= 0, op, "top_n", "at least 0", top_n);
  Argument{op, "logits", logits}.has_dtype(kFloat).has_shape({-1, -1});
  Argument{op, "top_ids", top_ids}.has_dtype(kInt32).has_capacity({num_rows, -1});
  const int64_t stride = top_ids.dims()[1];
  require(top_n <= stride, op, "top_n", "at most the columns of top_ids", top_n);
  Argument{op, "top_logprobs", top_logprobs}.has_dtype(kFloat).has_capacity({num_rows, stride});
  const int32_t* row = column<int32_t>(op, "rows", rows, kInt32, num_rows);
  const int32_t* token = column<int32_t>(op, "chosen", chosen, kInt32, num_rows);
  require_below(op, "rows", row, num_rows, logits.dims()[0]);
  require_below(op, "chosen", token, num_rows, logits.dims()[1]);
  fd::logprobs(logits.data<float>(), logits.dims()[1], row, token, num_rows, static_cast<int32_t>(top_n),
               {column<float>(op, "chosen_logprob", chosen_logprob, kFloat, num_rows),
                column<int32_t>(op, "chosen_rank", chosen_rank, kInt32, num_rows),
                Argument{op, "top_ids", top_ids}.data<int32_t>(),
                Argument{op, "top_logprobs", top_logprobs}.data<float>(), stride});
}

void verify_draft_tokens(const Tensor& target, const Tensor& int_params, const Tensor& draft_is_allowed,
                         const Tensor& first_row, const Tensor& row_count, const Tensor& num_accepted, Tensor& emitted,
                         bool relaxed, int64_t accept_policy, int64_t num_seqs) {
  constexpr const char* op = "verify_draft_tokens";
  require(num_seqs >= 0, op, "num_seqs", "at least 0", num_seqs);
  require(accept_policy >= 0 && accept_policy <= 2, op, "accept_policy", "0, 1 or 2", accept_policy);
  Argument{op, "int_params", int_params}.has_dtype(kInt64).has_capacity({0, fd::kNumIntParams});
  const int64_t num_rows =
      std::min({target.dims()[0], int_params.dims()[0], draft_is_allowed.dims()[0], emitted.dims()[0]});
  fd::launch(fd::VerifyDraftsArgs{{relaxed, static_cast<fd::AcceptPolicy>(accept_policy)},
                                  column<int32_t>(op, "target", target, kInt32, num_rows),
                                  int_params.data<int64_t>(),
                                  column<uint8_t>(op, "draft_is_allowed", draft_is_allowed, kUint8, num_rows),
                                  column<int32_t>(op, "first_row", first_row, kInt32, num_seqs),
                                  column<int32_t>(op, "row_count", row_count, kInt32, num_seqs),
                                  column<int32_t>(op, "num_accepted", num_accepted, kInt32, num_seqs),
                                  column<int32_t>(op, "emitted", emitted, kInt32, num_rows),
                                  num_rows,
                                  num_seqs});
}

void scatter_logits(const Tensor& x, const Tensor& ids, Tensor& out, int64_t num_rows) {
  constexpr const char* op = "scatter_logits";
  const Argument source{op, "x", x}, columns{op, "ids", ids}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  source.has_dtype(paddle::DataType::FLOAT32).has_capacity({num_rows, -1});
  columns.has_dtype(paddle::DataType::INT32).has_shape({source.size(1)});
  output.has_dtype(paddle::DataType::FLOAT32).has_capacity({num_rows, -1});
  fd::launch(fd::ScatterLogitsArgs{source.data<float>(), columns.data<int32_t>(), output.data<float>(), num_rows,
                                   source.size(1), output.size(1)});
}

void norm_gelu(const Tensor& x, const Tensor& weight, const Tensor& bias, Tensor& out, int64_t num_rows, float eps) {
  constexpr const char* op = "norm_gelu";
  const Argument input{op, "x", x}, scale{op, "weight", weight}, offset{op, "bias", bias}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  input.has_capacity({num_rows, -1});
  const int64_t size = input.size(1);
  scale.has_dtype(x.dtype()).has_shape({size});
  offset.has_dtype(x.dtype()).has_shape({size});
  output.has_dtype(x.dtype()).has_capacity({num_rows, size});
  fd::launch(fd::NormGeluArgs{input.data(), scale.data(), offset.data(), output.data(), num_rows, size, eps,
                              input.float_dtype()});
}

}  // namespace

PD_BUILD_OP(fd_norm_gelu)
    .Inputs({"x", "weight", "bias", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t", "eps: float"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(norm_gelu));

PD_BUILD_OP(fd_scatter_logits)
    .Inputs({"x", "ids", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(scatter_logits));

PD_BUILD_OP(fd_virtual_padding)
    .Inputs({"num_scheduled", "num_computed", "num_logits", "num_blocks", "block_tables", "totals", "cu_seqlens_q",
             "cu_logits_rows", "kv_lens", "batch_id_per_row", "positions", "slot_mapping", "logits_rows"})
    .Outputs({"totals_"})
    .Attrs({"num_seqs: int64_t", "block_size: int64_t"})
    .SetInplaceMap({{"totals", "totals_"}})
    .SetKernelFn(PD_KERNEL(virtual_padding));

PD_BUILD_OP(fd_sample)
    .Inputs({"logits", "float_params", "int_params", "history", "bias_ids", "bias_values", "banned_ids", "mask_words",
             "token_ids", "status", "draft_is_allowed"})
    .Outputs({"token_ids_"})
    .Attrs({"num_rows: int64_t", "keep_processed: bool", "stop_at_rejections: bool"})
    .SetInplaceMap({{"token_ids", "token_ids_"}})
    .SetKernelFn(PD_KERNEL(sample));

PD_BUILD_OP(fd_logprobs)
    .Inputs({"logits", "rows", "chosen", "chosen_logprob", "chosen_rank", "top_ids", "top_logprobs"})
    .Outputs({"chosen_logprob_"})
    .Attrs({"num_rows: int64_t", "top_n: int64_t"})
    .SetInplaceMap({{"chosen_logprob", "chosen_logprob_"}})
    .SetKernelFn(PD_KERNEL(logprobs));

PD_BUILD_OP(fd_verify_draft_tokens)
    .Inputs({"target", "int_params", "draft_is_allowed", "first_row", "row_count", "num_accepted", "emitted"})
    .Outputs({"emitted_"})
    .Attrs({"relaxed: bool", "accept_policy: int64_t", "num_seqs: int64_t"})
    .SetInplaceMap({{"emitted", "emitted_"}})
    .SetKernelFn(PD_KERNEL(verify_draft_tokens));
