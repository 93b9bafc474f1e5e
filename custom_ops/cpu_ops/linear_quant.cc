// SPDX-License-Identifier: Apache-2.0
// Linear layers over weights of four and eight bits. Integers are multiplied as they are, in bf16 (wint8, wint4) or
// with rows quantized to int8 (w8a8, w4a8); scales are applied to sums. An output is, whatever the number of rows,
//   total = 0; for each group of k in order: total = fma(sum over the group in order, scale of the group, total)
// times the row's scale where rows are quantized; then bias, gate and residual.
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

// A format: how a block of weights becomes units, and what is summed.
template <Quantization kQuantization>
struct Format;

struct PairFormat {
  using Element = PairElement;
  using Unit = PairUnit;
  using Sum = F16;
  FD_INLINE Sum start(int32_t) { return zero(); }
  FD_INLINE F16 value(Sum sum) { return sum; }
};

struct QuadFormat {
  using Element = QuadElement;
  using Unit = QuadUnit;
  using Sum = I16;
  FD_INLINE Sum start(int32_t offset) { return splat_int(offset); }
  FD_INLINE F16 value(Sum sum) { return to_float(sum); }
};

template <>
struct Format<Quantization::kWint8> : PairFormat {
  static constexpr int kUnits = 2;
  FD_INLINE Unit unit(const uint8_t* block, int u) { return wint8_unit(block, u); }
};

template <>
struct Format<Quantization::kWint4> : PairFormat {
  static constexpr int kUnits = 4;
  FD_INLINE Unit unit(const uint8_t* block, int u) { return wint4_unit(block, u); }
};

template <>
struct Format<Quantization::kW8a8> : QuadFormat {
  static constexpr int kUnits = 1;
  FD_INLINE Unit unit(const uint8_t* block, int) { return w8a8_unit(block); }
};

template <>
struct Format<Quantization::kW4a8> : QuadFormat {
  static constexpr int kUnits = 2;
  FD_INLINE Unit unit(const uint8_t* block, int u) { return w4a8_unit(block, u); }
};

// Weights as they are stored.
template <Quantization kQuantization>
struct Stored : Format<kQuantization> {
  static constexpr int kBlockBytes = 64;
  static constexpr bool kIsFetched = true;
};

// Units that a tile has made from its weights, in bf16, because several blocks of rows need them.
template <Quantization kQuantization>
struct Expanded : Format<kQuantization> {
  using Unit = typename Format<kQuantization>::Unit;
  static constexpr int kUnits = Format<kQuantization>::kUnits, kBlockBytes = kUnits * 64;
  static constexpr bool kIsFetched = false;  // they are in the cache
  FD_INLINE Unit unit(const uint8_t* block, int u) { return widen_unit(load_pairs(block + 64 * u)); }
  FD_INLINE void make(const uint8_t* stored, uint8_t* block) {
    for (int u = 0; u < kUnits; ++u) {
      const Pairs pairs = narrow_unit(Format<kQuantization>::unit(stored, u));
      std::memcpy(block + 64 * u, &pairs, 64);
    }
  }
};

// A tile's view of the arguments. Sizes in blocks of weights.
template <Quantization kQuantization>
struct Problem {
  static constexpr bool kGrouped = has_four_bits(kQuantization);
  using Element = typename Format<kQuantization>::Element;

  const LinearArgs& a;
  QuantizedRows<Element> rows;
  int64_t num_blocks, panel_bytes, header_bytes;

  explicit Problem(const QuantizedLinearArgs& args)
      : a(args),
        num_blocks((args.k + block_k(kQuantization) - 1) / block_k(kQuantization)),
        panel_bytes(quantized_panel_bytes(kQuantization, args.k)),
        header_bytes(scale_bytes(kQuantization, args.k)) {}

  int64_t row_units() const { return num_blocks * Format<kQuantization>::kUnits; }
  const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(a.packed) + index * panel_bytes; }
  FD_INLINE F16 scale(const uint8_t* panel, int64_t group) {
    if constexpr (kGrouped) return load_bf16(reinterpret_cast<const uint16_t*>(panel) + group * kPanel);
    return load(reinterpret_cast<const float*>(panel));
  }
};

