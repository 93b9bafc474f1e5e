// SPDX-License-Identifier: Apache-2.0
// Drafting with a model: its calls one after the other with all that lies between them, in one call from Python.
//
//   call 0   the rows of each sequence that the model has not computed, the last of which leads to the first draft
//   call k   while there is a k-th stage: the same number of rows, one position further on
//            then one row per sequence, that of the draft before, through the last stage
//
// A drafting holds the addresses of its buffers, which are checked once.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu_ops/checks.h"
#include "cpu_ops/recording.h"
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

struct Drafting {
  std::vector<const fd::Recording*> stages;
  std::vector<const fd::Recording*> heads;  // of a stage by `vocab_sizes`: `chosen_rows` of `output` to `logits`
  std::vector<const float*> block_maxima;   // that each head tells of its logits, or null
  std::vector<int64_t> vocab_sizes;         // first ids that a draft is drawn from
  fd::StepShape shape;
  fd::StepIndex index;
  int32_t* num_scheduled;  // of `shape`, as the next
  int32_t* num_computed;
  int32_t* token_ids;         // [max_rows]
  const int32_t* num_drafts;  // [max_seqs], none above one before it
  int32_t* drafts;            // [max_seqs, max_drafts], -1 where none could be drawn
  const char* states;         // [num_states, row_bytes] by slot, the last one of what precedes a text; or null
  char* source;               // [max_rows, row_bytes], what each row reads beside its token; or null
  const char* output;         // [max_rows, row_bytes], what every stage writes
  int32_t* chosen_rows;       // [max_chosen]
  float* logits;              // [max_chosen, one of vocab_sizes]
  float* float_params;        // [max_seqs, ...] of a SamplingBatch, as the next
  int64_t* int_params;
  int32_t* chosen;
  int32_t* status;
  uint8_t* survives;
  int64_t max_seqs, max_drafts, num_states, row_bytes, max_chosen;
};

void copy_row(const Drafting& d, char* to, int64_t row, const char* from, int64_t from_row) {
  std::memcpy(to + row * d.row_bytes, from + from_row * d.row_bytes, static_cast<size_t>(d.row_bytes));
}

// Lets every row read the state one position before it.
void read_states(const Drafting& d) {
  const int32_t block_size = static_cast<int32_t>(d.shape.block_size);
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) {
    const int32_t before = d.num_computed[b] - 1;
    const int32_t* table = d.shape.block_tables + b * d.shape.table_stride;
    int64_t slot =
        before < 0 ? d.num_states - 1 : int64_t{table[before / block_size]} * block_size + before % block_size;
    for (int32_t row = d.index.cu_seqlens_q[b]; row < d.index.cu_seqlens_q[b + 1]; ++row) {
      require(slot >= 0 && slot < d.num_states, kOp, "block_tables", "blocks that have states", slot);
      copy_row(d, d.source, row, d.states, slot);
      slot = d.index.slot_mapping[row];
    }
  }
}

// Describes the rows of the next call.
void index_rows(Drafting& d, int64_t num_seqs) {
  require(num_seqs >= 0 && num_seqs <= d.max_seqs, kOp, "num_seqs", "at most the sequences bound", num_seqs);
  d.shape.num_seqs = num_seqs;
  if (const std::string wrong = fd::check_step_shape(d.shape); !wrong.empty())
    PADDLE_THROW(common::errors::InvalidArgument("%s: %s", kOp, wrong.c_str()));
  fd::virtual_padding(d.shape, d.index);
}

fd::SamplingInputs rules_of(const Drafting& d, int64_t first) {
  fd::SamplingInputs in{};  // no lists: drafts follow filters and noise alone
  in.float_params = d.float_params + first * fd::kNumFloatParams;
  in.int_params = d.int_params + first * fd::kNumIntParams;
  return in;
}

// Draws a token for the last row of every sequence, as many at a time as there is room for logits.
void choose(const Drafting& d, int64_t stage, int64_t step, int64_t size) {
  const int64_t num_sizes = static_cast<int64_t>(d.vocab_sizes.size()), vocab_size = d.vocab_sizes[size];
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) {
    require(d.num_scheduled[b] > 0, kOp, "num_scheduled", "a row of every sequence", d.num_scheduled[b]);
    d.int_params[b * fd::kNumIntParams + fd::kPosition] = d.index.kv_lens[b];
  }
  for (int64_t first = 0; first < d.shape.num_seqs; first += d.max_chosen) {
    const int64_t count = std::min(d.max_chosen, d.shape.num_seqs - first);
    for (int64_t i = 0; i < count; ++i) d.chosen_rows[i] = d.index.cu_seqlens_q[first + i + 1] - 1;
    const int64_t head = stage * num_sizes + size;
    fd::replay(*d.heads[head], count, 0);
    fd::SamplingInputs in = rules_of(d, first);
    in.block_maxima = d.block_maxima[head];
    if (const std::string wrong = fd::check_sampling_inputs(in, count, vocab_size); !wrong.empty())
      PADDLE_THROW(common::errors::InvalidArgument("%s: %s", kOp, wrong.c_str()));
    fd::sample(d.logits, count, vocab_size, in, {d.chosen + first, d.status + first, d.survives + first}, false, false);
  }
  for (int64_t b = 0; b < d.shape.num_seqs; ++b) d.drafts[b * d.max_drafts + step] = d.chosen[b];
}

