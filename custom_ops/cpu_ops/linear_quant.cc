// SPDX-License-Identifier: Apache-2.0
// Linear layers over weights of four and eight bits: integers times rows quantized to integers, of sixteen bits (wint8,
// wint4) or of eight (w8a8, w4a8). Scales are applied to sums. An output is, whatever the number of rows,
//   total = 0; for each group of k in order: total = fma(sum over the group, exact, in fp32, scale of the weights,
//   total)
// times the row's scale; then bias, gate and residual.
#include <utility>

#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_outputs.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kBlockBytes = 64;

template <Quantization kQuantization>
using Lines = CodeLines<has_four_bits(kQuantization)>;

// Rows of a block, at most: their limbs have to fit the registers.
template <Quantization kQuantization>
constexpr int kRows = kColumnRows / kLimbs<kQuantization>;

// A tile's view of the arguments. Sizes in blocks of weights.
template <Quantization kQuantization>
struct Problem {
  const LinearArgs& a;
  QuantizedRows rows;
  int64_t num_blocks, num_groups, panel_bytes, header_bytes;

  explicit Problem(const QuantizedLinearArgs& args)
      : a(args),
        num_blocks((args.k + block_k(kQuantization) - 1) / block_k(kQuantization)),
        num_groups((num_blocks * block_k(kQuantization) + kIntegerK<kQuantization> - 1) / kIntegerK<kQuantization>),
        panel_bytes(quantized_panel_bytes(kQuantization, args.k)),
        header_bytes(scale_bytes(kQuantization, args.k)) {}

  int64_t row_units() const { return num_blocks * Lines<kQuantization>::kUnits; }
  const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(a.packed) + index * panel_bytes; }
  const uint8_t* codes(int64_t index) const { return panel(index) + header_bytes; }
  FD_INLINE F16 scale(const uint8_t* panel, int64_t group) {
    if constexpr (has_four_bits(kQuantization))
      return load_bf16(reinterpret_cast<const uint16_t*>(panel) + group * kPanel);
    return load(reinterpret_cast<const float*>(panel));
  }
};

// The panels that a block of rows meets at a time, by its rows' limbs. A sum is a chain of additions that each wait for
// the last: few rows need several panels to keep the processor busy, and two streams of weights come in faster than
// one. As in linear.cc, where processors foresee streams by themselves it stays at eight.
constexpr int panels_at_a_time(int limb_rows) {
#if defined(FD_ISA_AVX512)
  return limb_rows <= 4 ? 4 : limb_rows <= (kFetchesStreams ? 15 : 8) ? 2 : 1;
#else
  return limb_rows == 1 ? 2 : 1;
#endif
}

// Asks for a line of weights that is needed soon: into the L1 cache for four streams, which few rows read; into L2
// where more rows keep L1 and its fill buffers busy.
template <int NV>
FD_INLINE void fetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, NV == 4 ? 3 : 2);
}

// Streams of weights that are fetched while NV panels are met: four come in faster than one or two. Not for the blocks
// of long prompts, which find their weights in the cache and have no load to spare.
template <int kLimbRows, int NV>
constexpr int64_t kStreams = kFetchesStreams && NV < 4 && kLimbRows <= 18 ? 4 : NV;

// The first line that is asked for from `block` of NV panels on. With a stream per panel it lies so far ahead, in these
// panels or the next ones. With more streams it is one of the next kStreams panels, which all panels before them ask
// for in turns.
template <int kLimbRows, int NV, Quantization kQuantization>
FD_INLINE const uint8_t* fetched_line(const Problem<kQuantization>& p, int64_t panel, int64_t block) {
  constexpr int64_t streams = kStreams<kLimbRows, NV>, ahead = kFetchBytes / (NV * kBlockBytes);
  if constexpr (streams > NV) {
    const int64_t part = panel % streams;
    return p.codes(panel - part + streams) + (part * p.num_blocks + block * NV) / streams * kBlockBytes;
  }
  const int64_t line = block + ahead, beyond = line - p.num_blocks;
  return beyond < 0 ? p.codes(panel) + line * kBlockBytes : p.codes(panel + NV) + beyond * kBlockBytes;
}