// The panels that a block of rows meets at a time. A sum is a chain of additions that each wait for the last: few rows
// need several panels to keep the processor busy, and two streams of weights come in faster than one. Beyond eight rows
// the sums of two panels leave too few registers for units that are two vectors. As in linear.cc, where processors
// foresee streams by themselves it stays at eight.
template <class Unit>
constexpr int panels_at_a_time(int rows) {
#if defined(FD_ISA_AVX512)
  return rows <= 4 ? 4 : rows <= (kFetchesStreams && sizeof(Unit) == 64 ? 12 : 8) ? 2 : 1;
#else
  return rows == 1 ? 2 : 1;
#endif
}

// Asks for a line of weights that is needed soon: into the L1 cache for four streams, which few rows read; into L2
// where more rows keep L1 and its fill buffers busy.
template <int NV>
FD_INLINE void fetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, NV == 4 ? 3 : 2);
}

// Asks for the scales of NV panels, which lie between their codes.
template <int NV, Quantization kQuantization>
FD_INLINE void fetch_scales(const Problem<kQuantization>& p, int64_t panel) {
  for (int v = 0; v < NV; ++v)
    for (int64_t at = 0; at < p.header_bytes; at += 64) fetch<NV>(p.panel(panel + v) + at);
}

// sum[r][v] += a strip of `count` blocks of weights of NV panels, `stride` bytes apart, times its elements of MR rows;
// `fetched` is what the strip asks for meanwhile.
template <int MR, int NV, class Source>
FD_INLINE void dot_strip(typename Source::Sum (&sum)[MR][NV], const typename Source::Element* x, const uint8_t* codes,
                         const uint8_t* fetched, int64_t stride, int64_t count) {
  int64_t block = 0;
  do {  // in registers, because every loop over sums is unrolled and none is left out
    if (Source::kIsFetched)
      for (int v = 0; v < NV; ++v) fetch<NV>(fetched + v * stride + block * Source::kBlockBytes);
#pragma GCC unroll 4
    for (int u = 0; u < Source::kUnits; ++u) {
      typename Source::Unit units[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) units[v] = Source::unit(codes + v * stride + block * Source::kBlockBytes, u);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v)
          sum[r][v] = dot_unit(sum[r][v], x[(block * Source::kUnits + u) * MR + r], units[v]);
    }
  } while (++block < count);
}

// One block of MR rows, the first of which is `row`, times NV panels. codes[v] are the panel's weights in the form of
// Source, `stride` bytes apart; they are followed by those of the next NV panels. `gates` [MR][16] lasts from a gate's
// panel to its up's.
template <int MR, int NV, class Source, Quantization kQuantization>
void row_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, const uint8_t* codes, int64_t stride,
               float* gates) {
  constexpr bool kGrouped = has_four_bits(kQuantization);
  constexpr int64_t ahead = kFetchBytes / (NV * Source::kBlockBytes);
  constexpr int64_t strip = kGrouped ? kGroup / block_k(kQuantization) : 16;
  const auto* x = p.rows.elements + row * p.row_units();
  if (Source::kIsFetched) fetch_scales<NV>(p, panel + NV);
  F16 total[MR][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) total[r][v] = zero();
  typename Source::Sum sum[MR][NV];
  for (int64_t block = 0, group = 0; block < p.num_blocks; block += strip) {
    if (kGrouped || block == 0) {
      const auto starts = p.rows.starts_of(row, MR, group);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = Source::start(starts[r]);
    }
    const int64_t left = p.num_blocks - block;
    const uint8_t* fetched = codes + (block + ahead) * Source::kBlockBytes;
    if (ahead >= left) fetched += NV * stride - p.num_blocks * Source::kBlockBytes;
    dot_strip<MR, NV, Source>(sum, x + block * Source::kUnits * MR, codes + block * Source::kBlockBytes, fetched,
                              stride, left < strip ? left : strip);
    if (kGrouped || left <= strip) {
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        const F16 scale = p.scale(p.panel(panel + v), group);
#pragma GCC unroll 32
        for (int r = 0; r < MR; ++r) total[r][v] = fma(Source::value(sum[r][v]), scale, total[r][v]);
      }
      if (kGrouped && MR * NV > 12) asm volatile("" : "+m"(total));  // registers are for sums
      ++group;
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v)
      finish<uint16_t>(p.a, p.rows.scaled(total[r][v], row + r), row + r, panel + v, gates + r * kPanel);
}