// Moves every row one position on: it takes the token of the row behind it, the last one the draft.
void shift_rows(const Drafting& d, int64_t num_seqs) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    const int32_t first = d.index.cu_seqlens_q[b], last = d.index.cu_seqlens_q[b + 1] - 1;
    std::memmove(d.token_ids + first, d.token_ids + first + 1, sizeof(int32_t) * static_cast<size_t>(last - first));
    d.token_ids[last] = std::max(d.chosen[b], 0);  // behind what could not be drawn nothing is read
    ++d.num_computed[b];
  }
  if (d.source == nullptr) return;
  for (int32_t row = 0; row < d.index.cu_seqlens_q[num_seqs]; ++row) copy_row(d, d.source, row, d.output, row);
}

// Leaves one row per sequence, its draft behind its last row.
void follow_drafts(const Drafting& d, int64_t num_seqs) {
  for (int64_t b = 0; b < num_seqs; ++b) {
    if (d.source != nullptr) copy_row(d, d.source, b, d.output, d.index.cu_seqlens_q[b + 1] - 1);
    d.token_ids[b] = std::max(d.chosen[b], 0);
    d.num_computed[b] = d.index.kv_lens[b];
    d.num_scheduled[b] = 1;
  }
}

int64_t num_drafting(const Drafting& d, int64_t num_seqs, int64_t step) {
  while (num_seqs > 0 && d.num_drafts[num_seqs - 1] <= step) --num_seqs;
  return num_seqs;
}

// Fills the caches of one stage: the first reads states, another what the last call wrote for the same rows.
void fill_stage(Tensor&, int64_t drafting, int64_t stage, int64_t num_seqs) {
  Drafting& d = *reinterpret_cast<Drafting*>(drafting);
  const int64_t last = static_cast<int64_t>(d.stages.size()) - 1;
  require(stage >= 0 && stage <= last, kOp, "stage", "one that is bound", stage);
  index_rows(d, num_seqs);
  const int32_t num_rows = d.index.totals[0];
  if (d.source != nullptr && stage == 0) read_states(d);
  if (d.source != nullptr && stage > 0)
    for (int32_t row = 0; row < num_rows; ++row) copy_row(d, d.source, row, d.output, row);
  stage < last ? fd::replay(*d.stages[stage], num_rows, num_seqs)
               : fd::replay_caches(*d.stages[stage], num_rows, num_seqs);
}

void draft(Tensor&, int64_t drafting, int64_t num_seqs, int64_t size) {
  Drafting& d = *reinterpret_cast<Drafting*>(drafting);
  require(size >= 0 && size < static_cast<int64_t>(d.vocab_sizes.size()), kOp, "size", "one that is bound", size);
  require(num_seqs <= d.max_seqs, kOp, "num_seqs", "at most the sequences bound", num_seqs);
  for (int64_t b = 1; b < num_seqs; ++b)
    require(d.num_drafts[b] <= d.num_drafts[b - 1], kOp, "num_drafts", "none above one before it", d.num_drafts[b]);
  const int64_t last = static_cast<int64_t>(d.stages.size()) - 1;
  num_seqs = num_drafting(d, num_seqs, 0);
  for (int64_t step = 0; num_seqs > 0; ++step) {
    require(step < d.max_drafts, kOp, "num_drafts", "at most the drafts bound", d.num_drafts[0]);
    index_rows(d, num_seqs);
    if (d.source != nullptr && step == 0) read_states(d);
    const int64_t stage = std::min(step, last);
    fd::replay(*d.stages[stage], d.index.totals[0], num_seqs);
    choose(d, stage, step, size);
    num_seqs = num_drafting(d, num_seqs, step + 1);
    step < last ? shift_rows(d, num_seqs) : follow_drafts(d, num_seqs);
  }
}

std::vector<const float*> told_by_heads(const std::vector<int64_t>& heads, const Tensor& logits,
                                        const std::vector<int64_t>& vocab_sizes) {
  std::vector<const float*> told;
  for (size_t i = 0; i < heads.size(); ++i)
    told.push_back(fd::tell_block_maxima(*reinterpret_cast<fd::Recording*>(heads[i]), logits.data<float>(),
                                         vocab_sizes[i % vocab_sizes.size()]));
  return told;
}

std::vector<const fd::Recording*> recordings(const std::vector<int64_t>& handles) {
  std::vector<const fd::Recording*> found;
  for (int64_t handle : handles) found.push_back(reinterpret_cast<const fd::Recording*>(handle));
  return found;
}

