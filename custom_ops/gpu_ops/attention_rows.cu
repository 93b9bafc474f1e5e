// SPDX-License-Identifier: Apache-2.0
// Prepares the new rows of append attention: queries and keys are normalised and rotated, queries in place, and keys
// and values are written to the cache. The bits are those of cpu_ops/rotary.h and common/quant.h, except for the
// order of the sum of squares in the norm.

#include "common/export.h"
#include "common/quant.h"
#include "gpu_ops/attention_cache.h"
#include "gpu_ops/bf16.h"
#include "gpu_ops/count.h"

namespace {

using fd::code_bits;
using fd::low_limb;
using fd::row_scale;
using fd::RowScale;
using namespace fd::gpu;

constexpr int kThreads = 128, kChunk = 8;  // a lane holds eight elements of a head

struct Rows {
  int32_t num_rows, first_head, num_heads, kv_heads, block_size, num_slots;
  int32_t rotary_dim;  // 0: queries and keys are not rotated
  int32_t is_interleaved;
  float eps;
};

template <int kHeadDim>
struct Shared {
  uint16_t heads[kThreads * kChunk / kHeadDim][kHeadDim];
};

// One head of a row, of which this lane holds elements `begin` .. `begin` + 7. kHeadDim / 8 lanes hold a head.
template <int kHeadDim>
struct HeadChunk {
  static constexpr int kLanes = kHeadDim / kChunk;
  static_assert(kLanes <= static_cast<int>(kWarpSize));

  float x[kChunk];
  int begin = static_cast<int>(thread_index()) % kLanes * kChunk;

  // Multiplies the head by its norm factor and by the norm's weights, or leaves it unchanged if `norm` is null.
  FD_DEVICE void normalise(const uint16_t* norm, float eps) {
    float sum = 0.0f;
    for (float value : x) sum = fused_multiply_add(value, value, sum);
    for (unsigned mask = 1; mask < kLanes; mask *= 2) sum += shuffle_xor(sum, mask);
    if (norm == nullptr) return;
    const float mean = divide(sum, static_cast<float>(kHeadDim));
    const float factor = divide(1.0f, square_root(mean + eps));
    float weight[kChunk];
    unpack_bf16(load16_readonly(norm + begin), weight);
    for (int i = 0; i < kChunk; ++i) x[i] = x[i] * factor * weight[i];
    unpack_bf16(pack_bf16(x), x);
  }

  // Rotates pairs of elements by `angles`, cosines and then sines; `head` is memory for one head.
  FD_DEVICE void rotate(const float* angles, int rotary_dim, bool is_interleaved, uint16_t* head) {
    const int half = rotary_dim / 2;
    store16(head + begin, pack_bf16(x));
    sync_warp();
    if (angles == nullptr || begin >= rotary_dim) return;
    const bool is_whole = half % kChunk == 0;  // then all elements of a chunk have partners in one other chunk
    float cosine[kChunk], sine[kChunk], partner[kChunk];
    if (is_whole) {
      const int first = is_interleaved ? begin / 2 : begin < half ? begin : begin - half;
      load_floats(angles + first, is_interleaved, cosine);
      load_floats(angles + half + first, is_interleaved, sine);
      if (!is_interleaved) unpack_bf16(load16(head + (begin < half ? begin + half : begin - half)), partner);
    }
    FD_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const int element = begin + i;
      if (element >= rotary_dim) continue;
      const bool is_first = is_interleaved ? i % 2 == 0 : element < half;
      if (is_interleaved) partner[i] = low_bf16(head[is_first ? element + 1 : element - 1]);
      if (!is_whole) {
        const int angle = is_interleaved ? element / 2 : is_first ? element : element - half;
        cosine[i] = angles[angle];
        sine[i] = angles[half + angle];
        if (!is_interleaved) partner[i] = low_bf16(head[is_first ? element + half : element - half]);
      }
      const float along = x[i] * cosine[i], across = partner[i] * sine[i];
      x[i] = is_first ? along - across : along + across;
    }
    unpack_bf16(pack_bf16(x), x);
  }
  // Loads eight numbers, or four and each of them twice.
  FD_DEVICE static void load_floats(const float* from, bool is_twice, float (&to)[kChunk]) {
    const Bytes16 low = load16_readonly(from), high = is_twice ? low : load16_readonly(from + 4);
    FD_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t once = i < 4 ? low.word[i] : high.word[i - 4];
      to[i] = bit_cast<float>(is_twice ? low.word[i / 2] : once);
    }
  }

  FD_DEVICE void store(uint16_t* to) const { store16(to + begin, pack_bf16(x)); }

  // Writes codes -127 .. 127 and the scale of the head; `codes` may be null.
  FD_DEVICE void store_codes(uint8_t* codes, float* scale) const {
    uint32_t largest = 0;
    for (const float value : x) {
      const uint32_t magnitude = bit_cast<uint32_t>(value) >> 16 & 0x7FFF;
      largest = magnitude > largest ? magnitude : largest;
    }
    for (unsigned mask = 1; mask < kLanes; mask *= 2) {
      const uint32_t other = shuffle_xor(largest, mask);
      largest = other > largest ? other : largest;
    }
    if (codes == nullptr) return;
    const RowScale row = row_scale<false>(largest);
    uint64_t bytes = 0;
    for (int i = 0; i < kChunk; ++i) {
      const uint32_t code = row.factor == 0.0f ? 0 : low_limb(code_bits<false>(x[i], row.factor));
      bytes |= uint64_t{code} << 8 * i;
    }
    *reinterpret_cast<uint64_t*>(codes + begin) = bytes;
    if (begin == 0) *scale = row.scale;
  }
};