// A block of rows times panels [panel, last) as they are stored.
template <int MR, Quantization kQuantization>
void tile_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, int64_t last) {
  using Source = Stored<kQuantization>;
  constexpr int NV = panels_at_a_time<typename Source::Unit>(MR);
  float gates[MR * kPanel];
  for (; panel + NV <= last; panel += NV)
    row_block<MR, NV, Source>(p, row, panel, p.panel(panel) + p.header_bytes, p.panel_bytes, gates);
  for (; panel < last; ++panel)
    row_block<MR, 1, Source>(p, row, panel, p.panel(panel) + p.header_bytes, p.panel_bytes, gates);
}

template <Quantization kQuantization, int... kHeight>
FD_INLINE void any_tile_block(std::integer_sequence<int, kHeight...>, int64_t height, const Problem<kQuantization>& p,
                              int64_t row, int64_t panel, int64_t last) {
  using TileBlock = void (*)(const Problem<kQuantization>&, int64_t, int64_t, int64_t);
  constexpr TileBlock by_height[] = {tile_block<kHeight + 1, kQuantization>...};
  by_height[height - 1](p, row, panel, last);
}

// As row_block for a height known at run time, over an expanded panel.
template <Quantization kQuantization, int... kHeight>
FD_INLINE void any_expanded_block(std::integer_sequence<int, kHeight...>, int64_t height,
                                  const Problem<kQuantization>& p, int64_t row, int64_t panel, const uint8_t* units,
                                  float* gates) {
  using RowBlock = void (*)(const Problem<kQuantization>&, int64_t, int64_t, const uint8_t*, int64_t, float*);
  constexpr RowBlock by_height[] = {row_block<kHeight + 1, 1, Expanded<kQuantization>, kQuantization>...};
  by_height[height - 1](p, row, panel, units, 0, gates);
}

// A tile of several blocks of rows: each panel becomes units once.
template <Quantization kQuantization>
void expanded_tile(const Problem<kQuantization>& p, const Blocks& blocks, const Tile& tile) {
  using Source = Expanded<kQuantization>;
  auto* units =
      static_cast<uint8_t*>(thread_scratch(static_cast<size_t>(p.num_blocks * Source::kBlockBytes), Scratch::kTile));
  float gates[kTileBlocks][kColumnRows * kPanel];
  for (int64_t panel = tile.panel; panel < tile.last; ++panel) {
    const uint8_t* codes = p.panel(panel) + p.header_bytes;
    for (int64_t block = 0; block < p.num_blocks; ++block)
      Source::make(codes + block * 64, units + block * Source::kBlockBytes);
    for (int64_t b = tile.block; b < tile.end; ++b) {
      const int64_t row = blocks.begin(b);
      any_expanded_block(std::make_integer_sequence<int, kColumnRows>(), blocks.begin(b + 1) - row, p, row, panel,
                         units, gates[b - tile.block]);
    }
  }
}

template <Quantization kQuantization>
void linear_in(const QuantizedLinearArgs& a) {
  if (a.rows == 0) return;
  Problem<kQuantization> p(a);
  const Blocks blocks(a.rows);
  p.rows = prepare_rows<kQuantization, typename Problem<kQuantization>::Element>(a, blocks, p.row_units());
  for_each_tile(a, blocks, [&](const Tile& tile) {
    // Integers are used as they are stored; what becomes bf16 does so once for all blocks of rows.
    if constexpr (std::is_base_of_v<PairFormat, Format<kQuantization>>)
      if (tile.end - tile.block > 1) return expanded_tile(p, blocks, tile);
    for (int64_t b = tile.block; b < tile.end; ++b) {
      const int64_t row = blocks.begin(b);
      any_tile_block(std::make_integer_sequence<int, kColumnRows>(), blocks.begin(b + 1) - row, p, row, tile.panel,
                     tile.last);
    }
  });
}

}  // namespace

void linear_quantized(const QuantizedLinearArgs& a) {
  switch (a.quantization) {
    case Quantization::kWint8:
      return linear_in<Quantization::kWint8>(a);
    case Quantization::kWint4:
      return linear_in<Quantization::kWint4>(a);
    case Quantization::kW8a8:
      return linear_in<Quantization::kW8a8>(a);
    case Quantization::kW4a8:
      return linear_in<Quantization::kW4a8>(a);
  }
}

}  // namespace FD_ISA
}  // namespace fd
