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
// the last: few rows need several panels to keep the processor busy, and more rows share the loads of their elements.
// Where one stream comes in faster than several (not kFetchesStreams), that decides.
constexpr int panels_at_a_time(int limb_rows) {
#if defined(FD_ISA_AVX512)
  return !kFetchesStreams ? 1 : limb_rows <= 4 ? 4 : limb_rows <= 15 ? 2 : 1;
#else
  return limb_rows == 1 ? 2 : 1;
#endif
}

// Panels that are met in a group, a strip of lines after the other, while lines of all their next strips are asked for
// by turns: weights come in faster in four streams than in one or two, and a strip of elements serves the whole group
// from L1, where sums wait, too. Not for the blocks of long prompts, which find their weights in the cache and have no
// load to spare.
template <int kLimbRows, int NV>
constexpr int kPanelsOfGroup = kFetchesStreams && kLimbRows <= 18 ? kGroupPanels : NV;

// Asks for a line of weights that is needed soon: into the L1 cache where a single stream is read, or where few rows
// read several; into L2 where more rows keep L1 and its fill buffers busy.
template <int NV>
FD_INLINE void fetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, NV == 4 || !kFetchesStreams ? 3 : 2);
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

// sum[r][v] += `count` blocks of weights of NV panels, `stride` bytes apart, times their elements of MR rows; meanwhile
// lines of kNum panels are asked for by turns, from `fetched` on.
template <class Lines, int kNum, int MR, int NV>
FD_INLINE void dot_blocks(I16 (&sum)[MR][NV], const QuadElement* x, const uint8_t* codes, const uint8_t* fetched,
                          int64_t stride, int64_t count, Turn turn) {
  int64_t block = 0, others = turn.own;
  do {  // in registers, because every loop over sums is unrolled and none is left out
    const bool fetches = turn.count == 1 || others == 0;
    others = fetches ? turn.count - 1 : others - 1;
    for (int v = 0; fetches && v < NV; ++v) {
      const int64_t line = block * NV + v;
      fetch<NV>(fetched + line % kNum * stride + line / kNum * kBlockBytes);
    }
#pragma GCC unroll 4
    for (int u = 0; u < Lines::kUnits; ++u) {
      QuadUnit units[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) units[v] = Lines::unit(codes + v * stride + block * kBlockBytes, u);
      dot_units(sum, x + (block * Lines::kUnits + u) * MR, units);
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

// Blocks [begin, end) of weights of the panels of a group, which begins at `panel`. Of four bits they are whole groups
// of k, of eight a part of one.
struct Strip {
  int64_t panel, begin, end;
};

// Returns the strip of kPanels panels, met NV at a time, that begins at a block: one of few, which are of nearly equal
// length. Those of few rows are short, since what is fetched a strip ahead has to stay in L1 beside what was read.
template <int NV, int kPanels, Quantization kQuantization>
FD_INLINE Strip strip_from(const Problem<kQuantization>& p, int64_t panel, int64_t begin) {
  constexpr int64_t group_blocks = kIntegerK<kQuantization> / block_k(kQuantization);
  constexpr int64_t whole = has_four_bits(kQuantization) ? group_blocks : 1,
                    most = (NV == 4 ? kFetchBytes / 2 : kFetchBytes) / kBlockBytes / kPanels;
  const int64_t wholes = (p.num_blocks + whole - 1) / whole, strips = (p.num_blocks + most - 1) / most;
  const int64_t end = begin + (wholes + strips - 1) / strips * whole,
                group_end = (begin / group_blocks + 1) * group_blocks;
  const int64_t last = has_four_bits(kQuantization) || end < group_end ? end : group_end;
  return {panel, begin, last < p.num_blocks ? last : p.num_blocks};
}

// While panel `v` and following of a group's first strip are met: asks for scales of the next group, and for lines that
// the outputs of some of the rows are written to. Those of gated layers are few.
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void fetch_ends(const Problem<kQuantization>& p, int64_t panel, int64_t row, int64_t v, Turn turn) {
  if (turn.own == 0) fetch_scales<NV>(p, panel + kPanels + v);
  if (p.a.gated) return;
  for (int64_t r = v * MR / kPanels; r < (v + NV) * MR / kPanels; ++r) fetch_outputs(p.a, row + r, panel, kPanels);
}

// The block of MR rows whose first is `row` times a strip of NV panels of a group of kPanels, from its panel `v` on.
// Sums [NV][MR][limbs] wait for the next strip, totals [MR][kFinished] for the next group of k.
template <int MR, int NV, int kPanels, Quantization kQuantization>
void strip_block(const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v, Turn turn, I16* sums,
                 F16* totals) {
  constexpr int limbs = kLimbs<kQuantization>, units = Lines<kQuantization>::kUnits;
  constexpr int64_t group_blocks = kIntegerK<kQuantization> / block_k(kQuantization);
  const uint8_t* codes = p.codes(strip.panel + v);
  const QuadElement* x = p.rows.elements + row * limbs * p.row_units();
  const int32_t* starts = p.rows.starts + row * limbs * p.num_groups;
  const bool is_last = strip.end == p.num_blocks;
  const uint8_t* fetched = is_last ? p.codes(strip.panel + kPanels) : p.codes(strip.panel) + strip.end * kBlockBytes;
  fetched += (strip.end - strip.begin) * v / kPanels * kBlockBytes;
  if (strip.begin == 0) fetch_ends<MR, NV, kPanels>(p, strip.panel, row, v, turn);
  int64_t begin = strip.begin;
  do {
    const int64_t group = begin / group_blocks, next = (group + 1) * group_blocks;
    const int64_t end = next < strip.end ? next : strip.end;
    const bool opens = has_four_bits(kQuantization) || begin == group * group_blocks;
    const bool closes = has_four_bits(kQuantization) || end == next || is_last;
    I16 sum[MR * limbs][NV];
#pragma GCC unroll 32
    for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i)
        sum[r][i] = opens ? splat_int(starts[group * MR * limbs + r]) : sums[i * MR * limbs + r];
    dot_blocks<Lines<kQuantization>, kPanels>(sum, x + begin * units * MR * limbs, codes + begin * kBlockBytes, fetched,
                                              p.panel_bytes, end - begin, turn);
    fetched += (end - begin) * NV / kPanels * kBlockBytes;
    begin = end;
    if (!closes) {
#pragma GCC unroll 32
      for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NV; ++i) sums[i * MR * limbs + r] = sum[r][i];
      return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const F16 scale = p.scale(p.panel(strip.panel + v + i), group);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r) {
        F16& total = totals[r * kFinished + i];
        total = add_group<limbs>(sum + r * limbs, i, scale, total);
      }
    }
  } while (has_four_bits(kQuantization) && begin < strip.end);
}

