// SPDX-License-Identifier: Apache-2.0
// Copies of rows by index, 16 bytes at a time: a block for each row.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/device.h"

namespace {

using namespace fd::gpu;

constexpr int kChunk = sizeof(Bytes16);
constexpr unsigned kMaxThreads = 256;

// Copies source[ids[r]] to target[r], or source[r] to target[ids[r]]; a row is `row_chunks` chunks of 16 bytes, and
// rows of the source begin every `source_chunks`.
template <bool kIsScatter>
FD_KERNEL void copy_rows(In<Bytes16> source, In<int32_t> ids, Out<Bytes16> target, In<int32_t> device_rows,
                         int num_rows, int row_chunks, int source_chunks) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int64_t id = ids.data[row];
  const Bytes16* from = source.data + (kIsScatter ? row : id) * source_chunks;
  Bytes16* to = target.data + (kIsScatter ? id : row) * row_chunks;
  for (unsigned i = thread_index(); i < static_cast<unsigned>(row_chunks); i += block_size())
    store16(to + i, load16_readonly(from + i));
}

// Arguments of one operator; `source_rows` and `target_rows` are the capacities.
struct CopyRows {
  const void* source;
  int64_t source_rows;
  const int32_t* ids;
  void* target;
  int64_t target_rows;
  Count rows;
  int64_t row_bytes, source_stride_bytes;
};

template <bool kIsScatter>
int launch_copy(const CopyRows& c, void* stream) {
  if (c.rows.max == 0) return kSuccess;
  const int64_t chunks = c.row_bytes / kChunk, source_chunks = c.source_stride_bytes / kChunk;
  const auto threads = static_cast<unsigned>((chunks + kWarpSize - 1) / kWarpSize * kWarpSize);
  return launch(copy_rows<kIsScatter>, {static_cast<unsigned>(c.rows.max), 1, 1},
                threads < kMaxThreads ? threads : kMaxThreads, 0, stream,
                In<Bytes16>(static_cast<const Bytes16*>(c.source), static_cast<size_t>(c.source_rows * source_chunks)),
                In<int32_t>(c.ids, static_cast<size_t>(c.rows.max)),
                Out<Bytes16>(static_cast<Bytes16*>(c.target), static_cast<size_t>(c.target_rows * chunks)),
                c.rows.array(), c.rows.max, static_cast<int>(chunks), static_cast<int>(source_chunks));
}

int check_rows(const char* op, int64_t num_rows, int64_t row_bytes) {
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  FD_REQUIRE(op, row_bytes, row_bytes > 0 && row_bytes % kChunk == 0 && row_bytes <= INT32_MAX,
             "a multiple of 16 bytes");
  return kSuccess;
}

int gather(const char* op, const void* table, int64_t table_rows, const int32_t* ids, void* out,
           const int32_t* device_rows, int64_t num_rows, int64_t row_bytes, int64_t stride_bytes, void* stream) {
  if (const int code = check_rows(op, num_rows, row_bytes)) return code;
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  return launch_copy<false>({table, table_rows, ids, out, num_rows, rows, row_bytes, stride_bytes}, stream);
}

}  // namespace

// token_ids: [num_rows] int32; table: [vocab, row_bytes]; out: [num_rows, row_bytes].
FD_EXPORT int fd_embedding(const int32_t* token_ids, const void* table, int64_t vocab, void* out,
                           const int32_t* device_rows, int64_t num_rows, int64_t row_bytes, void* stream) {
  return gather("embedding", table, vocab, token_ids, out, device_rows, num_rows, row_bytes, row_bytes, stream);
}

// token_ids: [num_rows] int32; table: [vocab, stride_bytes]; out: [num_rows, row_bytes].
FD_EXPORT int fd_packed_embedding(const int32_t* token_ids, const void* table, int64_t vocab, int64_t stride_bytes,
                                  void* out, const int32_t* device_rows, int64_t num_rows, int64_t row_bytes,
                                  void* stream) {
  constexpr const char* op = "packed_embedding";
  FD_REQUIRE(op, stride_bytes, stride_bytes >= row_bytes && stride_bytes % kChunk == 0, "a multiple of 16 bytes");
  return gather(op, table, vocab, token_ids, out, device_rows, num_rows, row_bytes, stride_bytes, stream);
}

// x: [x_rows, row_bytes]; rows: [num_rows] int32; out: [num_rows, row_bytes].
FD_EXPORT int fd_gather_rows(const void* x, int64_t x_rows, const int32_t* rows, void* out, const int32_t* device_rows,
                             int64_t num_rows, int64_t row_bytes, void* stream) {
  return gather("gather_rows", x, x_rows, rows, out, device_rows, num_rows, row_bytes, row_bytes, stream);
}

// x: [num_rows, row_bytes]; rows: [num_rows] int32, distinct; out: [out_rows, row_bytes].
FD_EXPORT int fd_scatter_rows(const void* x, const int32_t* rows, void* out, int64_t out_rows,
                              const int32_t* device_rows, int64_t num_rows, int64_t row_bytes, void* stream) {
  if (const int code = check_rows("scatter_rows", num_rows, row_bytes)) return code;
  const Count count{device_rows, static_cast<int32_t>(num_rows)};
  return launch_copy<true>({x, num_rows, rows, out, out_rows, count, row_bytes, row_bytes}, stream);
}
