// SPDX-License-Identifier: Apache-2.0
// Registration of virtual padding, sampling and verification with Paddle.
#include <algorithm>

#include "cpu_ops/checks.h"
#include "cpu_ops/recording.h"
#include "cpu_ops/sampling_kernels.h"

using fd::Argument;
using fd::require;
using paddle::Tensor;

namespace {

constexpr paddle::DataType kFloat = paddle::DataType::FLOAT32;
constexpr paddle::DataType kInt32 = paddle::DataType::INT32;
constexpr paddle::DataType kInt64 = paddle::DataType::INT64;
constexpr paddle::DataType kUint8 = paddle::DataType::UINT8;

// Paddle's in-place map must name one output per operator so that it exists; the other outputs of an operator are
// written through their inputs, as every buffer here outlives the step.

// Data of a CPU tensor of this dtype whose first axis is at least `count` long.
template <class T>
T* column(const char* op, const char* name, const Tensor& tensor, paddle::DataType dtype, int64_t count) {
  return Argument{op, name, tensor}.is(dtype).holds({count}).data<T>();
}

void virtual_padding(const Tensor& num_scheduled, const Tensor& num_computed, const Tensor& num_logits,
                     const Tensor& num_blocks, const Tensor& block_tables, Tensor& totals, const Tensor& cu_seqlens_q,
                     const Tensor& cu_logits_rows, const Tensor& kv_lens, const Tensor& batch_id_per_row,
                     const Tensor& positions, const Tensor& slot_mapping, const Tensor& logits_rows, int64_t num_seqs,
                     int64_t block_size) {
  constexpr const char* op = "virtual_padding";
  require(num_seqs >= 0, op, "num_seqs", "at least 0", num_seqs);
  require(block_size > 0, op, "block_size", "at least 1", block_size);
  Argument{op, "block_tables", block_tables}.is(kInt32).holds({num_seqs, -1});
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
            Tensor& token_ids, const Tensor& status, const Tensor& draft_survives, int64_t num_rows,
            bool keep_processed, bool stop_at_rejections) {
  constexpr const char* op = "sample";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  Argument{op, "logits", logits}.is(kFloat).holds({num_rows, -1});
  Argument{op, "float_params", float_params}.is(kFloat).holds({num_rows, fd::kNumFloatParams});
  Argument{op, "int_params", int_params}.is(kInt64).holds({num_rows, fd::kNumIntParams});
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
                                   column<uint8_t>(op, "draft_survives", draft_survives, kUint8, num_rows)};
  fd::launch(fd::SampleArgs{Argument{op, "logits", logits}.data<float>(), num_rows, logits.dims()[1], in, out,
                            keep_processed, stop_at_rejections});
}

// Checks that the first `count` entries lie in 0 .. limit - 1.
void require_below(const char* op, const char* name, const int32_t* values, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i)
    if (__builtin_expect(values[i] < 0 || values[i] >= limit, 0))
      fd::refuse(op, name, "0.." + std::to_string(limit - 1), std::to_string(values[i]));
}