template <int kPanels>
FD_INLINE void clear_totals(F16* totals, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < kPanels; ++v) totals[r * kFinished + v] = zero();
}

// One block of MR rows, the first of which is `row`, times a group of panels, NV at a time: into totals
// [MR][kFinished].
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void group_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, F16* totals) {
  I16 sums[kPanels * MR * kLimbs<kQuantization>];
  clear_totals<kPanels>(totals, MR);
  for (int64_t begin = 0; begin < p.num_blocks;) {
    const Strip strip = strip_from<NV, kPanels>(p, panel, begin);
    begin = strip.end;
    for (int v = 0; v < kPanels; v += NV)
      strip_block<MR, NV, kPanels>(p, strip, row, v, {0, 1}, sums + v * MR * kLimbs<kQuantization>, totals + v);
  }
}

// A block of rows times panels [panel, last).
template <int MR, Quantization kQuantization>
void tile_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, int64_t last) {
  constexpr int NV = panels_at_a_time(MR * kLimbs<kQuantization>);
  constexpr int together = kPanelsOfGroup<MR * kLimbs<kQuantization>, NV>;
  F16 totals[MR][kFinished];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kFinished < last ? panel + kFinished : last;
    int64_t at = panel;
    for (; at + together <= end; at += together) group_block<MR, NV, together>(p, row, at, totals[0] + (at - panel));
    for (; at < end; ++at) group_block<MR, 1, 1>(p, row, at, totals[0] + (at - panel));
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

// Formats of four bits multiply for longer than memory takes, and end their groups too often for turns.
template <Quantization kQuantization>
bool takes_turns(int64_t rows) {
  const int64_t limb_rows = rows * kLimbs<kQuantization>;
  return !has_four_bits(kQuantization) && limb_rows > kColumnRows && limb_rows <= kMostInTurns;
}

// Where there are several blocks, each has at least half of the rows that it may have.
template <Quantization kQuantization>
constexpr int kMostTurnRows = kTurnRows / kLimbs<kQuantization>;
template <Quantization kQuantization>
constexpr int kLeastTurnRows = kMostTurnRows<kQuantization> / 2;

template <int NV, int kPanels, Quantization kQuantization, int... kMore>
FD_INLINE void any_strip_block(std::integer_sequence<int, kMore...>, int64_t height, const Problem<kQuantization>& p,
                               const Strip& strip, int64_t row, int64_t v, Turn turn, I16* sums, F16* totals) {
  using StripBlock = void (*)(const Problem<kQuantization>&, const Strip&, int64_t, int64_t, Turn, I16*, F16*);
  constexpr StripBlock by_height[] = {
      strip_block<kLeastTurnRows<kQuantization> + kMore, NV, kPanels, kQuantization>...};
  by_height[height - kLeastTurnRows<kQuantization>](p, strip, row, v, turn, sums, totals);
}

// All rows times a group of panels, NV at a time: into totals [rows][kFinished].
template <int NV, int kPanels, Quantization kQuantization>
void group_in_turns(const Problem<kQuantization>& p, const Blocks& blocks, int64_t panel, F16* totals) {
  constexpr std::make_integer_sequence<int, kMostTurnRows<kQuantization> - kLeastTurnRows<kQuantization> + 1> heights;
  I16 sums[kMostTurns * kTurnRows * kPanels];
  clear_totals<kPanels>(totals, blocks.rows);
  for (int64_t begin = 0; begin < p.num_blocks;) {
    const Strip strip = strip_from<NV, kPanels>(p, panel, begin);
    begin = strip.end;
    for (int64_t v = 0; v < kPanels; v += NV)
      for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t row = blocks.begin(b), height = blocks.begin(b + 1) - row;
        any_strip_block<NV, kPanels>(heights, height, p, strip, row, v, {b, blocks.count},
                                     sums + (row * kPanels + v * height) * kLimbs<kQuantization>,
                                     totals + row * kFinished + v);
      }
  }
}