// Writes the address of a drafting over these buffers to `handle`.
void bind(const Tensor& num_scheduled, const Tensor& num_computed, const Tensor& num_logits, const Tensor& num_blocks,
          const Tensor& block_tables, const Tensor& totals, const Tensor& cu_seqlens_q, const Tensor& cu_logits_rows,
          const Tensor& kv_lens, const Tensor& batch_id_per_row, const Tensor& positions, const Tensor& slot_mapping,
          const Tensor& logits_rows, const Tensor& token_ids, const Tensor& num_drafts, const Tensor& drafts,
          const paddle::optional<Tensor>& states, const paddle::optional<Tensor>& source, const Tensor& output,
          const Tensor& chosen_rows, const Tensor& logits, const Tensor& float_params, const Tensor& int_params,
          const Tensor& chosen, const Tensor& status, const Tensor& survives, Tensor& handle,
          const std::vector<int64_t>& stages, const std::vector<int64_t>& heads,
          const std::vector<int64_t>& vocab_sizes, int64_t block_size) {
  const int64_t max_seqs = num_scheduled.dims()[0], max_rows = token_ids.dims()[0];
  auto ints = [](const char* name, const Tensor& tensor, int64_t count) {
    return Argument{kOp, name, tensor}.is(kInt32).holds({count}).template data<int32_t>();
  };
  Argument{kOp, "block_tables", block_tables}.is(kInt32).holds({max_seqs, -1});
  Argument{kOp, "drafts", drafts}.is(kInt32).holds({max_seqs, -1});
  Argument{kOp, "logits", logits}.is(kFloat).shaped({-1, -1});
  Argument{kOp, "output", output}.holds({max_rows, -1});
  Argument{kOp, "float_params", float_params}.is(kFloat).holds({max_seqs, fd::kNumFloatParams});
  Argument{kOp, "int_params", int_params}.is(kInt64).holds({max_seqs, fd::kNumIntParams});
  Argument{kOp, "survives", survives}.is(paddle::DataType::UINT8).holds({max_seqs});
  Argument{kOp, "handle", handle}.is(kInt64).shaped({1});
  require(!stages.empty() && stages.size() * vocab_sizes.size() == heads.size(), kOp, "heads",
          "one for every stage and vocab_size, one at least", static_cast<int64_t>(heads.size()));
  for (int64_t size : vocab_sizes)
    require(size > 0 && size <= logits.dims()[1], kOp, "vocab_sizes", "at most the logits of a row", size);
  require(states.is_initialized() == source.is_initialized(), kOp, "states", "given where source is", 0);
  auto d = std::make_unique<Drafting>();
  d->stages = recordings(stages);
  d->heads = recordings(heads);
  d->block_maxima = told_by_heads(heads, logits, vocab_sizes);
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
  if (states) {
    const Argument kept{kOp, "states", *states}, read{kOp, "source", *source};
    kept.is(output.dtype()).shaped({-1, output.dims()[1]});
    read.is(output.dtype()).holds({max_rows, output.dims()[1]});
    d->states = kept.data<char>();
    d->num_states = kept.size(0);
    d->source = read.data<char>();
  }
  d->max_chosen = logits.dims()[0];
  d->chosen_rows = ints("chosen_rows", chosen_rows, d->max_chosen);
  d->logits = Argument{kOp, "logits", logits}.data<float>();
  d->float_params = Argument{kOp, "float_params", float_params}.data<float>();
  d->int_params = Argument{kOp, "int_params", int_params}.data<int64_t>();
  d->chosen = ints("chosen", chosen, max_seqs);
  d->status = ints("status", status, max_seqs);
  d->survives = Argument{kOp, "survives", survives}.data<uint8_t>();
  *handle.data<int64_t>() = reinterpret_cast<int64_t>(d.release());
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void fd_drafting_free(void* drafting) {
  delete static_cast<Drafting*>(drafting);
}

PD_BUILD_OP(fd_bind_drafting)
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
             paddle::Optional("states"),
             paddle::Optional("source"),
             "output",
             "chosen_rows",
             "logits",
             "float_params",
             "int_params",
             "chosen",
             "status",
             "survives",
             "handle"})
    .Outputs({"handle_"})
    .Attrs({"stages: std::vector<int64_t>", "heads: std::vector<int64_t>", "vocab_sizes: std::vector<int64_t>",
            "block_size: int64_t"})
    .SetInplaceMap({{"handle", "handle_"}})
    .SetKernelFn(PD_KERNEL(bind));

PD_BUILD_OP(fd_fill_stage)
    .Inputs({"output"})
    .Outputs({"output_"})
    .Attrs({"drafting: int64_t", "stage: int64_t", "num_seqs: int64_t"})
    .SetInplaceMap({{"output", "output_"}})
    .SetKernelFn(PD_KERNEL(fill_stage));

PD_BUILD_OP(fd_draft)
    .Inputs({"drafts"})
    .Outputs({"drafts_"})
    .Attrs({"drafting: int64_t", "num_seqs: int64_t", "size: int64_t"})
    .SetInplaceMap({{"drafts", "drafts_"}})
    .SetKernelFn(PD_KERNEL(draft));
