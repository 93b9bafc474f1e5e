// SPDX-License-Identifier: Apache-2.0
// Drafting with a model: all draft passes, with indexing, gathering and sampling between them, in one native call.
//
//   pass 0   the rows of each sequence that the model has not computed yet; the last row leads to the first draft
//   pass k   while there is a stage k: the same number of rows, one position further on
//            then one row per sequence, that of the previous draft, through the last stage
//
// A DraftLoop holds the addresses of its buffers, which are checked once (fastdeploy/ops/drafting.py).
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "common/export.h"
#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"
#include "cpu_ops/sampling.h"
#include "cpu_ops/virtual_padding.h"

using fd::Argument;
using fd::require;
using paddle::Tensor;

namespace {

constexpr const char* kOp = "draft";
constexpr paddle::DataType kFloat = paddle::DataType::FLOAT32;
constexpr paddle::DataType kInt32 = paddle::DataType::INT32;
constexpr paddle::DataType kInt64 = paddle::DataType::INT64;

struct DraftLoop {
  std::vector<const fd::OpGraph*> stages;
  std::vector<const fd::OpGraph*> heads;   // by stage, then by vocab_sizes: logits of rows head_rows of `output`
  std::vector<const float*> block_maxima;  // of the logits of each head, or null
  std::vector<int64_t> vocab_sizes;        // numbers of first ids that drafts may be sampled from
  fd::StepShape shape;
  fd::StepIndex index;
  int32_t* num_scheduled;     // writable array of `shape`
  int32_t* num_computed;      // writable array of `shape`
  int32_t* token_ids;         // [max_rows]
  const int32_t* target_ids;  // [vocab_sizes[0]], what ids sampled with vocab_index 0 stand for; or null
  const int32_t* num_drafts;  // [max_seqs], descending
  int32_t* drafts;            // [max_seqs, max_drafts], -1 where no token could be sampled
  const char* states;         // [num_states, row_bytes] by slot; the last is the state before the first token; or null
  char* input_states;         // [max_rows, row_bytes], the state of the position before each row; or null
  const char* output;         // [max_rows, row_bytes], written by every stage
  int32_t* head_rows;         // [max_head_rows], rows of `output` whose logits are computed
  float* logits;              // [max_head_rows, one of vocab_sizes]
  // Inputs and outputs of sampling, one row per sequence (SamplingInputs, SamplingOutputs).
  float* float_params;
  int64_t* int_params;
  int32_t* drafted;
  int32_t* status;
  uint8_t* draft_is_allowed;
  int64_t max_seqs, max_drafts, num_states, row_bytes, max_head_rows;
};

void copy_row(const DraftLoop& d, char* to, int64_t row, const char* from, int64_t from_row) {
  std::memcpy(to + row * d.row_bytes, from + from_row * d.row_bytes, static_cast<size_t>(d.row_bytes));
}

// Copies to `input_states` the state of the position before each row.
void gather_states(const DraftLoop& d) {
  const int32_t block_size = static_cast<int32_t>(d.shape.block_size);
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) {
    const int32_t before = d.num_computed[b] - 1;
    const int32_t* table = d.shape.block_tables + b * d.shape.table_stride;
    int64_t slot =
        before < 0 ? d.num_states - 1 : int64_t{table[before / block_size]} * block_size + before % block_size;
    for (int32_t row = d.index.cu_seqlens_q[b]; row < d.index.cu_seqlens_q[b + 1]; ++row) {
      require(slot >= 0 && slot < d.num_states, kOp, "block_tables", "slots that have states", slot);
      copy_row(d, d.input_states, row, d.states, slot);
      slot = d.index.slot_mapping[row];
    }
  }
}

// Computes the index arrays of the next pass.
void index_rows(DraftLoop& d, int64_t num_seqs) {
  require(num_seqs >= 0 && num_seqs <= d.max_seqs, kOp, "num_seqs", "at most the sequences of the buffers", num_seqs);
  d.shape.num_seqs = num_seqs;
  if (const std::string wrong = fd::check_step_shape(d.shape); !wrong.empty())
    PADDLE_THROW(common::errors::InvalidArgument("%s: %s", kOp, wrong.c_str()));
  fd::virtual_padding(d.shape, d.index);
}

fd::SamplingInputs sampling_inputs(const DraftLoop& d, int64_t first) {
  fd::SamplingInputs in{};  // without lists: drafts use filters and noise only
  in.float_params = d.float_params + first * fd::kNumFloatParams;
  in.int_params = d.int_params + first * fd::kNumIntParams;
  return in;
}

