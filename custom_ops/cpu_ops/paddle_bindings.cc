// SPDX-License-Identifier: Apache-2.0
// Paddle bindings of linear layers, normalisation, gathers and attention. They check shapes and dtypes and launch
// kernels.
#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"

using fd::Argument;
using fd::DType;
using fd::require;
using paddle::Tensor;

namespace {

// Checks an optional tensor and returns its data, or null.
const void* optional_data(const char* op, const char* name, const paddle::optional<Tensor>& tensor,
                          paddle::DataType dtype, std::initializer_list<int64_t> sizes) {
  if (!tensor) return nullptr;
  return Argument{op, name, *tensor}.has_dtype(dtype).has_capacity(sizes).data();
}

// The weight formed by outputs [begins[i], ends[i]) of the stored matrices in order.
struct StoredWeight {
  std::vector<fd::PackPiece> pieces;
  int64_t n = 0, k = 0;

  StoredWeight(const char* op, const std::vector<Tensor>& weights, const std::vector<int64_t>& begins,
               const std::vector<int64_t>& ends, bool is_transposed) {
    require(!weights.empty() && weights.size() == begins.size() && weights.size() == ends.size(), op, "weights",
            "as many as begins and ends", static_cast<int64_t>(weights.size()));
    for (size_t i = 0; i < weights.size(); ++i) {
      const Argument weight{op, "weight", weights[i]};
      weight.has_dtype(weights[0].dtype()).has_shape({-1, -1});
      if (i == 0) k = weight.size(is_transposed ? 0 : 1);
      is_transposed ? weight.has_shape({k, -1}) : weight.has_shape({-1, k});
      require(0 <= begins[i] && begins[i] <= ends[i] && ends[i] <= weight.size(is_transposed ? 1 : 0), op, "weight",
              "a range of its outputs", ends[i]);
      const int64_t stride = weight.size(1), first = is_transposed ? begins[i] : begins[i] * stride;
      const char* data = weight.data<char>() + first * static_cast<int64_t>(phi::SizeOf(weights[0].dtype()));
      pieces.push_back({data, stride, ends[i] - begins[i], is_transposed});
      n += ends[i] - begins[i];
    }
  }