template <int kHeadDim, bool kIsInt8>
FD_KERNEL void write_kv(Out<uint16_t> qkv, Out<uint8_t> key, Out<uint8_t> value, In<int32_t> slot_mapping,
                        In<int32_t> positions, In<float> cos_sin, In<uint16_t> q_norm, In<uint16_t> k_norm,
                        In<int32_t> device_rows, Rows rows) {
  using Chunk = HeadChunk<kHeadDim>;
  constexpr int kHeads = kThreads / Chunk::kLanes;
  const int row = static_cast<int>(block_index().x), place = static_cast<int>(thread_index()) / Chunk::kLanes;
  const int head = rows.first_head + static_cast<int>(block_index().y) * kHeads + place;
  const int num_heads = rows.num_heads + 2 * rows.kv_heads;
  if (row >= read_count(device_rows, rows.num_rows)) return;

  uint16_t* from = qkv.data + (int64_t{row} * num_heads + head) * kHeadDim;
  const bool exists = head < num_heads, is_query = head < rows.num_heads;
  const bool is_value = head >= rows.num_heads + rows.kv_heads;
  Chunk chunk;
  unpack_bf16(exists ? load16(from + chunk.begin) : Bytes16{}, chunk.x);
  if (rows.rotary_dim > 0) {
    const bool is_rotated = exists && !is_value;
    chunk.normalise(is_rotated ? (is_query ? q_norm.data : k_norm.data) : nullptr, rows.eps);
    const float* angles = cos_sin.data + int64_t{positions.data[row]} * rows.rotary_dim;
    chunk.rotate(is_rotated ? angles : nullptr, rows.rotary_dim, rows.is_interleaved != 0,
                 shared_memory<Shared<kHeadDim>>().heads[place]);
  }
  if (exists && is_query) chunk.store(from);

  const int32_t slot = slot_mapping.data[row];
  const bool is_written = exists && !is_query && slot >= 0 && slot < rows.num_slots;
  const CacheLayout<kHeadDim, kIsInt8> layout{rows.block_size, rows.kv_heads};
  uint8_t* memory = is_value ? value.data : key.data;
  const int offset = slot % rows.block_size;
  const int64_t begin = layout.head_begin(slot / rows.block_size, (head - rows.num_heads) % rows.kv_heads);
  uint8_t* to = is_written ? memory + begin + int64_t{offset} * layout.kRowBytes : nullptr;
  if constexpr (kIsInt8)
    chunk.store_codes(to, reinterpret_cast<float*>(memory + layout.scale_begin(begin, offset)));
  else if (is_written)
    chunk.store(reinterpret_cast<uint16_t*>(to));
}

