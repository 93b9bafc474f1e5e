// SPDX-License-Identifier: Apache-2.0
// Rows of a packed quantized weight as bf16 (common/quant.h), for an embedding: a block for each row, whose threads
// widen eight inputs at a time.

#include "common/export.h"
#include "gpu_ops/count.h"
#include "gpu_ops/quant_tiles.h"

namespace {

using namespace fd;
using namespace fd::gpu;

constexpr int kChunkInputs = 8;
constexpr unsigned kMaxThreads = 256;

// Sizes of a packed weight (quant_tiles.h).
struct TileSizes {
  int inputs, num_tiles, tile_bytes, header_bytes;
  int scale_bytes, group_shift;
  bool has_scales, has_minimum;
};

// Returns code i of eight inputs from `input` on: of their bytes or, in 4 bits, of one of the nibbles of these bytes.
template <bool kFourBits>
FD_DEVICE int32_t code_at(uint64_t bytes, int i, int input, bool is_unsigned) {
  const auto byte = static_cast<uint32_t>(bytes >> 8 * i) & 255u;
  const uint32_t code = !kFourBits ? byte : input % 64 < 32 ? byte & 15u : byte >> 4;
  constexpr uint32_t kSign = kFourBits ? 8u : 128u;
  return is_unsigned ? static_cast<int32_t>(code) : static_cast<int32_t>(code ^ kSign) - static_cast<int32_t>(kSign);
}

// Writes the weights of row `row` of a tile.
template <bool kFourBits>
FD_DEVICE void widen_row(const uint8_t* tile, int row, const TileSizes& sizes, Bytes16* to) {
  constexpr int kUnitInputs = kFourBits ? 64 : 32;
  const uint8_t* codes = tile + sizes.header_bytes + row * 32;
  const uint8_t* scales = tile + kFactorBytes + row % 8 * 4 + row / 8 * 2;
  const float factor = reinterpret_cast<const float*>(tile)[row];
  const int step = static_cast<int>(block_size()) * kChunkInputs;
  for (int input = static_cast<int>(thread_index()) * kChunkInputs; input < sizes.inputs; input += step) {
    const uint8_t* chunk = codes + int64_t{input / kUnitInputs} * kUnitBytes + input % 32;
    const uint64_t bytes = *reinterpret_cast<const uint64_t*>(chunk);
    const uint8_t* group = scales + (input / static_cast<int>(kPiece) >> sizes.group_shift) * kGroupScaleBytes;
    float scale = 1.0f, minimum = -0.0f;
    if (sizes.has_scales) scale = widen_half(*reinterpret_cast<const uint16_t*>(group));
    if (sizes.has_minimum) minimum = widen_half(*reinterpret_cast<const uint16_t*>(group + sizes.scale_bytes));
    float values[kChunkInputs];
    for (int i = 0; i < kChunkInputs; ++i)
      values[i] = weight_value(code_at<kFourBits>(bytes, i, input, sizes.has_minimum), scale, minimum, factor);
    store16(to + input / kChunkInputs, pack_bf16(values));
  }
}

template <bool kFourBits>
FD_KERNEL void widen_rows(In<uint8_t> tiles, In<int32_t> ids, Out<Bytes16> out, In<int32_t> device_rows, int num_rows,
                          TileSizes sizes) {
  const int row = static_cast<int>(block_index().x);
  if (row >= read_count(device_rows, num_rows)) return;
  const int id = ids.data[row], in_tile = id % static_cast<int>(kPanel);
  const uint8_t* tile = tiles.data + int64_t{id / static_cast<int>(kPanel)} * sizes.tile_bytes;
  widen_row<kFourBits>(tile, in_tile, sizes, out.data + int64_t{row} * (sizes.inputs / kChunkInputs));
}

TileSizes sizes_of(const QuantizedForm& form, int64_t vocab, int64_t k) {
  const int64_t unit_inputs = has_four_bits(form.quantization) ? 64 : 32;
  TileSizes sizes;
  sizes.inputs = static_cast<int>(k);
  sizes.num_tiles = static_cast<int>((vocab + kPanel - 1) / kPanel);
  sizes.scale_bytes = static_cast<int>(scale_bytes(form, k));
  sizes.header_bytes = static_cast<int>(header_bytes(form, k));
  sizes.tile_bytes = sizes.header_bytes + static_cast<int>((k + unit_inputs - 1) / unit_inputs) * kUnitBytes;
  sizes.group_shift = form.group_shift();
  sizes.has_scales = form.has_scales();
  sizes.has_minimum = form.has_minimum;
  return sizes;
}

}  // namespace

// token_ids: [num_rows] int32; table: a packed weight [vocab, k] in the form of quantization, group_size and
// has_minimum; out: [num_rows, k] bf16.
FD_EXPORT int fd_quantized_embedding(const int32_t* token_ids, const uint8_t* table, void* out,
                                     const int32_t* device_rows, int64_t num_rows, int64_t vocab, int64_t k,
                                     int64_t quantization, int64_t group_size, int64_t has_minimum, void* stream) {
  constexpr const char* op = "packed_embedding";
  FD_REQUIRE(op, k, k > 0 && k <= 1 << 16 && k % kChunkInputs == 0, "a multiple of 8 inputs, at most 65536");
  FD_REQUIRE(op, vocab, vocab > 0 && vocab <= 1 << 20, "1 to 1048576 rows");
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  FD_REQUIRE(op, quantization, quantization >= 0 && quantization <= 3, "0 to 3");
  FD_REQUIRE(op, group_size, group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128,
             "0, 32, 64 or 128");
  if (num_rows == 0) return kSuccess;
  const QuantizedForm form{static_cast<Quantization>(quantization), static_cast<int32_t>(group_size), has_minimum != 0};
  const TileSizes sizes = sizes_of(form, vocab, k);
  const Count rows{device_rows, static_cast<int32_t>(num_rows)};
  const auto chunks = static_cast<unsigned>(k / kChunkInputs);
  const unsigned threads = (chunks + kWarpSize - 1) / kWarpSize * kWarpSize;
  return launch(has_four_bits(form.quantization) ? widen_rows<true> : widen_rows<false>,
                {static_cast<unsigned>(rows.max), 1, 1}, threads < kMaxThreads ? threads : kMaxThreads, 0, stream,
                In<uint8_t>(table, static_cast<size_t>(sizes.num_tiles) * static_cast<size_t>(sizes.tile_bytes)),
                In<int32_t>(token_ids, static_cast<size_t>(rows.max)),
                Out<Bytes16>(static_cast<Bytes16*>(out), static_cast<size_t>(rows.max) * chunks), rows.array(),
                rows.max, sizes);
}