  fd::PackPieces view() const { return {pieces.data(), static_cast<int64_t>(pieces.size())}; }
};

// Returns the number of outputs of a layer whose weight has this many rows: half of them if it is gated.
int64_t outputs_of(const char* op, int64_t weight_rows, bool gated) {
  require(!gated || weight_rows % 2 == 0, op, "weight", "an even number of rows when gated", weight_rows);
  return gated ? weight_rows / 2 : weight_rows;
}

void pack_linear(const std::vector<Tensor>& weights, Tensor& packed, const std::vector<int64_t>& begins,
                 const std::vector<int64_t>& ends, bool is_transposed, bool gated) {
  constexpr const char* op = "pack_linear";
  const StoredWeight stored(op, weights, begins, ends, is_transposed);
  const int64_t n = outputs_of(op, stored.n, gated);
  const Argument target{op, "packed", packed};
  target.has_dtype(weights[0].dtype()).has_shape({fd::packed_size(n, stored.k, gated)});
  fd::kernels().pack_linear({stored.view(), target.data(), n, stored.k, gated, target.float_dtype()});
}

// Checks the tensors of any linear layer against the sizes and flags in `args`, and fills in the rest of `args`.
void fill_linear(fd::LinearArgs& args, const Tensor& x, const Tensor& packed, const paddle::optional<Tensor>& bias,
                 const paddle::optional<Tensor>& residual, const paddle::optional<Tensor>& norm, Tensor& out) {
  constexpr const char* op = "linear";
  const Argument input{op, "x", x}, output{op, "out", out};
  require(args.rows >= 0, op, "num_rows", "at least 0", args.rows);
  input.has_capacity({args.rows, norm ? -1 : args.k});
  output.has_capacity({args.rows, args.n});
  args.x_stride = input.size(1), args.out_stride = args.n;
  require(args.x_stride >= args.k, op, "x", "at least in_features columns", args.x_stride);
  args.dtype = input.float_dtype(), args.out_dtype = output.float_dtype();
  if (args.out_dtype != args.dtype && args.out_dtype != DType::kFloat32) output.has_dtype(x.dtype());
  args.x = input.data();
  args.packed = packed.data();
  args.bias = optional_data(op, "bias", bias, x.dtype(), {args.gated ? 2 * args.n : args.n});
  args.residual = optional_data(op, "residual", residual, out.dtype(), {args.rows, args.n});
  args.norm = optional_data(op, "norm", norm, x.dtype(), {args.k});
  args.out = output.data();
}

void linear(const Tensor& x, const Tensor& packed, const paddle::optional<Tensor>& bias,
            const paddle::optional<Tensor>& residual, const paddle::optional<Tensor>& norm, Tensor& out, int64_t n,
            int64_t k, bool gated, float eps, int64_t num_rows) {
  Argument{"linear", "x", x}.has_dtype(packed.dtype());
  Argument{"linear", "weight", packed}.has_shape({fd::packed_size(n, k, gated)});
  fd::LinearArgs args{};
  args.rows = num_rows, args.n = n, args.k = k, args.gated = gated, args.eps = eps;
  fill_linear(args, x, packed, bias, residual, norm, out);
  fd::launch(args);
}

void pack_quantized(const std::vector<Tensor>& weights, Tensor& packed, const std::vector<int64_t>& begins,
                    const std::vector<int64_t>& ends, bool is_transposed, const std::vector<int64_t>& form,
                    bool gated) {
  constexpr const char* op = "pack_linear";
  const fd::QuantizedForm target_form = fd::quantized_form(op, form);
  const StoredWeight stored(op, weights, begins, ends, is_transposed);
  const Argument target{op, "packed", packed};
  Argument{op, "weight", weights[0]}.has_dtype(paddle::DataType::BFLOAT16);
  const int64_t n = outputs_of(op, stored.n, gated), k = stored.k;
  target.has_dtype(paddle::DataType::UINT8).has_shape({fd::quantized_size(target_form, n, k, gated)});
  if (!fd::kernels().pack_quantized({stored.view(), target.data<uint8_t>(), n, k, gated, target_form}))
    fd::raise_invalid(op, "weight", "finite values", "NaN or infinity");
}

// Returns the data of an optional tensor, which has no elements where there is none.
template <class T>
const T* data_if_any(const Argument& argument, paddle::DataType dtype, std::initializer_list<int64_t> shape) {
  return argument.tensor.numel() == 0 ? nullptr : argument.has_dtype(dtype).has_shape(shape).data<T>();
}

void pack_coded(const std::vector<Tensor>& codes, const std::vector<Tensor>& factors, const std::vector<Tensor>& scales,
                const std::vector<Tensor>& minimums, Tensor& packed, const std::vector<int64_t>& group_sizes,
                const std::vector<int64_t>& form, bool gated) {
  constexpr const char* op = "pack_linear";
  const size_t count = codes.size();
  require(count > 0 && factors.size() == count && scales.size() == count && minimums.size() == count &&
              group_sizes.size() == count,
          op, "pieces", "at least one", static_cast<int64_t>(count));
  fd::PackCodedArgs args{};
  args.form = fd::quantized_form(op, form), args.gated = gated;
  args.k = Argument{op, "codes", codes[0]}.has_shape({-1, -1}).size(1);
  std::vector<fd::CodedPiece> pieces;
  int64_t outputs = 0;
  for (size_t i = 0; i < count; ++i) {
    const Argument code{op, "codes", codes[i]};
    const int64_t size = group_sizes[i], groups = size == 0 ? 1 : (args.k + size - 1) / size;
    const int64_t rows = code.has_dtype(minimums[i].numel() == 0 ? paddle::DataType::INT8 : paddle::DataType::UINT8)
                             .has_shape({-1, args.k})
                             .size(0);
    require(size == 0 || (args.form.group_size > 0 && size % args.form.group_size == 0), op, "group_size",
            "a multiple of the packed weight's", size);
    const auto halves = [&](const char* name, const Tensor& tensor) {
      return data_if_any<uint16_t>({op, name, tensor}, paddle::DataType::FLOAT16, {rows, groups});
    };
    pieces.push_back({code.data<uint8_t>(),
                      data_if_any<float>({op, "factors", factors[i]}, paddle::DataType::FLOAT32, {rows}),
                      halves("scales", scales[i]), halves("minimums", minimums[i]), rows, size});
    require(args.form.has_scales() || pieces.back().scales == nullptr, op, "scales", "none in this form", size);
    require(args.form.has_minimum || pieces.back().minimums == nullptr, op, "minimums", "none in this form", size);
    outputs += rows;
  }
  args.pieces = pieces.data(), args.n = outputs_of(op, outputs, gated);
  args.packed = Argument{op, "packed", packed}
                    .has_dtype(paddle::DataType::UINT8)
                    .has_shape({fd::quantized_size(args.form, args.n, args.k, gated)})
                    .data<uint8_t>();
  const fd::PackError error = fd::kernels().pack_coded(args);
  if (error == fd::PackError::kNotFinite) fd::raise_invalid(op, "scales", "finite values", "NaN or infinity");
  if (error == fd::PackError::kCodeTooLarge) fd::raise_invalid(op, "codes", "codes of four bits", "larger ones");
}

void linear_quantized(const Tensor& x, const Tensor& packed, const paddle::optional<Tensor>& bias,
                      const paddle::optional<Tensor>& residual, const paddle::optional<Tensor>& norm, Tensor& out,
                      int64_t n, int64_t k, bool gated, float eps, const std::vector<int64_t>& form, int64_t num_rows) {
  fd::QuantizedLinearArgs args{};
  args.form = fd::quantized_form("linear", form);
  Argument{"linear", "x", x}.has_dtype(paddle::DataType::BFLOAT16);
  Argument{"linear", "weight", packed}
      .has_dtype(paddle::DataType::UINT8)
      .has_shape({fd::quantized_size(args.form, n, k, gated)});
  args.rows = num_rows, args.n = n, args.k = k, args.gated = gated, args.eps = eps;
  fill_linear(args, x, packed, bias, residual, norm, out);
  fd::launch(args);
}

void rms_norm(const Tensor& x, const Tensor& weight, Tensor& out, int64_t num_rows, float eps) {
  constexpr const char* op = "rms_norm";
  const Argument input{op, "x", x}, scale{op, "weight", weight}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  input.has_capacity({num_rows, -1});
  const int64_t size = input.size(1);
  scale.has_dtype(x.dtype()).has_shape({size});
  output.has_dtype(x.dtype()).has_capacity({num_rows, size});
  fd::launch(fd::RmsNormArgs{input.data(), scale.data(), output.data(), num_rows, size, eps, input.float_dtype()});
}

void gather(const char* op, const char* ids_name, const Tensor& table, const Tensor& ids, Tensor& out,
            int64_t num_rows) {
  const Argument source{op, op[0] == 'e' ? "table" : "x", table}, index{op, ids_name, ids}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  source.has_shape({-1, -1});
  index.has_dtype(paddle::DataType::INT32).has_capacity({num_rows});
  output.has_dtype(table.dtype()).has_capacity({num_rows, source.size(1)});
  const int64_t row_bytes = source.size(1) * static_cast<int64_t>(phi::SizeOf(table.dtype()));
  fd::launch(
      fd::GatherArgs{index.data<int32_t>(), source.data(), output.data(), num_rows, row_bytes, source.size(0), op});
}

void embedding(const Tensor& token_ids, const Tensor& table, Tensor& out, int64_t num_rows) {
  gather("embedding", "token_ids", table, token_ids, out, num_rows);
}

// Does the same as embedding with a packed weight [vocab, size] as the table.
void packed_embedding(const Tensor& token_ids, const Tensor& packed, Tensor& out, int64_t vocab, int64_t size,
                      int64_t num_rows) {
  constexpr const char* op = "embedding";
  const Argument source{op, "table", packed}, index{op, "token_ids", token_ids}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  index.has_dtype(paddle::DataType::INT32).has_capacity({num_rows});
  output.has_dtype(packed.dtype()).has_capacity({num_rows, size});
  const int64_t element = static_cast<int64_t>(phi::SizeOf(packed.dtype()));
  source.has_shape({fd::packed_size(vocab, size, false)});
  fd::launch(fd::GatherArgs{index.data<int32_t>(), source.data(), output.data(), num_rows, size * element, vocab, op,
                            fd::packed_size(fd::kPanel, size, false) * element});
}

// Does the same with a quantized weight [vocab, size] of a form.
void quantized_embedding(const Tensor& token_ids, const Tensor& packed, Tensor& out, int64_t vocab, int64_t size,
                         const std::vector<int64_t>& form, int64_t num_rows) {
  constexpr const char* op = "embedding";
  const Argument source{op, "table", packed}, index{op, "token_ids", token_ids}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  index.has_dtype(paddle::DataType::INT32).has_capacity({num_rows});
  output.has_dtype(paddle::DataType::BFLOAT16).has_capacity({num_rows, size});
  fd::QuantizedGatherArgs args{};
  args.form = fd::quantized_form(op, form), args.inputs = size, args.op = op;
  source.has_dtype(paddle::DataType::UINT8).has_shape({fd::quantized_size(args.form, vocab, size, false)});
  args.ids = index.data<int32_t>(), args.table = source.data(), args.out = output.data();
  args.rows = num_rows, args.row_bytes = 2 * size, args.table_rows = vocab;
  args.panel_bytes = fd::quantized_panel_bytes(args.form, size);
  fd::launch(args);
}

void gather_rows(const Tensor& x, const Tensor& rows, Tensor& out, int64_t num_rows) {
  gather("gather_rows", "rows", x, rows, out, num_rows);
}

void scatter_rows(const Tensor& x, const Tensor& rows, Tensor& out, int64_t num_rows) {
  constexpr const char* op = "scatter_rows";
  const Argument source{op, "x", x}, index{op, "rows", rows}, output{op, "out", out};
  require(num_rows >= 0, op, "num_rows", "at least 0", num_rows);
  source.has_capacity({num_rows, -1});
  index.has_dtype(paddle::DataType::INT32).has_capacity({num_rows});
  output.has_dtype(x.dtype()).has_shape({-1, source.size(1)});
  const int64_t row_bytes = source.size(1) * static_cast<int64_t>(phi::SizeOf(x.dtype()));
  fd::launch(fd::ScatterArgs{index.data<int32_t>(), source.data(), output.data(), num_rows, row_bytes, output.size(0)});
}

fd::KvCacheView cache_view(const char* op, const Tensor& key, const Tensor& value) {
  const Argument keys{op, "cache.key", key}, values{op, "cache.value", value};
  keys.has_shape({-1, -1, -1, -1});
  const DType dtype = key.dtype() == paddle::DataType::INT8 ? DType::kInt8 : keys.float_dtype();
  fd::KvCacheView view{keys.data(), values.data(), keys.size(0), keys.size(2), keys.size(1), keys.size(3), dtype};
  view.head_dim -= view.scale_width();
  require(view.block_size > 0 && view.block_size % 16 == 0, op, "block_size", "a multiple of 16", view.block_size);
  require(view.head_dim > 0 && view.head_dim % 2 == 0 && view.head_dim <= 256, op, "head_dim",
          "an even number up to 256", view.head_dim);
  values.has_dtype(key.dtype()).has_shape({view.num_blocks, view.num_kv_heads, view.block_size, view.value_width()});
  return view;
}

// Checks the arguments of the rotation of queries and keys. Without cos_sin there is none.
fd::RotaryView rotary_view(const char* op, const Tensor& qkv, const Tensor& positions,
                           const paddle::optional<Tensor>& cos_sin, const paddle::optional<Tensor>& q_norm,
                           const paddle::optional<Tensor>& k_norm, int64_t num_rows, int64_t head_dim, bool interleaved,
                           float eps) {
  if (!cos_sin) return {};
  const Argument row_positions{op, "positions", positions}, angles{op, "cos_sin", *cos_sin};
  row_positions.has_dtype(paddle::DataType::INT32).has_capacity({num_rows});
  angles.has_dtype(paddle::DataType::FLOAT32).has_shape({-1, -1});
  const int64_t rotary_dim = angles.size(1);
  require(rotary_dim % 2 == 0 && rotary_dim <= head_dim, op, "cos_sin", "an even last axis up to head_dim", rotary_dim);
  return {row_positions.data<int32_t>(),
          angles.data<float>(),
          optional_data(op, "q_norm", q_norm, qkv.dtype(), {head_dim}),
          optional_data(op, "k_norm", k_norm, qkv.dtype(), {head_dim}),
          rotary_dim,
          angles.size(0),
          interleaved,
          eps};
}

void append_attention(Tensor& qkv, Tensor& key, Tensor& value, const Tensor& cu_seqlens_q, const Tensor& kv_lens,
                      const Tensor& block_tables, const Tensor& slot_mapping, const Tensor& positions,
                      const paddle::optional<Tensor>& cos_sin, const paddle::optional<Tensor>& q_norm,
                      const paddle::optional<Tensor>& k_norm, Tensor& out, int64_t num_rows, int64_t num_seqs,
                      int64_t num_heads, float scale, int64_t num_masked_prefix, bool interleaved, float eps) {
  constexpr const char* op = "append_attention";
  const fd::KvCacheView cache = cache_view(op, key, value);
  const Argument rows{op, "qkv", qkv}, output{op, "out", out};
  const fd::PagedBatch batch =
      fd::paged_batch(op, cu_seqlens_q, kv_lens, block_tables, slot_mapping, num_rows, num_seqs);
  require(num_heads > 0 && num_heads % cache.num_kv_heads == 0, op, "num_heads", "a multiple of the kv heads",
          num_heads);
  require(num_masked_prefix >= 0 && num_masked_prefix <= 16, op, "num_masked_prefix", "0 to 16", num_masked_prefix);
  const auto dtype = cache.dtype == DType::kInt8 ? paddle::DataType::BFLOAT16 : key.dtype();
  rows.has_dtype(dtype).has_capacity({num_rows, (num_heads + 2 * cache.num_kv_heads) * cache.head_dim});
  output.has_dtype(dtype).has_capacity({num_rows, num_heads * cache.head_dim});
  const fd::AttentionArgs args{
      batch,
      rows.data(),
      cache,
      output.data(),
      num_heads,
      scale,
      num_masked_prefix,
      rotary_view(op, qkv, positions, cos_sin, q_norm, k_norm, num_rows, cache.head_dim, interleaved, eps)};
  fd::launch(args);
}

}  // namespace