// The arguments of one launch.
struct Arguments {
  uint16_t* qkv;
  uint8_t *key, *value;
  const int32_t *slot_mapping, *positions;
  const float* cos_sin;
  const uint16_t *q_norm, *k_norm;
  const int32_t* device_rows;
  int64_t num_positions, cache_bytes;
  Rows rows;
  void* stream;
};

template <int kHeadDim, bool kIsInt8>
int launch_write_kv(const Arguments& a) {
  constexpr int kHeads = kThreads / HeadChunk<kHeadDim>::kLanes;
  const Rows& r = a.rows;
  const auto num_rows = static_cast<size_t>(r.num_rows), cache_bytes = static_cast<size_t>(a.cache_bytes);
  const size_t norm_size = kHeadDim, num_heads = static_cast<size_t>(r.num_heads + 2 * r.kv_heads);
  const auto blocks = static_cast<unsigned>((r.num_heads + 2 * r.kv_heads - r.first_head + kHeads - 1) / kHeads);
  return launch(
      write_kv<kHeadDim, kIsInt8>, {static_cast<unsigned>(r.num_rows), blocks, 1}, kThreads, sizeof(Shared<kHeadDim>),
      a.stream, Out<uint16_t>(a.qkv, num_rows * num_heads * kHeadDim), Out<uint8_t>(a.key, cache_bytes),
      Out<uint8_t>(a.value, cache_bytes), In<int32_t>(a.slot_mapping, num_rows), In<int32_t>(a.positions, num_rows),
      In<float>(a.cos_sin, static_cast<size_t>(a.num_positions * r.rotary_dim)),
      In<uint16_t>(a.q_norm, a.q_norm == nullptr ? 0 : norm_size),
      In<uint16_t>(a.k_norm, a.k_norm == nullptr ? 0 : norm_size), Count{a.device_rows, r.num_rows}.array(), r);
}

template <bool kIsInt8>
int launch_for_head_dim(int64_t head_dim, const Arguments& a) {
  if (head_dim == 64) return launch_write_kv<64, kIsInt8>(a);
  if (head_dim == 128) return launch_write_kv<128, kIsInt8>(a);
  return launch_write_kv<256, kIsInt8>(a);
}

}  // namespace

// Normalises and rotates queries and keys of the new rows and writes keys and values to the cache.
//
// qkv: [num_rows, (num_heads + 2 kv_heads) head_dim] bfloat16; key, value: num_blocks blocks (attention_cache.h).
// cos_sin: [num_positions, rotary_dim] fp32, or null; q_norm, k_norm: [head_dim] bfloat16, or null.
FD_EXPORT int fd_write_kv(uint16_t* qkv, uint8_t* key, uint8_t* value, int64_t num_blocks, const int32_t* slot_mapping,
                          const int32_t* positions, const float* cos_sin, int64_t num_positions, int64_t rotary_dim,
                          const uint16_t* q_norm, const uint16_t* k_norm, const int32_t* device_rows, int64_t num_rows,
                          int64_t num_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t is_int8,
                          int64_t is_interleaved, double eps, void* stream) {
  const char* op = "append_attention";
  FD_REQUIRE(op, head_dim, head_dim == 64 || head_dim == 128 || head_dim == 256, "64, 128 or 256");
  FD_REQUIRE(op, rotary_dim, rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
             "an even number up to head_dim");
  FD_REQUIRE(op, num_rows, num_rows >= 0 && num_rows <= INT32_MAX, "0 to 2147483647");
  if (num_rows == 0) return kSuccess;
  const auto narrow = [](int64_t number) { return static_cast<int32_t>(number); };
  const Rows rows{
      narrow(num_rows),       rotary_dim > 0 ? 0 : narrow(num_heads), narrow(num_heads),  narrow(kv_heads),
      narrow(block_size),     narrow(num_blocks * block_size),        narrow(rotary_dim), narrow(is_interleaved),
      static_cast<float>(eps)};
  const int64_t cache_bytes = num_blocks * kv_heads * block_size * (is_int8 ? head_dim + 4 : 2 * head_dim);
  const Arguments arguments{qkv,    key,         value,         slot_mapping, positions, cos_sin, q_norm,
                            k_norm, device_rows, num_positions, cache_bytes,  rows,      stream};
  return is_int8 ? launch_for_head_dim<true>(head_dim, arguments) : launch_for_head_dim<false>(head_dim, arguments);
}
