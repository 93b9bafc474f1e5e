// SPDX-License-Identifier: Apache-2.0
// The loops of linear layers and attention, compiled for one instruction-set path.
#include "roofline/loops.h"

#include "cpu_ops/linear_tiles.h"
#include "roofline/lines.h"

namespace fd {
namespace FD_ISA {
namespace {

using roofline::LoopForm;

constexpr int64_t kLineBytes = 64;

void count(int64_t lines, int64_t& total) { __atomic_fetch_add(&total, lines, __ATOMIC_RELAXED); }

// Multiplies packed panels, each of which is a header, with scales for groups of lines, followed by lines.
template <class Lines>
int64_t panels_loop(const LinearArgs& a, int64_t panel_bytes, int64_t header, int group_shift, const LoopForm& form) {
  const auto* packed = static_cast<const uint8_t*>(a.packed) + header;
  const int64_t lines = (panel_bytes - header) / kLineBytes;
  const LineRun run = {packed, nullptr, panel_bytes, lines, -header, header, group_shift, form.ahead_bytes};
  int64_t total = 0;
  for_each_tile(a, RowBlocks(1),
                [&](const Tile& tile) { count(multiply_run<Lines>(run, tile.panel, tile.last, a.rows, form), total); });
  return total;
}

// The visible KV tiles of one block and KV head of a sequence, and the number of rows that multiply them.
struct KvBlock {
  const uint8_t *keys, *values;
  int64_t tiles, rows;
};

// The KV blocks of all sequences, ordered by sequence, block and KV head.
struct KvBlocks {
  const AttentionArgs& a;
  int64_t key_bytes, value_bytes;  // of a KV tile
  int64_t max_blocks;              // of a sequence

  KvBlocks(const AttentionArgs& args, int64_t width)
      : a(args),
        key_bytes(kPanel * args.cache.key_width() * width),
        value_bytes(kPanel * args.cache.value_width() * width),
        max_blocks(0) {
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
      const int64_t blocks = (a.kv_lens[seq] + a.cache.block_size - 1) / a.cache.block_size;
      max_blocks = blocks > max_blocks ? blocks : max_blocks;
    }
  }

  int64_t count() const { return a.num_seqs * max_blocks * a.cache.num_kv_heads; }

  // Returns a block without tiles if the sequence has fewer blocks.
  KvBlock at(int64_t index) const {
    const int64_t heads = a.cache.num_kv_heads, block = index / heads % max_blocks, seq = index / heads / max_blocks;
    const int64_t left = a.kv_lens[seq] - block * a.cache.block_size;
    if (left <= 0) return {nullptr, nullptr, 0, 0};
    const int64_t position = a.block_tables[seq * a.max_blocks + block] * heads + index % heads;
    const int64_t tiles = a.cache.block_size / kPanel, visible = (left + kPanel - 1) / kPanel;
    return {static_cast<const uint8_t*>(a.cache.key) + position * tiles * key_bytes,
            static_cast<const uint8_t*>(a.cache.value) + position * tiles * value_bytes,
            visible < tiles ? visible : tiles, (a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]) * (a.num_heads / heads)};
  }
};

// A line of keys holds pairs of head elements for sixteen positions, a line of values pairs of positions for sixteen
// head elements: the products are the same. In an int8 cache the scales of a tile follow its codes.
template <class Lines>
int64_t kv_loop(const AttentionArgs& a, int64_t width, const LoopForm& form) {
  const KvBlocks blocks(a, width);
  const int64_t num_blocks = blocks.count(), scales = kPanel * a.cache.scale_width();
  int64_t total = 0;
  for_each_in_ranges(num_blocks, true, [&](int64_t index) {
    const KvBlock now = blocks.at(index);
    if (now.tiles == 0) return;
    KvBlock next = index + 1 < num_blocks ? blocks.at(index + 1) : now;
    if (next.tiles == 0) next = now;
    const auto multiply = [&](const uint8_t* data, const uint8_t* ahead, int64_t bytes) {
      const int64_t codes = bytes - scales;
      const LineRun run = {data, ahead, bytes, codes / kLineBytes, codes, scales, 0, now.tiles * bytes};
      count(multiply_run<Lines>(run, 0, now.tiles, now.rows, form), total);
    };
    multiply(now.keys, next.keys, blocks.key_bytes);
    multiply(now.values, next.values, blocks.value_bytes);
  });
  return total;
}

}  // namespace
}  // namespace FD_ISA

namespace roofline {

using namespace FD_ISA;

int64_t linear_loop(const LinearArgs& a, const LoopForm& form) {
  const int64_t panel_size = (a.k + 1) / 2 * 2 * kPanel;
  return a.dtype == DType::kBfloat16 ? panels_loop<Bf16Lines>(a, 2 * panel_size, 0, 0, form)
                                     : panels_loop<Fp32Lines>(a, 4 * panel_size, 0, 0, form);
}

int64_t linear_quantized_loop(const QuantizedLinearArgs& a, const LoopForm& form) {
  const int64_t bytes = quantized_panel_bytes(a.form, a.k), header = header_bytes(a.form, a.k);
  return dispatch_format(a.form, [&](auto format) {
    return panels_loop<QuantizedLines<format.value>>(a, bytes, header, a.form.group_shift(), form);
  });
}

int64_t row_limbs(Quantization quantization) { return has_16_bit_rows(quantization) ? kLimbsOf16Bits : 1; }

int64_t attention_loop(const AttentionArgs& a, const LoopForm& form) {
  switch (a.cache.dtype) {
    case DType::kFloat32:
      return kv_loop<Fp32Lines>(a, 4, form);
    case DType::kBfloat16:
      return kv_loop<Bf16Lines>(a, 2, form);
    case DType::kInt8:
      return kv_loop<CachedLines>(a, 1, form);
  }
  return 0;
}

}  // namespace roofline
}  // namespace fd