// All rows times panels [panel, last).
template <Quantization kQuantization>
void tile_in_turns(const Problem<kQuantization>& p, const Blocks& blocks, int64_t panel, int64_t last) {
  constexpr int together = kFetchesStreams ? kGroupPanels : kTurnPanels;
  F16 totals[kMostTurns * kMostTurnRows<kQuantization>][kFinished];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kFinished < last ? panel + kFinished : last;
    int64_t at = panel;
    for (; at + together <= end; at += together)
      group_in_turns<kTurnPanels, together>(p, blocks, at, totals[0] + (at - panel));
    for (; at < end; ++at) group_in_turns<1, 1>(p, blocks, at, totals[0] + (at - panel));
    finish_sums(p.a, {totals, p.rows.scales, 0, blocks.rows, panel, end - panel});
  }
}

template <Quantization kQuantization>
void linear_in(const QuantizedLinearArgs& a) {
  if (a.rows == 0) return;
  Problem<kQuantization> problem(a);
  const bool in_turns = takes_turns<kQuantization>(a.rows);
  const Blocks blocks(a.rows, in_turns ? kMostTurnRows<kQuantization> : kRows<kQuantization>);
  const bool is_shared = a.rows * a.k > kMostOwn || a.x == a.out;  // a late thread would find outputs in their place
  if (is_shared) problem.rows = RowPreparation<kQuantization>(a, blocks, problem.row_units()).make_together();
  const auto problem_of_thread = [&](int64_t first_panel) {
    Problem<kQuantization> own = problem;
    fetch_first(own.panel(first_panel));
    if (!is_shared) own.rows = RowPreparation<kQuantization>(a, blocks, own.row_units()).make();
    return own;
  };
  for_each_tile(a, blocks, problem_of_thread, [&](const Problem<kQuantization>& p, const Tile& tile) {
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