// Asks for the scales of NV panels, which lie between their codes.
template <int NV, Quantization kQuantization>
FD_INLINE void fetch_scales(const Problem<kQuantization>& p, int64_t panel) {
  for (int v = 0; v < NV; ++v)
    for (int64_t at = 0; at < p.header_bytes; at += 64) fetch<NV>(p.panel(panel + v) + at);
}

// Whose turn it is to meet a strip of weights, of how many blocks of rows. Each asks for its share of the lines that
// are fetched meanwhile.
struct Turn {
  int64_t own, count;
};

// sum[r][v] += a strip of `count` blocks of weights of NV panels, `stride` bytes apart, times its elements of MR rows;
// meanwhile lines are asked for, those of one stream after the other, from `fetched` on.
template <class Lines, int MR, int NV>
FD_INLINE void dot_strip(I16 (&sum)[MR][NV], const QuadElement* x, const uint8_t* codes, const uint8_t* fetched,
                         int64_t stride, int64_t count, Turn turn = {0, 1}) {
  int64_t block = 0, others = turn.own;
  do {  // in registers, because every loop over sums is unrolled and none is left out
    const bool fetches = turn.count == 1 || others == 0;
    others = fetches ? turn.count - 1 : others - 1;
    for (int v = 0; fetches && v < NV; ++v) {
      const int64_t line = block * NV + v;
      fetch<NV>(fetched + line % kStreams<MR, NV> * stride + line / kStreams<MR, NV> * kBlockBytes);
    }
#pragma GCC unroll 4
    for (int u = 0; u < Lines::kUnits; ++u) {
      QuadUnit units[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) units[v] = Lines::unit(codes + v * stride + block * kBlockBytes, u);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) sum[r][v] = dot_unit(sum[r][v], x[(block * Lines::kUnits + u) * MR + r], units[v]);
    }
  } while (++block < count);
}

// What the sums of a row's limbs, the high one first, stand for.
FD_INLINE F16 joined(I16 sum) { return to_float(sum); }
FD_INLINE F16 joined(I16 high, I16 low) { return fma(to_float(high), splat(256.0f), to_float(low)); }

// Adds a group's sum of a row, from its first limb on, to the row's total.
template <int kNumLimbs, int NV>
FD_INLINE F16 add_group(const I16 (*limbs)[NV], int v, F16 scale, F16 total) {
  if constexpr (kNumLimbs == 2) return fma(joined(limbs[0][v], limbs[1][v]), scale, total);
  return fma(joined(limbs[0][v]), scale, total);
}

// One block of MR rows, the first of which is `row`, times NV panels: into totals [MR][kFinished].
template <int MR, int NV, Quantization kQuantization>
void row_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, F16* totals) {
  constexpr int limbs = kLimbs<kQuantization>;
  constexpr int64_t strip = 16, group_blocks = kIntegerK<kQuantization> / block_k(kQuantization);
  const uint8_t* codes = p.codes(panel);
  const QuadElement* x = p.rows.elements + row * limbs * p.row_units();
  const int32_t* starts = p.rows.starts + row * limbs * p.num_groups;
  fetch_scales<NV>(p, panel + NV);
  F16 total[MR][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) total[r][v] = zero();
  I16 sum[MR * limbs][NV];
  for (int64_t begin = 0, group = 0; begin < p.num_blocks; begin += group_blocks, ++group) {
#pragma GCC unroll 32
    for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sum[r][v] = splat_int(starts[group * MR * limbs + r]);
    const int64_t end = begin + group_blocks < p.num_blocks ? begin + group_blocks : p.num_blocks;
    int64_t block = begin;
    do {
      dot_strip<Lines<kQuantization>>(sum, x + block * Lines<kQuantization>::kUnits * MR * limbs,
                                      codes + block * kBlockBytes, fetched_line<MR * limbs, NV>(p, panel, block),
                                      p.panel_bytes, end - block < strip ? end - block : strip);
      block += strip;
    } while (group_blocks > strip && block < end);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      const F16 scale = p.scale(p.panel(panel + v), group);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r) total[r][v] = add_group<limbs>(sum + r * limbs, v, scale, total[r][v]);
    }
    if (MR * NV * (limbs + 1) > 24) asm volatile("" : "+m"(total));  // registers are for sums
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) totals[r * kFinished + v] = total[r][v];
}

