// SPDX-License-Identifier: Apache-2.0
// Registration of the CPU operators with Paddle: shapes, dtypes, in-place outputs, the call of the launcher.
#include "cpu_ops/checks.h"

using fd::Argument;
using fd::DType;
using fd::require;
using paddle::Tensor;

namespace {

// The data of an optional Float tensor, checked, or null.
const void* optional_data(const char* op, const char* name, const paddle::optional<Tensor>& tensor,
                          paddle::DataType dtype, std::initializer_list<int64_t> sizes) {
  if (!tensor) return nullptr;
  return Argument{op, name, *tensor}.is(dtype).holds(sizes).data();
}

void pack_linear(const Tensor& weight, Tensor& packed) {
  constexpr const char* op = "pack_linear";
  const Argument source{op, "weight", weight}, target{op, "packed", packed};
  source.shaped({-1, -1});
  const int64_t n = source.size(0), k = source.size(1);
  target.is(weight.dtype()).shaped({fd::packed_size(n, k)});
  fd::kernels().pack_linear({source.data(), target.data(), n, k, source.real()});
}

void linear(const Tensor& x, const Tensor& packed, const paddle::optional<Tensor>& bias,
            const paddle::optional<Tensor>& residual, Tensor& out, int64_t n, int64_t k, int64_t num_rows) {
  constexpr const char* op = "linear";
  const Argument input{op, "x", x}, weight{op, "weight", packed}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  input.is(packed.dtype()).holds({num_rows, k});
  weight.shaped({fd::packed_size(n, k)});
  output.holds({num_rows, n});
  fd::LinearArgs args{input.data(), weight.data(), nullptr, nullptr, output.data(), num_rows, n, k, input.real(), {}};
  args.out_dtype = output.real();
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kFloat32) output.is(packed.dtype());
  args.bias = optional_data(op, "bias", bias, packed.dtype(), {n});
  args.residual = optional_data(op, "residual", residual, out.dtype(), {num_rows, n});
  fd::kernels().linear(args);
}

void rms_norm(const Tensor& x, const Tensor& weight, Tensor& out, int64_t num_rows, float eps) {
  constexpr const char* op = "rms_norm";
  const Argument input{op, "x", x}, scale{op, "weight", weight}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  input.holds({num_rows, -1});
  const int64_t size = input.size(1);
  scale.is(x.dtype()).shaped({size});
  output.is(x.dtype()).holds({num_rows, size});
  fd::kernels().rms_norm({input.data(), scale.data(), output.data(), num_rows, size, eps, input.real()});
}

void swiglu(const Tensor& gate_up, Tensor& out, int64_t num_rows) {
  constexpr const char* op = "swiglu";
  const Argument input{op, "gate_up", gate_up}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  output.is(gate_up.dtype()).holds({num_rows, -1});
  const int64_t size = output.size(1);
  input.holds({num_rows, 2 * size});
  fd::kernels().swiglu({input.data(), output.data(), num_rows, size, input.real()});
}

void gather(const char* op, const char* ids_name, const Tensor& table, const Tensor& ids, Tensor& out,
            int64_t num_rows) {
  const Argument source{op, op[0] == 'e' ? "table" : "x", table}, index{op, ids_name, ids}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  source.shaped({-1, -1});
  index.is(paddle::DataType::INT32).holds({num_rows});
  output.is(table.dtype()).holds({num_rows, source.size(1)});
  const int32_t* first = index.data<int32_t>();
  for (int64_t row = 0; row < num_rows; ++row)
    if (__builtin_expect(first[row] < 0 || first[row] >= source.size(0), 0))
      fd::refuse(op, ids_name, "0.." + std::to_string(source.size(0) - 1),
                 std::to_string(first[row]) + " at row " + std::to_string(row));
  const int64_t row_bytes = source.size(1) * static_cast<int64_t>(phi::SizeOf(table.dtype()));
  fd::kernels().gather({first, source.data(), output.data(), num_rows, row_bytes});
}

void embedding(const Tensor& token_ids, const Tensor& table, Tensor& out, int64_t num_rows) {
  gather("embedding", "token_ids", table, token_ids, out, num_rows);
}

void gather_rows(const Tensor& x, const Tensor& rows, Tensor& out, int64_t num_rows) {
  gather("gather_rows", "rows", x, rows, out, num_rows);
}

void rotary(Tensor& qkv, const Tensor& positions, const Tensor& cos_sin, const paddle::optional<Tensor>& q_norm,
            const paddle::optional<Tensor>& k_norm, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
            int64_t head_dim, bool interleaved, float eps) {
  constexpr const char* op = "rotary";
  const Argument rows{op, "qkv", qkv}, where{op, "positions", positions}, angles{op, "cos_sin", cos_sin};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  require(head_dim > 0 && head_dim <= 256, op, "head_dim", "1..256", head_dim);
  rows.holds({num_rows, (num_heads + 2 * num_kv_heads) * head_dim});
  where.is(paddle::DataType::INT32).holds({num_rows});
  angles.is(paddle::DataType::FLOAT32).shaped({-1, -1});
  const int64_t rotary_dim = angles.size(1);
  require(rotary_dim % 2 == 0 && rotary_dim <= head_dim, op, "cos_sin", "an even last axis up to head_dim", rotary_dim);
  const int32_t* position = where.data<int32_t>();
  for (int64_t row = 0; row < num_rows; ++row)
    if (__builtin_expect(position[row] < 0 || position[row] >= angles.size(0), 0))
      fd::refuse(op, "positions", "0.." + std::to_string(angles.size(0) - 1), std::to_string(position[row]));
  fd::kernels().rotary({rows.data(), position, angles.data<float>(),
                        optional_data(op, "q_norm", q_norm, qkv.dtype(), {head_dim}),
                        optional_data(op, "k_norm", k_norm, qkv.dtype(), {head_dim}), num_rows, num_heads,
                        num_kv_heads, head_dim, rotary_dim, interleaved, eps, rows.real()});
}

}  // namespace

PD_BUILD_OP(fd_pack_linear)
    .Inputs({"weight", "packed"})
    .Outputs({"packed_"})
    .SetInplaceMap({{"packed", "packed_"}})
    .SetKernelFn(PD_KERNEL(pack_linear));

PD_BUILD_OP(fd_linear)
    .Inputs({"x", "weight", paddle::Optional("bias"), paddle::Optional("residual"), "out"})
    .Outputs({"out_"})
    .Attrs({"n: int64_t", "k: int64_t", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(linear));

PD_BUILD_OP(fd_rms_norm)
    .Inputs({"x", "weight", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t", "eps: float"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(rms_norm));

PD_BUILD_OP(fd_swiglu)
    .Inputs({"gate_up", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(swiglu));

PD_BUILD_OP(fd_embedding)
    .Inputs({"token_ids", "table", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(embedding));

PD_BUILD_OP(fd_gather_rows)
    .Inputs({"x", "rows", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(gather_rows));

PD_BUILD_OP(fd_rotary)
    .Inputs({"qkv", "positions", "cos_sin", paddle::Optional("q_norm"), paddle::Optional("k_norm")})
    .Outputs({"qkv_"})
    .Attrs({"num_rows: int64_t", "num_heads: int64_t", "num_kv_heads: int64_t", "head_dim: int64_t",
            "interleaved: bool", "eps: float"})
    .SetInplaceMap({{"qkv", "qkv_"}})
    .SetKernelFn(PD_KERNEL(rotary));