// Samples a token from the last row of every sequence, in batches of as many sequences as the logits have rows.
void sample_drafts(const DraftLoop& d, int64_t stage, int64_t pass, int64_t vocab_index) {
  const int64_t num_vocab_sizes = static_cast<int64_t>(d.vocab_sizes.size()), vocab_size = d.vocab_sizes[vocab_index];
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) {
    require(d.num_scheduled[b] > 0, kOp, "num_scheduled", "a row of every sequence", d.num_scheduled[b]);
    d.int_params[b * fd::kNumIntParams + fd::kPosition] = d.index.kv_lens[b];
  }
  for (int64_t first = 0; first < d.shape.num_seqs; first += d.max_head_rows) {
    const int64_t count = std::min(d.max_head_rows, d.shape.num_seqs - first);
    for (int64_t i = 0; i < count; ++i) d.head_rows[i] = d.index.cu_seqlens_q[first + i + 1] - 1;
    const int64_t head = stage * num_vocab_sizes + vocab_index;
    fd::replay(*d.heads[head], count, 0);
    fd::SamplingInputs in = sampling_inputs(d, first);
    in.block_maxima = d.block_maxima[head];
    if (const std::string wrong = fd::check_sampling_inputs(in, count, vocab_size); !wrong.empty())
      PADDLE_THROW(common::errors::InvalidArgument("%s: %s", kOp, wrong.c_str()));
    fd::sample(d.logits, count, vocab_size, in, {d.drafted + first, d.status + first, d.draft_is_allowed + first},
               false, false);
  }
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) {
    if (vocab_index == 0 && d.target_ids != nullptr && d.drafted[b] >= 0) d.drafted[b] = d.target_ids[d.drafted[b]];
    d.drafts[b * d.max_drafts + pass] = d.drafted[b];
  }
}

// Moves every row to the next position: it gets the token of the row after it, the last row gets the draft.
void shift_rows(const DraftLoop& d, int64_t num_seqs) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    const int32_t first = d.index.cu_seqlens_q[b], last = d.index.cu_seqlens_q[b + 1] - 1;
    std::memmove(d.token_ids + first, d.token_ids + first + 1, sizeof(int32_t) * static_cast<size_t>(last - first));
    d.token_ids[last] = std::max(d.drafted[b], 0);  // drafts after one that could not be sampled are undefined
    ++d.num_computed[b];
  }
  if (d.input_states == nullptr) return;
  for (int32_t row = 0; row < d.index.cu_seqlens_q[num_seqs]; ++row) copy_row(d, d.input_states, row, d.output, row);
}

// Leaves one row per sequence, which holds the draft at the next position.
void advance_to_drafts(const DraftLoop& d, int64_t num_seqs) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    if (d.input_states != nullptr) copy_row(d, d.input_states, b, d.output, d.index.cu_seqlens_q[b + 1] - 1);
    d.token_ids[b] = std::max(d.drafted[b], 0);
    d.num_computed[b] = d.index.kv_lens[b];
    d.num_scheduled[b] = 1;
  }
}

// Returns the number of sequences that need a draft from this pass.
int64_t num_active(const DraftLoop& d, int64_t num_seqs, int64_t pass) {
  while (num_seqs > 0 && d.num_drafts[num_seqs - 1] <= pass) --num_seqs;
  return num_seqs;
}

// Writes the keys and values of one stage. Stage 0 reads states; the others read the output of the previous call.
void fill_stage(Tensor&, int64_t loop, int64_t stage, int64_t num_seqs) {
  DraftLoop& d = *reinterpret_cast<DraftLoop*>(loop);
  const int64_t last = static_cast<int64_t>(d.stages.size()) - 1;
  require(stage >= 0 && stage <= last, kOp, "stage", "the index of a stage", stage);
  index_rows(d, num_seqs);
  const int32_t num_rows = d.index.totals[0];
  if (d.states != nullptr && stage == 0) gather_states(d);
  if (d.input_states != nullptr && stage > 0)
    for (int32_t row = 0; row < num_rows; ++row) copy_row(d, d.input_states, row, d.output, row);
  stage < last ? fd::replay(*d.stages[stage], num_rows, num_seqs)
               : fd::replay_caches(*d.stages[stage], num_rows, num_seqs);
}