// A block of rows times panels [panel, last).
template <int MR, Quantization kQuantization>
void tile_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, int64_t last) {
  constexpr int NV = panels_at_a_time(MR * kLimbs<kQuantization>);
  F16 totals[MR][kFinished];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kFinished < last ? panel + kFinished : last;
    int64_t at = panel;
    for (; at + NV <= end; at += NV) row_block<MR, NV>(p, row, at, totals[0] + (at - panel));
    for (; at < end; ++at) row_block<MR, 1>(p, row, at, totals[0] + (at - panel));
    finish_sums(p.a, {totals, p.rows.scales + row, row, MR, panel, end - panel});
  }
}

template <Quantization kQuantization, int... kHeight>
FD_INLINE void any_tile_block(std::integer_sequence<int, kHeight...>, int64_t height, const Problem<kQuantization>& p,
                              int64_t row, int64_t panel, int64_t last) {
  using TileBlock = void (*)(const Problem<kQuantization>&, int64_t, int64_t, int64_t);
  constexpr TileBlock by_height[] = {tile_block<kHeight + 1, kQuantization>...};
  by_height[height - 1](p, row, panel, last);
}

// Many rows meet a strip of panels in turns, a block of them after the other. From memory comes the strip once, and
// while all multiply, the next ones; every line of rows serves kTurnPanels panels. All panels of a tile by one block
// after the other, the first would wait for memory and the others for nothing but products.
#if defined(FD_ISA_AVX512)
constexpr int kTurnRows = 12, kTurnPanels = 2;  // limbs of rows and panels, whose sums fill the registers
#else
constexpr int kTurnRows = kColumnRows, kTurnPanels = 1;
#endif
constexpr int64_t kMostInTurns = 40;  // limbs of rows; more of them multiply for longer than memory takes
constexpr int64_t kMostTurns = (kMostInTurns + kTurnRows - 1) / kTurnRows;
constexpr int64_t kStripBlocks = 64;  // of weights: 4 KiB of a panel, which stay in L1

// Formats of four bits multiply for longer than memory takes, and end their groups too often for turns.
template <Quantization kQuantization>
bool takes_turns(int64_t rows) {
  const int64_t limb_rows = rows * kLimbs<kQuantization>;
  return !has_four_bits(kQuantization) && limb_rows > kColumnRows && limb_rows <= kMostInTurns;
}

// Blocks [begin, end) of weights of the panels from `panel` on, in one group, of which they may be the first or last.
struct Strip {
  int64_t panel, begin, end, group;
  bool opens, closes;
};

// A strip of NV panels times the block of MR rows whose first is `row`. Sums [MR][limbs][NV] wait for the next strip,
// totals [MR][kFinished] for the next group.
template <int MR, int NV, Quantization kQuantization>
void strip_turn(const Problem<kQuantization>& p, const Strip& strip, int64_t row, Turn turn, I16* sums, F16* totals) {
  constexpr int limbs = kLimbs<kQuantization>, units = Lines<kQuantization>::kUnits;
  const QuadElement* x = p.rows.elements + (row * p.row_units() + strip.begin * units * MR) * limbs;
  const int32_t* starts = p.rows.starts + (row * p.num_groups + strip.group * MR) * limbs;
  I16 sum[MR * limbs][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sum[r][v] = strip.opens ? splat_int(starts[r]) : sums[r * NV + v];
  dot_strip<Lines<kQuantization>>(sum, x, p.codes(strip.panel) + strip.begin * kBlockBytes,
                                  fetched_line<MR * limbs, NV>(p, strip.panel, strip.begin), p.panel_bytes,
                                  strip.end - strip.begin, turn);
#pragma GCC unroll 32
  for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[r * NV + v] = sum[r][v];
  if (!strip.closes) return;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const F16 scale = p.scale(p.panel(strip.panel + v), strip.group);
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r) {
      F16& total = totals[r * kFinished + v];
      total = add_group<limbs>(sum + r * limbs, v, scale, total);
    }
  }
}

