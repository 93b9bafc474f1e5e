// SPDX-License-Identifier: Apache-2.0
// Paddle binding of latent attention. It checks shapes and dtypes and launches the kernel.
#include "cpu_ops/checks.h"
#include "cpu_ops/op_graph.h"

using fd::Argument;
using fd::require;
using paddle::DataType;
using paddle::Tensor;

namespace {

constexpr const char* kOp = "append_latent_attention";

void check_dim(const char* name, int64_t dim, int64_t least, int64_t most) {
  if (dim < least || dim > most || dim % fd::kLatentStep != 0)
    fd::raise_invalid(kOp, name, "a multiple of 8 from " + std::to_string(least) + " to " + std::to_string(most),
                      std::to_string(dim));
}

fd::LatentCacheView cache_view(const Tensor& rows, int64_t latent_dim, int64_t rope_dim) {
  const Argument cache{kOp, "cache", rows};
  cache.has_shape({-1, -1, latent_dim + rope_dim});
  const fd::LatentCacheView view{cache.data(), cache.size(0), cache.size(1), latent_dim, rope_dim, cache.float_dtype()};
  require(view.block_size > 0 && view.block_size % 16 == 0, kOp, "block_size", "a multiple of 16", view.block_size);
  return view;
}

// Checks a tensor of rows [num_rows, at least `width`] and returns the number of its columns.
int64_t row_stride(const Argument& rows, int64_t num_rows, int64_t width) {
  rows.has_capacity({num_rows, -1});
  const int64_t stride = rows.size(1);
  if (stride < width)
    fd::raise_invalid(kOp, rows.name, "at least " + std::to_string(width) + " columns", std::to_string(stride));
  return stride;
}

fd::RotaryView rotary_view(const Tensor& positions, const Tensor& cos_sin, int64_t num_rows, int64_t rope_dim,
                           bool is_interleaved) {
  const Argument row_positions{kOp, "positions", positions}, angles{kOp, "cos_sin", cos_sin};
  row_positions.has_dtype(DataType::INT32).has_capacity({num_rows});
  angles.has_dtype(DataType::FLOAT32).has_shape({-1, rope_dim});
  fd::RotaryView view{};
  view.positions = row_positions.data<int32_t>(), view.cos_sin = angles.data<float>();
  view.rotary_dim = rope_dim, view.num_positions = angles.size(0), view.interleaved = is_interleaved;
  return view;
}

// sizes: num_heads, latent_dim, nope_dim, rope_dim.
void append_latent_attention(const Tensor& absorbed, const Tensor& query, const Tensor& latent, Tensor& cache,
                             const Tensor& cu_seqlens_q, const Tensor& kv_lens, const Tensor& block_tables,
                             const Tensor& slot_mapping, const Tensor& positions, const Tensor& cos_sin,
                             const Tensor& norm, Tensor& out, int64_t num_rows, int64_t num_seqs,
                             const std::vector<int64_t>& sizes, float scale, int64_t num_masked_prefix,
                             bool is_interleaved, float eps) {
  require(sizes.size() == 4, kOp, "layout", "four sizes", static_cast<int64_t>(sizes.size()));
  const int64_t num_heads = sizes[0], latent_dim = sizes[1], nope_dim = sizes[2], rope_dim = sizes[3];
  require(num_heads > 0, kOp, "num_heads", "at least 1", num_heads);
  check_dim("latent_dim", latent_dim, fd::kLatentStep, fd::kMaxLatentDim);
  check_dim("nope_dim", nope_dim, 0, fd::kMaxRopeDim);
  check_dim("rope_dim", rope_dim, fd::kLatentStep, fd::kMaxRopeDim);
  require(num_masked_prefix >= 0 && num_masked_prefix <= 16, kOp, "num_masked_prefix", "0 to 16", num_masked_prefix);
  const auto dtype = cache.dtype();
  fd::LatentAttentionArgs args{};
  args.cache = cache_view(cache, latent_dim, rope_dim);
  static_cast<fd::PagedBatch&>(args) =
      fd::paged_batch(kOp, cu_seqlens_q, kv_lens, block_tables, slot_mapping, num_rows, num_seqs);
  const Argument queries{kOp, "query", query}, rows{kOp, "latent", latent};
  queries.has_dtype(dtype), rows.has_dtype(dtype);
  args.query_stride = row_stride(queries, num_rows, num_heads * (nope_dim + rope_dim));
  args.latent_stride = row_stride(rows, num_rows, args.cache.width());
  const auto has_width = [&](const char* name, const Tensor& tensor) {
    return Argument{kOp, name, tensor}.has_dtype(dtype).has_capacity({num_rows, num_heads * latent_dim}).data();
  };
  args.absorbed = has_width("absorbed", absorbed), args.query = queries.data();
  const int64_t skipped = args.latent_stride - args.cache.width();  // the latent row is the last columns
  args.latent = rows.data<char>() + skipped * static_cast<int64_t>(phi::SizeOf(dtype));
  args.out = has_width("out", out);
  args.num_heads = num_heads, args.nope_dim = nope_dim;
  args.scale = scale, args.num_masked_prefix = num_masked_prefix;
  args.norm = Argument{kOp, "norm", norm}.has_dtype(dtype).has_shape({latent_dim}).data();
  args.eps = eps;
  args.rotary = rotary_view(positions, cos_sin, num_rows, rope_dim, is_interleaved);
  fd::launch(args);
}

}  // namespace

PD_BUILD_OP(fd_append_latent_attention)
    .Inputs({"absorbed", "query", "latent", "cache", "cu_seqlens_q", "kv_lens", "block_tables", "slot_mapping",
             "positions", "cos_sin", "norm", "out"})
    .Outputs({"cache_", "out_"})
    .Attrs({"num_rows: int64_t", "num_seqs: int64_t", "sizes: std::vector<int64_t>", "scale: float",
            "num_masked_prefix: int64_t", "is_interleaved: bool", "eps: float"})
    .SetInplaceMap({{"cache", "cache_"}, {"out", "out_"}})
    .SetKernelFn(PD_KERNEL(append_latent_attention));