void logprobs(const Tensor& logits, const Tensor& rows, const Tensor& chosen, Tensor& chosen_logprob,
              const Tensor& chosen_rank, const Tensor& top_ids, const Tensor& top_logprobs, int64_t num_rows,
              int64_t top_n) {
  constexpr const char* op = "logprobs";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(top_n >= 0, op, "top_n", "at least 0", top_n);
  Argument{op, "logits", logits}.is(kFloat).shaped({-1, -1});
  Argument{op, "top_ids", top_ids}.is(kInt32).holds({num_rows, -1});
  const int64_t stride = top_ids.dims()[1];
  require(top_n <= stride, op, "top_n", "at most the columns of top_ids", top_n);
  Argument{op, "top_logprobs", top_logprobs}.is(kFloat).holds({num_rows, stride});
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

// Drafts are int32 [rows], or the draft column of SamplingBatch.int_params.
void verify_draft_tokens(const Tensor& target, const Tensor& drafts, const Tensor& survives, const Tensor& first_row,
                         const Tensor& row_count, const Tensor& num_accepted, Tensor& emitted, bool relaxed,
                         int64_t accept_policy, int64_t num_seqs) {
  constexpr const char* op = "verify_draft_tokens";
  require(num_seqs >= 0, op, "num_seqs", "at least 0", num_seqs);
  require(accept_policy >= 0 && accept_policy <= 2, op, "accept_policy", "0, 1 or 2", accept_policy);
  const bool are_params = drafts.dtype() == kInt64;
  if (are_params) Argument{op, "draft_ids", drafts}.holds({0, fd::kNumIntParams});
  const int64_t num_rows = std::min({target.dims()[0], drafts.dims()[0], survives.dims()[0], emitted.dims()[0]});
  fd::launch(fd::VerifyDraftsArgs{{relaxed, static_cast<fd::AcceptPolicy>(accept_policy)},
                                  column<int32_t>(op, "target", target, kInt32, num_rows),
                                  are_params ? nullptr : column<int32_t>(op, "draft_ids", drafts, kInt32, num_rows),
                                  are_params ? drafts.data<int64_t>() : nullptr,
                                  column<uint8_t>(op, "survives", survives, kUint8, num_rows),
                                  column<int32_t>(op, "first_row", first_row, kInt32, num_seqs),
                                  column<int32_t>(op, "row_count", row_count, kInt32, num_seqs),
                                  column<int32_t>(op, "num_accepted", num_accepted, kInt32, num_seqs),
                                  column<int32_t>(op, "emitted", emitted, kInt32, num_rows),
                                  num_rows,
                                  num_seqs});
}

// counters uint32 [count, 4] as int64, key as one int64: the published test vectors go through here.
void philox4x32(const Tensor& counters, Tensor& words, int64_t key) {
  constexpr const char* op = "philox4x32";
  const Argument in{op, "counters", counters}, out{op, "words", words};
  in.is(kInt64).shaped({-1, 4});
  out.is(kInt64).shaped({in.size(0), 4});
  for (int64_t i = 0; i < in.size(0); ++i) {
    uint32_t c[4];
    for (int k = 0; k < 4; ++k) c[k] = static_cast<uint32_t>(in.data<int64_t>()[4 * i + k]);
    fd::philox4x32<fd::ScalarLanes>(c, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
    for (int k = 0; k < 4; ++k) out.data<int64_t>()[4 * i + k] = c[k];
  }
}

void gumbel_noise(Tensor& noise, int64_t seed, int64_t position) {
  const Argument out{"gumbel_noise", "noise", noise};
  out.is(kFloat).shaped({-1});
  fd::sampling_kernels().gumbel_noise(static_cast<uint64_t>(seed), static_cast<uint64_t>(position),
                                      static_cast<int32_t>(out.size(0)), out.data<float>());
}

// Noise of given words, by the scalar rule.
void gumbel_of_words(const Tensor& words, Tensor& noise) {
  const Argument in{"gumbel_of_words", "words", words}, out{"gumbel_of_words", "noise", noise};
  in.is(kInt64).shaped({-1});
  out.is(kFloat).shaped({in.size(0)});
  for (int64_t i = 0; i < in.size(0); ++i)
    out.data<float>()[i] = fd::gumbel_from_word<fd::ScalarLanes>(static_cast<uint32_t>(in.data<int64_t>()[i]));
}

}  // namespace

PD_BUILD_OP(fd_virtual_padding)
    .Inputs({"num_scheduled", "num_computed", "num_logits", "num_blocks", "block_tables", "totals", "cu_seqlens_q",
             "cu_logits_rows", "kv_lens", "batch_id_per_row", "positions", "slot_mapping", "logits_rows"})
    .Outputs({"totals_"})
    .Attrs({"num_seqs: int64_t", "block_size: int64_t"})
    .SetInplaceMap({{"totals", "totals_"}})
    .SetKernelFn(PD_KERNEL(virtual_padding));

PD_BUILD_OP(fd_sample)
    .Inputs({"logits", "float_params", "int_params", "history", "bias_ids", "bias_values", "banned_ids", "mask_words",
             "token_ids", "status", "draft_survives"})
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
    .Inputs({"target", "draft_ids", "survives", "first_row", "row_count", "num_accepted", "emitted"})
    .Outputs({"emitted_"})
    .Attrs({"relaxed: bool", "accept_policy: int64_t", "num_seqs: int64_t"})
    .SetInplaceMap({{"emitted", "emitted_"}})
    .SetKernelFn(PD_KERNEL(verify_draft_tokens));

PD_BUILD_OP(fd_philox4x32)
    .Inputs({"counters", "words"})
    .Outputs({"words_"})
    .Attrs({"key: int64_t"})
    .SetInplaceMap({{"words", "words_"}})
    .SetKernelFn(PD_KERNEL(philox4x32));

PD_BUILD_OP(fd_gumbel_noise)
    .Inputs({"noise"})
    .Outputs({"noise_"})
    .Attrs({"seed: int64_t", "position: int64_t"})
    .SetInplaceMap({{"noise", "noise_"}})
    .SetKernelFn(PD_KERNEL(gumbel_noise));

PD_BUILD_OP(fd_gumbel_of_words)
    .Inputs({"words", "noise"})
    .Outputs({"noise_"})
    .SetInplaceMap({{"noise", "noise_"}})
    .SetKernelFn(PD_KERNEL(gumbel_of_words));