void draft(Tensor&, int64_t loop, int64_t num_seqs, int64_t vocab_index) {
  DraftLoop& d = *reinterpret_cast<DraftLoop*>(loop);
  require(vocab_index >= 0 && vocab_index < static_cast<int64_t>(d.vocab_sizes.size()), kOp, "vocab_index",
          "an index into vocab_sizes", vocab_index);
  require(num_seqs <= d.max_seqs, kOp, "num_seqs", "at most the sequences of the buffers", num_seqs);
  for (int64_t b = 1; b < num_seqs; ++b)
    require(d.num_drafts[b] <= d.num_drafts[b - 1], kOp, "num_drafts", "descending numbers", d.num_drafts[b]);
  const int64_t last = static_cast<int64_t>(d.stages.size()) - 1;
  num_seqs = num_active(d, num_seqs, 0);
  for (int64_t pass = 0; num_seqs > 0; ++pass) {
    require(pass < d.max_drafts, kOp, "num_drafts", "at most the drafts of the buffers", d.num_drafts[0]);
    index_rows(d, num_seqs);
    if (d.states != nullptr && pass == 0) gather_states(d);
    const int64_t stage = std::min(pass, last);
    fd::replay(*d.stages[stage], d.index.totals[0], num_seqs);
    sample_drafts(d, stage, pass, vocab_index);
    num_seqs = num_active(d, num_seqs, pass + 1);
    pass < last ? shift_rows(d, num_seqs) : advance_to_drafts(d, num_seqs);
  }
}

// Makes every head write block maxima if it can; returns where, or null.
std::vector<const float*> attach_head_maxima(const std::vector<int64_t>& heads, const Tensor& logits,
                                             const std::vector<int64_t>& vocab_sizes) {
  std::vector<const float*> maxima;
  for (size_t i = 0; i < heads.size(); ++i)
    maxima.push_back(fd::attach_block_maxima(*reinterpret_cast<fd::OpGraph*>(heads[i]), logits.data<float>(),
                                             vocab_sizes[i % vocab_sizes.size()]));
  return maxima;
}

std::vector<const fd::OpGraph*> graphs_at(const std::vector<int64_t>& handles) {
  std::vector<const fd::OpGraph*> graphs;
  for (int64_t handle : handles) graphs.push_back(reinterpret_cast<const fd::OpGraph*>(handle));
  return graphs;
}

// Writes the address of a DraftLoop with these buffers to `handle`.
void bind(const Tensor& num_scheduled, const Tensor& num_computed, const Tensor& num_logits, const Tensor& num_blocks,
          const Tensor& block_tables, const Tensor& totals, const Tensor& cu_seqlens_q, const Tensor& cu_logits_rows,
          const Tensor& kv_lens, const Tensor& batch_id_per_row, const Tensor& positions, const Tensor& slot_mapping,
          const Tensor& logits_rows, const Tensor& token_ids, const Tensor& num_drafts, const Tensor& drafts,
          const paddle::optional<Tensor>& target_ids, const paddle::optional<Tensor>& states,
          const paddle::optional<Tensor>& input_states, const Tensor& output, const Tensor& head_rows,
          const Tensor& logits, const Tensor& float_params, const Tensor& int_params, const Tensor& drafted,
          const Tensor& status, const Tensor& draft_is_allowed, Tensor& handle, const std::vector<int64_t>& stages,
          const std::vector<int64_t>& heads, const std::vector<int64_t>& vocab_sizes, int64_t block_size) {
  const int64_t max_seqs = num_scheduled.dims()[0], max_rows = token_ids.dims()[0];
  auto ints = [](const char* name, const Tensor& tensor, int64_t count) {
    return Argument{kOp, name, tensor}.has_dtype(kInt32).has_capacity({count}).template data<int32_t>();
  };
  Argument{kOp, "block_tables", block_tables}.has_dtype(kInt32).has_capacity({max_seqs, -1});
  Argument{kOp, "drafts", drafts}.has_dtype(kInt32).has_capacity({max_seqs, -1});
  Argument{kOp, "logits", logits}.has_dtype(kFloat).has_shape({-1, -1});
  Argument{kOp, "output", output}.has_capacity({max_rows, -1});
  Argument{kOp, "float_params", float_params}.has_dtype(kFloat).has_capacity({max_seqs, fd::kNumFloatParams});
  Argument{kOp, "int_params", int_params}.has_dtype(kInt64).has_capacity({max_seqs, fd::kNumIntParams});
  Argument{kOp, "draft_is_allowed", draft_is_allowed}.has_dtype(paddle::DataType::UINT8).has_capacity({max_seqs});
  Argument{kOp, "handle", handle}.has_dtype(kInt64).has_shape({1});
  require(!stages.empty() && stages.size() * vocab_sizes.size() == heads.size(), kOp, "heads",
          "one for every stage and vocab_size, at least one", static_cast<int64_t>(heads.size()));
  for (int64_t size : vocab_sizes)
    require(size > 0 && size <= logits.dims()[1], kOp, "vocab_sizes", "at most the logits of a row", size);
  require(!states.is_initialized() || input_states.is_initialized(), kOp, "input_states", "given where states are", 0);
  auto d = std::make_unique<DraftLoop>();
  d->stages = graphs_at(stages);
  d->heads = graphs_at(heads);
  d->block_maxima = attach_head_maxima(heads, logits, vocab_sizes);
  d->vocab_sizes = vocab_sizes;
  d->max_seqs = max_seqs;
  d->max_drafts = drafts.dims()[1];
  d->num_scheduled = ints("num_scheduled", num_scheduled, max_seqs);
  d->num_computed = ints("num_computed", num_computed, max_seqs);
  d->shape = {d->num_scheduled,
              d->num_computed,
              ints("num_logits", num_logits, max_seqs),
              ints("num_blocks", num_blocks, max_seqs),
              block_tables.data<int32_t>(),
              0,
              block_tables.dims()[1],
              block_size,
              max_rows};
  d->index = {ints("totals", totals, 2),
              ints("cu_seqlens_q", cu_seqlens_q, max_seqs + 1),
              ints("cu_logits_rows", cu_logits_rows, max_seqs + 1),
              ints("kv_lens", kv_lens, max_seqs),
              ints("batch_id_per_row", batch_id_per_row, max_rows),
              ints("positions", positions, max_rows),
              ints("slot_mapping", slot_mapping, max_rows),
              ints("logits_rows", logits_rows, max_rows)};
  d->token_ids = ints("token_ids", token_ids, max_rows);
  d->num_drafts = ints("num_drafts", num_drafts, max_seqs);
  d->drafts = Argument{kOp, "drafts", drafts}.data<int32_t>();
  d->output = Argument{kOp, "output", output}.data<char>();
  d->row_bytes = output.dims()[1] * static_cast<int64_t>(phi::SizeOf(output.dtype()));
  if (target_ids)
    d->target_ids =
        Argument{kOp, "target_ids", *target_ids}.has_dtype(kInt32).has_shape({vocab_sizes[0]}).data<int32_t>();
  if (states) {
    const Argument state_rows{kOp, "states", *states};
    state_rows.has_dtype(output.dtype()).has_shape({-1, output.dims()[1]});
    d->states = state_rows.data<char>();
    d->num_states = state_rows.size(0);
  }
  if (input_states) {
    const Argument input_rows{kOp, "input_states", *input_states};
    input_rows.has_dtype(output.dtype()).has_capacity({max_rows, output.dims()[1]});
    d->input_states = input_rows.data<char>();
  }
  d->max_head_rows = logits.dims()[0];
  d->head_rows = ints("head_rows", head_rows, d->max_head_rows);
  d->logits = Argument{kOp, "logits", logits}.data<float>();
  d->float_params = Argument{kOp, "float_params", float_params}.data<float>();
  d->int_params = Argument{kOp, "int_params", int_params}.data<int64_t>();
  d->drafted = ints("drafted", drafted, max_seqs);
  d->status = ints("status", status, max_seqs);
  d->draft_is_allowed = Argument{kOp, "draft_is_allowed", draft_is_allowed}.data<uint8_t>();
  *handle.data<int64_t>() = reinterpret_cast<int64_t>(d.release());
}

}  // namespace

