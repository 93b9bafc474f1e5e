// SPDX-License-Identifier: Apache-2.0
// Paddle bindings of operators with several packed matrices: mixtures of experts, and the products of heads. They check
// shapes and dtypes and launch kernels.
#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"

using fd::Argument;
using fd::DType;
using fd::require;
using paddle::DataType;
using paddle::Tensor;

namespace {

// Returns the enumerator at an index.
template <class Enum>
Enum enumerator(const char* op, const char* name, int64_t index, Enum last) {
  const auto size = static_cast<int64_t>(last) + 1;
  if (index < 0 || index >= size) fd::raise_invalid(op, name, "0.." + std::to_string(size - 1), std::to_string(index));
  return static_cast<Enum>(index);
}

fd::RouterRule router_rule(const char* op, const std::vector<int64_t>& counts, const std::vector<float>& factors,
                           int64_t num_experts) {
  require(counts.size() == 6 && factors.size() == 2, op, "rule", "six integers and two floats",
          static_cast<int64_t>(counts.size()));
  const fd::RouterRule rule{counts[0],
                            enumerator(op, "scoring", counts[1], fd::Scoring::kSigmoid),
                            counts[2],
                            counts[3],
                            enumerator(op, "group_score", counts[4], fd::GroupScore::kTwoLargest),
                            enumerator(op, "normalisation", counts[5], fd::Normalisation::kAdd),
                            factors[0],
                            factors[1]};
  require(rule.num_groups >= 1 && num_experts % rule.num_groups == 0, op, "num_groups", "a divisor of the experts",
          rule.num_groups);
  require(rule.num_kept_groups >= 1 && rule.num_kept_groups <= rule.num_groups, op, "num_kept_groups",
          "1 to num_groups", rule.num_kept_groups);
  const int64_t num_eligible = num_experts / rule.num_groups * rule.num_kept_groups;
  require(rule.num_chosen >= 1 && rule.num_chosen <= num_eligible && rule.num_chosen <= fd::kMaxChosenExperts, op,
          "num_chosen", "1 to 32, at most the experts of the kept groups", rule.num_chosen);
  return rule;
}

void route(const Tensor& hidden, const Tensor& norm, const Tensor& gate, const paddle::optional<Tensor>& bias,
           Tensor& normed, Tensor& ids, Tensor& weights, Tensor& starts, Tensor& entries, Tensor& load,
           int64_t num_experts, const std::vector<int64_t>& counts, const std::vector<float>& factors, float eps,
           int64_t num_rows) {
  constexpr const char* op = "route";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(num_experts >= 1 && num_experts <= fd::kMaxExperts, op, "num_experts", "1 to 1024", num_experts);
  const Argument input{op, "hidden", hidden}, output{op, "normed", normed}, packed{op, "gate", gate};
  input.has_capacity({num_rows, -1});
  const int64_t width = input.size(1);
  output.has_dtype(hidden.dtype()).has_capacity({num_rows, width});
  packed.has_shape({(num_experts + fd::kPanel - 1) / fd::kPanel, width, fd::kPanel});
  const fd::RouterRule rule = router_rule(op, counts, factors, num_experts);
  const auto ints = [&](const char* name, Tensor& tensor, std::initializer_list<int64_t> sizes) {
    return Argument{op, name, tensor}.has_dtype(DataType::INT32).has_capacity(sizes).data<int32_t>();
  };
  fd::RouteArgs args{};
  args.hidden = input.data();
  args.norm = Argument{op, "norm", norm}.has_dtype(hidden.dtype()).has_shape({width}).data();
  args.gate = packed.data();
  if (bias)
    args.correction_bias =
        Argument{op, "correction_bias", *bias}.has_dtype(DataType::FLOAT32).has_shape({num_experts}).data<float>();
  args.normed = output.data();
  args.ids = ints("ids", ids, {num_rows, rule.num_chosen});
  args.weights = Argument{op, "weights", weights}
                     .has_dtype(DataType::FLOAT32)
                     .has_capacity({num_rows, rule.num_chosen})
                     .data<float>();
  args.starts = ints("starts", starts, {num_experts + 1});
  args.entries = ints("entries", entries, {num_rows * rule.num_chosen});
  args.load = ints("load", load, {2});
  args.rows = num_rows, args.width = width, args.num_experts = num_experts;
  args.rule = rule, args.eps = eps;
  args.dtype = input.float_dtype(), args.gate_dtype = packed.float_dtype();
  fd::launch(args);
}

int64_t packed_elements(const fd::PackedMatrices& m, int64_t outputs, int64_t inputs) {
  return m.is_quantized ? fd::quantized_size(m.form, outputs, inputs, m.gated)
                        : fd::packed_size(outputs, inputs, m.gated);
}

// Checks packed matrices [outputs, inputs] and returns their data.
const uint8_t* matrices_data(const Argument& packed, const fd::PackedMatrices& m, DataType rows_dtype, int64_t count,
                             int64_t outputs, int64_t inputs) {
  packed.has_dtype(m.is_quantized ? DataType::UINT8 : rows_dtype);
  return packed.has_shape({count * packed_elements(m, outputs, inputs)}).data<uint8_t>();
}

// Describes packed matrices for rows of a dtype. `form` is empty if they are not quantized.
fd::PackedMatrices packed_matrices(const char* op, const Tensor& packed, const Tensor& rows, int64_t count,
                                   int64_t outputs, int64_t inputs, bool gated, const std::vector<int64_t>& form) {
  fd::PackedMatrices m{};
  m.count = count, m.outputs = outputs, m.inputs = inputs, m.gated = gated;
  m.dtype = Argument{op, "rows", rows}.float_dtype();
  m.is_quantized = !form.empty();
  if (m.is_quantized) {
    m.form = fd::quantized_form(op, form);
    Argument{op, "rows", rows}.has_dtype(DataType::BFLOAT16);
  }
  m.packed = matrices_data({op, "matrices", packed}, m, rows.dtype(), count, outputs, inputs);
  return m;
}

// Describes the matrices of all experts.
fd::PackedMatrices expert_matrices(const char* op, const Tensor& packed, const Tensor& rows, int64_t num_experts,
                                   int64_t outputs, int64_t inputs, bool gated, const std::vector<int64_t>& form) {
  require(num_experts >= 1 && num_experts <= fd::kMaxExperts, op, "num_experts", "1 to 1024", num_experts);
  return packed_matrices(op, packed, rows, num_experts, outputs, inputs, gated, form);
}

// Checks the lists of a router for num_rows rows.
template <class Args>
void fill_lists(const char* op, const Tensor& starts, const Tensor& entries, int64_t num_rows, int64_t num_chosen,
                Args& args) {
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(num_chosen >= 1 && num_chosen <= fd::kMaxChosenExperts, op, "num_chosen", "1 to 32", num_chosen);
  args.starts = Argument{op, "starts", starts}
                    .has_dtype(DataType::INT32)
                    .has_capacity({args.matrices.count + 1})
                    .template data<int32_t>();
  args.entries = Argument{op, "entries", entries}
                     .has_dtype(DataType::INT32)
                     .has_capacity({num_rows * num_chosen})
                     .template data<int32_t>();
  args.rows = num_rows, args.num_chosen = num_chosen;
}

void experts_up(const Tensor& normed, const Tensor& starts, const Tensor& entries, const Tensor& packed,
                Tensor& activated, const paddle::optional<Tensor>& shared,
                const paddle::optional<Tensor>& shared_activated, int64_t num_experts, int64_t outputs, int64_t inputs,
                const std::vector<int64_t>& form, int64_t shared_outputs, int64_t num_chosen, int64_t num_rows) {
  constexpr const char* op = "experts_up";
  fd::ExpertsUpArgs args{};
  args.matrices = expert_matrices(op, packed, normed, num_experts, outputs, inputs, true, form);
  fill_lists(op, starts, entries, num_rows, num_chosen, args);
  const auto dtype = normed.dtype();
  args.normed = Argument{op, "normed", normed}.has_capacity({num_rows, inputs}).data();
  args.activated =
      Argument{op, "activated", activated}.has_dtype(dtype).has_capacity({num_rows * num_chosen, outputs}).data();
  if (shared) {
    args.shared = matrices_data({op, "shared", *shared}, args.matrices, dtype, 1, shared_outputs, inputs);
    args.shared_outputs = shared_outputs;
    args.shared_activated = Argument{op, "shared_activated", *shared_activated}
                                .has_dtype(dtype)
                                .has_capacity({num_rows, shared_outputs})
                                .data();
  }
  fd::launch(args);
}

void experts_down(const Tensor& activated, const Tensor& starts, const Tensor& entries, const Tensor& weights,
                  const Tensor& packed, Tensor& hidden, const paddle::optional<Tensor>& shared,
                  const paddle::optional<Tensor>& shared_activated, const paddle::optional<Tensor>& shared_sum,
                  int64_t num_experts, int64_t outputs, int64_t inputs, const std::vector<int64_t>& form,
                  int64_t shared_inputs, int64_t num_chosen, int64_t num_rows) {
  constexpr const char* op = "experts_down";
  fd::ExpertsDownArgs args{};
  args.matrices = expert_matrices(op, packed, activated, num_experts, outputs, inputs, false, form);
  fill_lists(op, starts, entries, num_rows, num_chosen, args);
  const auto dtype = activated.dtype();
  args.activated = Argument{op, "activated", activated}.has_capacity({num_rows * num_chosen, inputs}).data();
  args.weights =
      Argument{op, "weights", weights}.has_dtype(DataType::FLOAT32).has_capacity({num_rows, num_chosen}).data<float>();
  args.hidden = Argument{op, "hidden", hidden}.has_dtype(dtype).has_capacity({num_rows, outputs}).data();
  if (shared) {
    args.shared = matrices_data({op, "shared", *shared}, args.matrices, dtype, 1, outputs, shared_inputs);
    args.shared_inputs = shared_inputs;
    args.shared_activated = Argument{op, "shared_activated", *shared_activated}
                                .has_dtype(dtype)
                                .has_capacity({num_rows, shared_inputs})
                                .data();
  }
  if (shared_sum)
    args.shared_sum = Argument{op, "shared_sum", *shared_sum}
                          .has_dtype(DataType::FLOAT32)
                          .has_capacity({num_rows, outputs})
                          .data<float>();
  fd::launch(args);
}

// Returns whether the memory of two tensors overlaps.
bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& tensor) {
    const auto begin = reinterpret_cast<uintptr_t>(tensor.data());
    return std::pair(begin, begin + static_cast<uintptr_t>(tensor.numel()) * phi::SizeOf(tensor.dtype()));
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

void project_heads(const Tensor& x, const Tensor& packed, Tensor& out, int64_t num_heads, int64_t outputs,
                   int64_t inputs, const std::vector<int64_t>& form, int64_t head_stride, int64_t num_rows) {
  constexpr const char* op = "project_heads";
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(num_heads >= 1, op, "num_heads", "at least 1", num_heads);
  require(head_stride >= inputs, op, "head_stride", "at least in_features", head_stride);
  const Argument input{op, "x", x}, output{op, "out", out};
  fd::ProjectHeadsArgs args{};
  args.matrices = packed_matrices(op, packed, x, num_heads, outputs, inputs, false, form);
  args.x = input.has_capacity({num_rows, -1}).data();
  args.x_stride = input.size(1), args.head_stride = head_stride, args.rows = num_rows;
  require(args.x_stride >= (num_heads - 1) * head_stride + inputs, op, "x", "columns of all heads", args.x_stride);
  args.out = output.has_dtype(x.dtype()).has_capacity({num_rows, num_heads * outputs}).data();
  if (overlap(x, out)) fd::raise_invalid(op, "out", "memory of its own", "that of x");
  fd::launch(args);
}

}  // namespace

