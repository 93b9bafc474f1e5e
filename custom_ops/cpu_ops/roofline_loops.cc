// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/roofline_loops.h"

#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/roofline_lines.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kLineBytes = 64;

void count(int64_t lines, int64_t& total) { __atomic_fetch_add(&total, lines, __ATOMIC_RELAXED); }

// Packed panels, each of a header with scales and then lines.
template <class Lines>
int64_t panels_loop(const LinearArgs& a, int64_t panel_bytes, int64_t header, const LoopForm& form) {
  const auto* packed = static_cast<const uint8_t*>(a.packed) + header;
  const int64_t lines = (panel_bytes - header) / kLineBytes;
  const LineRun run = {packed, nullptr, panel_bytes, lines, -header, header, form.ahead_bytes};
  int64_t total = 0;
  for_each_tile(a, Blocks(1),
                [&](const Tile& tile) { count(multiply_run<Lines>(run, tile.panel, tile.last, a.rows, form), total); });
  return total;
}

// The packets of sixteen positions of one block of the cache and one KV head that a sequence sees, and the rows that
// meet them.
struct Chunk {
  const uint8_t *keys, *values;
  int64_t packets, rows;
};

// The chunks of all sequences in the order in which a cache holds them: by sequence, block and KV head.
struct Chunks {
  const AttentionArgs& a;
  int64_t key_bytes, value_bytes, most_blocks;  // bytes of a packet

  Chunks(const AttentionArgs& args, int64_t width)
      : a(args),
        key_bytes(kPanel * args.cache.key_width() * width),
        value_bytes(kPanel * args.cache.value_width() * width),
        most_blocks(0) {
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
      const int64_t blocks = (a.kv_lens[seq] + a.cache.block_size - 1) / a.cache.block_size;
      most_blocks = blocks > most_blocks ? blocks : most_blocks;
    }
  }

  int64_t count() const { return a.num_seqs * most_blocks * a.cache.num_kv_heads; }

  // Returns a chunk without packets where the sequence has fewer blocks.
  Chunk at(int64_t index) const {
    const int64_t heads = a.cache.num_kv_heads, block = index / heads % most_blocks, seq = index / heads / most_blocks;
    const int64_t left = a.kv_lens[seq] - block * a.cache.block_size;
    if (left <= 0) return {nullptr, nullptr, 0, 0};
    const int64_t place = a.block_tables[seq * a.max_blocks + block] * heads + index % heads;
    const int64_t packets = a.cache.block_size / kPanel, seen = (left + kPanel - 1) / kPanel;
    return {static_cast<const uint8_t*>(a.cache.key) + place * packets * key_bytes,
            static_cast<const uint8_t*>(a.cache.value) + place * packets * value_bytes, seen < packets ? seen : packets,
            (a.cu_seqlens_q[seq + 1] - a.cu_seqlens_q[seq]) * (a.num_heads / heads)};
  }
};

// Keys are lines of pairs of the head by sixteen positions, values of pairs of positions by sixteen of the head: the
// same products. In int8 a packet's scales follow it.
template <class Lines>
int64_t chunks_loop(const AttentionArgs& a, int64_t width, const LoopForm& form) {
  const Chunks chunks(a, width);
  const int64_t num_chunks = chunks.count(), scales = kPanel * a.cache.scale_width();
  int64_t total = 0;
  for_each_in_stretches(num_chunks, true, [&](int64_t index) {
    const Chunk now = chunks.at(index);
    if (now.packets == 0) return;
    Chunk next = index + 1 < num_chunks ? chunks.at(index + 1) : now;
    if (next.packets == 0) next = now;
    const auto multiply = [&](const uint8_t* data, const uint8_t* ahead, int64_t bytes) {
      const int64_t codes = bytes - scales;
      const LineRun run = {data, ahead, bytes, codes / kLineBytes, codes, scales, now.packets * bytes};
      count(multiply_run<Lines>(run, 0, now.packets, now.rows, form), total);
    };
    multiply(now.keys, next.keys, chunks.key_bytes);
    multiply(now.values, next.values, chunks.value_bytes);
  });
  return total;
}

}  // namespace

int64_t linear_loop(const LinearArgs& a, const LoopForm& form) {
  const int64_t panel_size = (a.k + 1) / 2 * 2 * kPanel;
  return a.dtype == DType::kBfloat16 ? panels_loop<Bf16Lines>(a, 2 * panel_size, 0, form)
                                     : panels_loop<Fp32Lines>(a, 4 * panel_size, 0, form);
}

int64_t linear_quantized_loop(const QuantizedLinearArgs& a, const LoopForm& form) {
  const int64_t bytes = quantized_panel_bytes(a.quantization, a.k), header = scale_bytes(a.quantization, a.k);
  switch (a.quantization) {
    case Quantization::kWint8:
      return panels_loop<QuantizedLines<Quantization::kWint8>>(a, bytes, header, form);
    case Quantization::kWint4:
      return panels_loop<QuantizedLines<Quantization::kWint4>>(a, bytes, header, form);
    case Quantization::kW8a8:
      return panels_loop<QuantizedLines<Quantization::kW8a8>>(a, bytes, header, form);
    case Quantization::kW4a8:
      return panels_loop<QuantizedLines<Quantization::kW4a8>>(a, bytes, header, form);
  }
  return 0;
}

int64_t row_limbs(Quantization quantization) { return has_wide_rows(quantization) ? kWideLimbs : 1; }

int64_t attention_loop(const AttentionArgs& a, const LoopForm& form) {
  switch (a.cache.dtype) {
    case DType::kFloat32:
      return chunks_loop<Fp32Lines>(a, 4, form);
    case DType::kBfloat16:
      return chunks_loop<Bf16Lines>(a, 2, form);
    case DType::kInt8:
      return chunks_loop<CachedLines>(a, 1, form);
  }
  return 0;
}

}  // namespace FD_ISA
}  // namespace fd