PD_BUILD_OP(fd_pack_linear)
    .Inputs({paddle::Vec("weights"), "packed"})
    .Outputs({"packed_"})
    .Attrs({"begins: std::vector<int64_t>", "ends: std::vector<int64_t>", "is_transposed: bool", "gated: bool"})
    .SetInplaceMap({{"packed", "packed_"}})
    .SetKernelFn(PD_KERNEL(pack_linear));

PD_BUILD_OP(fd_linear)
    .Inputs({"x", "weight", paddle::Optional("bias"), paddle::Optional("residual"), paddle::Optional("norm"), "out"})
    .Outputs({"out_"})
    .Attrs({"n: int64_t", "k: int64_t", "gated: bool", "eps: float", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(linear));

PD_BUILD_OP(fd_pack_quantized)
    .Inputs({paddle::Vec("weights"), "packed"})
    .Outputs({"packed_"})
    .Attrs({"begins: std::vector<int64_t>", "ends: std::vector<int64_t>", "is_transposed: bool",
            "form: std::vector<int64_t>", "gated: bool"})
    .SetInplaceMap({{"packed", "packed_"}})
    .SetKernelFn(PD_KERNEL(pack_quantized));

PD_BUILD_OP(fd_pack_coded)
    .Inputs({paddle::Vec("codes"), paddle::Vec("factors"), paddle::Vec("scales"), paddle::Vec("minimums"), "packed"})
    .Outputs({"packed_"})
    .Attrs({"group_sizes: std::vector<int64_t>", "form: std::vector<int64_t>", "gated: bool"})
    .SetInplaceMap({{"packed", "packed_"}})
    .SetKernelFn(PD_KERNEL(pack_coded));

PD_BUILD_OP(fd_linear_quantized)
    .Inputs({"x", "weight", paddle::Optional("bias"), paddle::Optional("residual"), paddle::Optional("norm"), "out"})
    .Outputs({"out_"})
    .Attrs({"n: int64_t", "k: int64_t", "gated: bool", "eps: float", "form: std::vector<int64_t>", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(linear_quantized));

PD_BUILD_OP(fd_rms_norm)
    .Inputs({"x", "weight", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t", "eps: float"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(rms_norm));

PD_BUILD_OP(fd_embedding)
    .Inputs({"token_ids", "table", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(embedding));

PD_BUILD_OP(fd_packed_embedding)
    .Inputs({"token_ids", "packed", "out"})
    .Outputs({"out_"})
    .Attrs({"vocab: int64_t", "size: int64_t", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(packed_embedding));

PD_BUILD_OP(fd_quantized_embedding)
    .Inputs({"token_ids", "packed", "out"})
    .Outputs({"out_"})
    .Attrs({"vocab: int64_t", "size: int64_t", "form: std::vector<int64_t>", "num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(quantized_embedding));

PD_BUILD_OP(fd_gather_rows)
    .Inputs({"x", "rows", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(gather_rows));

PD_BUILD_OP(fd_scatter_rows)
    .Inputs({"x", "rows", "out"})
    .Outputs({"out_"})
    .Attrs({"num_rows: int64_t"})
    .SetInplaceMap({{"out", "out_"}})
    .SetKernelFn(PD_KERNEL(scatter_rows));

PD_BUILD_OP(fd_append_attention)
    .Inputs({"qkv", "key", "value", "cu_seqlens_q", "kv_lens", "block_tables", "slot_mapping", "positions",
             paddle::Optional("cos_sin"), paddle::Optional("q_norm"), paddle::Optional("k_norm"), "out"})
    .Outputs({"qkv_", "key_", "value_", "out_"})
    .Attrs({"num_rows: int64_t", "num_seqs: int64_t", "num_heads: int64_t", "scale: float",
            "num_masked_prefix: int64_t", "interleaved: bool", "eps: float"})
    .SetInplaceMap({{"qkv", "qkv_"}, {"key", "key_"}, {"value", "value_"}, {"out", "out_"}})
    .SetKernelFn(PD_KERNEL(append_attention));