PD_BUILD_OP(fd_project_heads)
    .Inputs({"x", "matrices", "out"})
    .Outputs({"out_"})
    .Attrs({"num_heads: int64_t", "outputs: int64_t", "inputs: int64_t", "form: std::vector<int64_t>",
            "head_stride: int64_t", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(project_heads));

PD_BUILD_OP(fd_route)
    .Inputs({"hidden", "norm", "gate", paddle::Optional("correction_bias"), "normed", "ids", "weights", "starts",
             "entries", "load"})
    .Outputs({"normed_"})
    .Attrs({"num_experts: int64_t", "counts: std::vector<int64_t>", "factors: std::vector<float>", "eps: float",
            "num_rows: int64_t"})
    .SetInplaceMap({{"normed", "normed_"}})
    .SetKernelFn(PD_KERNEL(route));

PD_BUILD_OP(fd_experts_up)
    .Inputs({"normed", "starts", "entries", "matrices", "activated", paddle::Optional("shared"),
             paddle::Optional("shared_activated")})
    .Outputs({"activated_"})
    .Attrs({"num_experts: int64_t", "outputs: int64_t", "inputs: int64_t", "form: std::vector<int64_t>",
            "shared_outputs: int64_t", "num_chosen: int64_t", "num_rows: int64_t"})
    .SetInplaceMap({{"activated", "activated_"}})
    .SetKernelFn(PD_KERNEL(experts_up));

PD_BUILD_OP(fd_experts_down)
    .Inputs({"activated", "starts", "entries", "weights", "matrices", "hidden", paddle::Optional("shared"),
             paddle::Optional("shared_activated"), paddle::Optional("shared_sum")})
    .Outputs({"hidden_"})
    .Attrs({"num_experts: int64_t", "outputs: int64_t", "inputs: int64_t", "form: std::vector<int64_t>",
            "shared_inputs: int64_t", "num_chosen: int64_t", "num_rows: int64_t"})
    .SetInplaceMap({{"hidden", "hidden_"}})
    .SetKernelFn(PD_KERNEL(experts_down));