// Where there are several blocks, each has at least half of the rows that it may have.
template <Quantization kQuantization>
constexpr int kMostTurnRows = kTurnRows / kLimbs<kQuantization>;
template <Quantization kQuantization>
constexpr int kLeastTurnRows = kMostTurnRows<kQuantization> / 2;

template <int NV, Quantization kQuantization, int... kMore>
FD_INLINE void any_strip_turn(std::integer_sequence<int, kMore...>, int64_t height, const Problem<kQuantization>& p,
                              const Strip& strip, int64_t row, Turn turn, I16* sums, F16* totals) {
  using StripTurn = void (*)(const Problem<kQuantization>&, const Strip&, int64_t, Turn, I16*, F16*);
  constexpr StripTurn by_height[] = {strip_turn<kLeastTurnRows<kQuantization> + kMore, NV, kQuantization>...};
  by_height[height - kLeastTurnRows<kQuantization>](p, strip, row, turn, sums, totals);
}

// All rows times NV panels: into totals [rows][kFinished].
template <int NV, Quantization kQuantization>
void panels_in_turns(const Problem<kQuantization>& p, const Blocks& blocks, int64_t panel, F16* totals) {
  constexpr int64_t group_blocks = kIntegerK<kQuantization> / block_k(kQuantization);
  constexpr std::make_integer_sequence<int, kMostTurnRows<kQuantization> - kLeastTurnRows<kQuantization> + 1> heights;
  I16 sums[kMostTurns * kTurnRows * NV];
  fetch_scales<NV>(p, panel + NV);
  for (int64_t r = 0; r < blocks.rows; ++r)
    for (int v = 0; v < NV; ++v) totals[r * kFinished + v] = zero();
  for (int64_t begin = 0, end; begin < p.num_blocks; begin = end) {
    const int64_t group = begin / group_blocks, next = (group + 1) * group_blocks;
    const int64_t last = next < p.num_blocks ? next : p.num_blocks;
    end = begin + kStripBlocks < last ? begin + kStripBlocks : last;
    const Strip strip = {panel, begin, end, group, begin == group * group_blocks, end == last};
    for (int64_t b = 0; b < blocks.count; ++b) {
      const int64_t row = blocks.begin(b);
      any_strip_turn<NV>(heights, blocks.begin(b + 1) - row, p, strip, row, {b, blocks.count},
                         sums + row * kLimbs<kQuantization> * NV, totals + row * kFinished);
    }
  }
}

// All rows times panels [panel, last).
template <Quantization kQuantization>
void tile_in_turns(const Problem<kQuantization>& p, const Blocks& blocks, int64_t panel, int64_t last) {
  constexpr int NV = kTurnPanels;
  F16 totals[kMostTurns * kMostTurnRows<kQuantization>][kFinished];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kFinished < last ? panel + kFinished : last;
    int64_t at = panel;
    for (; at + NV <= end; at += NV) panels_in_turns<NV>(p, blocks, at, totals[0] + (at - panel));
    for (; at < end; ++at) panels_in_turns<1>(p, blocks, at, totals[0] + (at - panel));
    finish_sums(p.a, {totals, p.rows.scales, 0, blocks.rows, panel, end - panel});
  }
}

template <Quantization kQuantization>
void linear_in(const QuantizedLinearArgs& a) {
  if (a.rows == 0) return;
  Problem<kQuantization> p(a);
  const bool in_turns = takes_turns<kQuantization>(a.rows);
  const Blocks blocks(a.rows, in_turns ? kMostTurnRows<kQuantization> : kRows<kQuantization>);
  p.rows = prepare_rows<kQuantization>(a, blocks, p.row_units());
  for_each_tile(a, blocks, [&](const Tile& tile) {
    if (in_turns) return tile_in_turns(p, blocks, tile.panel, tile.last);
    for (int64_t b = tile.block; b < tile.end; ++b) {
      const int64_t row = blocks.begin(b);
      any_tile_block(std::make_integer_sequence<int, kRows<kQuantization>>(), blocks.begin(b + 1) - row, p, row,
                     tile.panel, tile.last);
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