FD_EXPORT void fd_draft_loop_free(void* loop) { delete static_cast<DraftLoop*>(loop); }

PD_BUILD_OP(fd_bind_draft_loop)
    .Inputs({"num_scheduled",
             "num_computed",
             "num_logits",
             "num_blocks",
             "block_tables",
             "totals",
             "cu_seqlens_q",
             "cu_logits_rows",
             "kv_lens",
             "batch_id_per_row",
             "positions",
             "slot_mapping",
             "logits_rows",
             "token_ids",
             "num_drafts",
             "drafts",
             paddle::Optional("target_ids"),
             paddle::Optional("states"),
             paddle::Optional("input_states"),
             "output",
             "head_rows",
             "logits",
             "float_params",
             "int_params",
             "drafted",
             "status",
             "draft_is_allowed",
             "handle"})
    .Outputs({"handle_"})
    .Attrs({"stages: std::vector<int64_t>", "heads: std::vector<int64_t>", "vocab_sizes: std::vector<int64_t>",
            "block_size: int64_t"})
    .SetInplaceMap({{"handle", "handle_"}})
    .SetKernelFn(PD_KERNEL(bind));

PD_BUILD_OP(fd_fill_stage)
    .Inputs({"output"})
    .Outputs({"output_"})
    .Attrs({"loop: int64_t", "stage: int64_t", "num_seqs: int64_t"})
    .SetInplaceMap({{"output", "output_"}})
    .SetKernelFn(PD_KERNEL(fill_stage));

PD_BUILD_OP(fd_draft)
    .Inputs({"drafts"})
    .Outputs({"drafts_"})
    .Attrs({"loop: int64_t", "num_seqs: int64_t", "vocab_index: int64_t"})
    .SetInplaceMap({{"drafts", "drafts_"}})
    .SetKernelFn(PD_KERNEL(draft));
