// SPDX-License-Identifier: Apache-2.0
// The inner part of linear layers over quantized weights: a block of rows times a strip of some panels of the weight.
#pragma once

#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_outputs.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

template <Quantization kQuantization>
using Lines = WeightLines<has_four_bits(kQuantization)>;

// Maximum rows of a block: the sums of their limbs have to fit the registers, and so have their parts.
#if defined(FD_ISA_AVX512)
constexpr int kPieceLimbRows = 12;
#else
constexpr int kPieceLimbRows = kColumnRows;
#endif
template <Quantization kQuantization>
constexpr int kRows = (joins_pieces(kQuantization) ? kPieceLimbRows : kColumnRows) / kLimbs<kQuantization>;

// Blocks of weights that form a piece, and a part.
template <Quantization kQuantization>
constexpr int64_t kPieceBlocks = kSumLength<kQuantization> / block_k(kQuantization);
template <Quantization kQuantization>
constexpr int64_t kPartBlocks = kPart / block_k(kQuantization);

// A typed view of the arguments. num_blocks counts the 64-byte blocks of a panel.
template <Quantization kQuantization>
struct Problem {
  const QuantizedLinearArgs& a;
  QuantizedRows rows;
  int64_t num_blocks, num_pieces, panel_bytes, header_bytes, minimums_at;
  int group_shift;
  bool has_scales, has_minimum;

  explicit Problem(const QuantizedLinearArgs& args)
      : a(args),
        num_blocks(num_code_blocks(kQuantization, args.k)),
        num_pieces((num_blocks + kPieceBlocks<kQuantization> - 1) / kPieceBlocks<kQuantization>),
        panel_bytes(quantized_panel_bytes(args.form, args.k)),
        header_bytes(fd::header_bytes(args.form, args.k)),
        minimums_at(kFactorBytes + scale_bytes(args.form, args.k)),
        group_shift(args.form.group_shift()),
        has_scales(args.form.has_scales()),
        has_minimum(args.form.has_minimum) {}

  int64_t row_units() const { return quads_per_row(kQuantization, a.k); }
  const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(a.packed) + index * panel_bytes; }
  const uint8_t* codes(int64_t index) const { return panel(index) + header_bytes; }
};

// Returns the panels that a block of rows multiplies at a time, by its number of limbs. A sum is a chain of dependent
// additions, so a few rows need several panels to keep the processor busy, and more rows share loads of their values.
// On processors that read one stream of weights it is always one panel.
constexpr int panels_at_a_time(int limb_rows) {
#if defined(FD_ISA_AVX512)
  return kTuning.weight_streams == 1 ? 1 : limb_rows <= 4 ? 4 : limb_rows <= 15 ? 2 : 1;
#else
  return limb_rows == 1 ? 2 : 1;
#endif
}

// Panels of a group, which is multiplied strip by strip while lines of the next strip of every panel are prefetched in
// rotation (Tuning::weight_streams). A strip of rows stays in L1 for the whole group. Row blocks of long prompts are
// too large for it: their weights are already in the cache, and they have no load port to spare.
constexpr int kMaxGroupLimbRows = 18;
template <int kLimbRows, int NV>
constexpr int kGroupedPanels =
    kTuning.weight_streams > 1 && kLimbRows <= kMaxGroupLimbRows ? static_cast<int>(kTuning.weight_streams) : NV;

// Prefetches a line of weights: into L1 for a single stream or for few rows; into L2 for more rows, which keep L1 and
// its fill buffers busy.
template <int NV>
FD_INLINE void prefetch(const uint8_t* line) {
  __builtin_prefetch(line, 0, NV == 4 || kTuning.weight_streams == 1 ? 3 : 2);
}

// The index of a block of rows among those that multiply the same strip one after the other. Each block prefetches its
// share of the next lines.
struct RowBlockSlot {
  int64_t index, count;
};

// Prefetches lines [first, first + count) of kNum panels in rotation, `stride` bytes apart.
template <int kNum, int NV>
FD_INLINE void prefetch_lines(const uint8_t* from, int64_t stride, int64_t first, int64_t count) {
  for (int64_t line = first; line < first + count; ++line)
    prefetch<NV>(from + line % kNum * stride + line / kNum * kBlockBytes);
}

// sum[r][v] += `count` blocks of weights of NV panels, `stride` bytes apart, times the values of MR rows. Before each
// block it calls prefetch_next(block).
template <class Lines, int MR, int NV, class Prefetch>
FD_INLINE void dot_blocks(INT32Vec16 (&sum)[MR][NV], const RowQuad* x, const uint8_t* codes, int64_t stride,
                          int64_t count, Prefetch&& prefetch_next) {
  int64_t block = 0;
  do {  // do-while and full unrolling keep the sums in registers
    prefetch_next(block);
#pragma GCC unroll 4
    for (int u = 0; u < Lines::kUnits; ++u) {
      WeightQuad units[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) units[v] = Lines::unit(codes + v * stride + block * kBlockBytes, u);
      accumulate_products(sum, x + (block * Lines::kUnits + u) * MR, units);
    }
  } while (++block < count);
}

// Returns the sum of a row from the sums of its limbs, the high limb first.
FD_INLINE FP32Vec16 join_limbs(INT32Vec16 sum) { return to_float(sum); }
FD_INLINE FP32Vec16 join_limbs(INT32Vec16 high, INT32Vec16 low) {
  return fma(to_float(high), splat(256.0f), to_float(low));
}

// Returns the sum of a row for panel v, whose limbs start at `limbs`.
template <int kNumLimbs, int NV>
FD_INLINE FP32Vec16 sum_of_row(const INT32Vec16 (*limbs)[NV], int v) {
  if constexpr (kNumLimbs == 2) return join_limbs(limbs[0][v], limbs[1][v]);
  return join_limbs(limbs[0][v]);
}

// Blocks [begin, end) of the weights of a group of panels, which starts at `panel`. They are whole parts, or in wint8
// without groups a part of one piece.
struct Strip {
  int64_t panel, begin, end;
};

// Returns the strip of kPanels panels that starts at a block. Strips have nearly equal length. With few rows (NV == 4)
// they are shorter, because the prefetched strip has to fit in L1 beside the current one.
template <int NV, int kPanels, Quantization kQuantization>
FD_INLINE Strip strip_from(const Problem<kQuantization>& p, int64_t panel, int64_t begin) {
  constexpr int64_t step_blocks = joins_pieces(kQuantization) ? kPartBlocks<kQuantization> : 1,
                    piece_blocks = kPieceBlocks<kQuantization>,
                    max_blocks = (NV == 4 ? kPrefetchBytes / 2 : kPrefetchBytes) / kBlockBytes / kPanels;
  const int64_t num_steps = (p.num_blocks + step_blocks - 1) / step_blocks,
                strips = (p.num_blocks + max_blocks - 1) / max_blocks;
  const int64_t end = begin + (num_steps + strips - 1) / strips * step_blocks,
                piece_end = (begin / piece_blocks + 1) * piece_blocks;
  const int64_t last = joins_pieces(kQuantization) || end < piece_end ? end : piece_end;
  return {panel, begin, last < p.num_blocks ? last : p.num_blocks};
}

// Prefetches what lies before the codes of panel `panel` and belongs to blocks [begin, end) of its codes.
template <int NV, Quantization kQuantization>
FD_INLINE void prefetch_header(const Problem<kQuantization>& p, int64_t panel, int64_t begin, int64_t end) {
  const uint8_t* header = p.panel(panel);
  if (begin == 0) prefetch<NV>(header);
  if (!joins_pieces(kQuantization) || !p.has_scales) return;
  const auto at = [&](int64_t block) {
    return (block / kPieceBlocks<kQuantization> >> p.group_shift) * 2 * kPanel & ~int64_t{63};
  };
  for (int64_t i = at(begin); i <= at(end - 1); i += 64) {
    prefetch<NV>(header + kFactorBytes + i);
    if (p.has_minimum) prefetch<NV>(header + p.minimums_at + i);
  }
}

// Prefetches the scales of the strip that follows, and during the first strip of a group the lines to which outputs are
// written. It is called for panels v .. v + NV - 1 and covers their share. Gated layers write few outputs, which are
// not prefetched.
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void prefetch_epilogue(const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v,
                                 RowBlockSlot slot) {
  const int64_t length = strip.end - strip.begin;
  const bool is_last = strip.end == p.num_blocks;
  const int64_t begin = is_last ? 0 : strip.end, end = begin + length < p.num_blocks ? begin + length : p.num_blocks;
  for (int i = 0; slot.index == 0 && i < NV; ++i)
    prefetch_header<NV>(p, strip.panel + v + i + (is_last ? kPanels : 0), begin, end);
  if (strip.begin > 0 || p.a.gated) return;
  for (int64_t r = v * MR / kPanels; r < (v + NV) * MR / kPanels; ++r)
    prefetch_outputs(p.a, row + r, strip.panel, kPanels);
}

// The operands of a strip: a block of MR rows and panels v .. v + NV - 1 of a group of kPanels.
template <int MR, int NV, int kPanels, Quantization kQuantization>
struct StripOperands {
  static constexpr int kLimbRows = MR * kLimbs<kQuantization>;
  RowBlockSlot slot;
  int64_t panel_bytes;
  const uint8_t* codes;
  const uint8_t* prefetch_from;
  const RowQuad* x;
  const int32_t* starts;

  __attribute__((always_inline)) StripOperands(const Problem<kQuantization>& p, const Strip& strip, int64_t row,
                                               int64_t v, RowBlockSlot row_slot)
      : slot(row_slot),
        panel_bytes(p.panel_bytes),
        codes(p.codes(strip.panel + v)),
        x(p.rows.quads + row * kLimbs<kQuantization> * p.row_units()),
        starts(p.rows.starts + row * kLimbs<kQuantization> * p.num_pieces) {
    prefetch_from =
        strip.end == p.num_blocks ? p.codes(strip.panel + kPanels) : p.codes(strip.panel) + strip.end * kBlockBytes;
    prefetch_from += (strip.end - strip.begin) * v / kPanels * kBlockBytes;
  }

  // Adds the products of `count` blocks from `begin` on and prefetches as many lines; of long pieces, each block of
  // rows prefetches its share.
  __attribute__((always_inline)) void multiply(INT32Vec16 (&sum)[kLimbRows][NV], int64_t begin, int64_t count) {
    const RowQuad* rows = x + begin * Lines<kQuantization>::kUnits * kLimbRows;
    const uint8_t* weights = codes + begin * kBlockBytes;
    int64_t skipped = slot.index;  // blocks of weights until this block of rows prefetches again
    dot_blocks<Lines<kQuantization>>(sum, rows, weights, panel_bytes, count, [&](int64_t block) {
      const bool prefetches = joins_pieces(kQuantization) || slot.count == 1 || skipped == 0;
      skipped = prefetches ? slot.count - 1 : skipped - 1;
      if (prefetches) prefetch_lines<kPanels, NV>(prefetch_from, panel_bytes, block * NV, NV);
    });
    prefetch_from += count * NV / kPanels * kBlockBytes;
  }
};

// Multiplies the block of MR rows that starts at `row` by a strip of panels v .. v + NV - 1 of a group of kPanels, in
// wint8 without groups. sums [NV][MR][limbs] carries over to the next strip, totals [MR][kOutputPanels] to the next
// piece.
template <int MR, int NV, int kPanels>
FD_INLINE void wint8_strip(const Problem<Quantization::kWint8>& p, const Strip& strip, int64_t row, int64_t v,
                           RowBlockSlot slot, INT32Vec16* sums, FP32Vec16* totals) {
  constexpr auto kQuantization = Quantization::kWint8;
  constexpr int limbs = kLimbs<kQuantization>;
  const int64_t piece = strip.begin / kPieceBlocks<kQuantization>;
  const bool begins_piece = strip.begin == piece * kPieceBlocks<kQuantization>;
  const bool ends_piece = strip.end == p.num_blocks || strip.end == (piece + 1) * kPieceBlocks<kQuantization>;
  StripOperands<MR, NV, kPanels, kQuantization> operands(p, strip, row, v, slot);
  prefetch_epilogue<MR, NV, kPanels>(p, strip, row, v, slot);
  INT32Vec16 sum[MR * limbs][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i)
      sum[r][i] = begins_piece ? splat_int32(operands.starts[piece * MR * limbs + r]) : sums[i * MR * limbs + r];
  operands.multiply(sum, strip.begin, strip.end - strip.begin);
  if (!ends_piece) {
#pragma GCC unroll 32
    for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) sums[i * MR * limbs + r] = sum[r][i];
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i) {
    const FP32Vec16 factor = load(reinterpret_cast<const float*>(p.panel(strip.panel + v + i)));
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r) {
      FP32Vec16& total = totals[r * kOutputPanels + i];
      total = fma(sum_of_row<limbs>(sum + r * limbs, i), factor, total);
    }
  }
}

// What the sums of a piece are multiplied by: pointers to the values of the first of some pieces.
struct PieceFactors {
  const uint8_t *scales, *minimums;    // fp16, of the first panel; panel_bytes from one panel to the next
  const float *row_scales, *row_sums;  // of the first row
  int64_t panel_bytes;
  int group_shift;
  bool has_scales, has_minimum;

  template <int NV>
  __attribute__((always_inline)) void load_values(const uint8_t* values, int64_t piece, FP32Vec16 (&result)[NV]) const {
    const uint8_t* first = values + (piece >> group_shift) * 2 * kPanel;
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) result[i] = load_half(reinterpret_cast<const uint16_t*>(first + i * panel_bytes));
  }
};

// Adds the sums of a piece of MR rows, times their scales, to the part that the piece belongs to.
template <int MR, int NV, Quantization kQuantization>
FD_INLINE void add_piece(const PieceFactors& f, int64_t piece, const INT32Vec16 (&sum)[MR * kLimbs<kQuantization>][NV],
                         FP32Vec16 (&part)[MR][NV]) {
  constexpr int limbs = kLimbs<kQuantization>;
  const float* row_scales = f.row_scales + piece * MR;
  if (kQuantization == Quantization::kW8a8 && !f.has_scales) {
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i)
        part[r][i] = fma(sum_of_row<limbs>(sum + r * limbs, i), splat(row_scales[r]), part[r][i]);
    return;
  }
  FP32Vec16 values[NV];
  f.load_values(f.scales, piece, values);
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const FP32Vec16 scale = has_16_bit_rows(kQuantization) ? values[i] : mul(values[i], splat(row_scales[r]));
      part[r][i] = fma(sum_of_row<limbs>(sum + r * limbs, i), scale, part[r][i]);
    }
  if (!f.has_minimum) return;
  f.load_values(f.minimums, piece, values);
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) part[r][i] = fma(splat(f.row_sums[piece * MR + r]), values[i], part[r][i]);
}

// Does the same in all other formats, whose strips are whole parts.
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void strip_of_pieces(const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v,
                               RowBlockSlot slot, FP32Vec16* totals) {
  constexpr int limb_rows = MR * kLimbs<kQuantization>;
  constexpr int64_t piece_blocks = kPieceBlocks<kQuantization>, part_pieces = kPart / kPiece;
  StripOperands<MR, NV, kPanels, kQuantization> operands(p, strip, row, v, slot);
  prefetch_epilogue<MR, NV, kPanels>(p, strip, row, v, slot);
  const uint8_t* panel = p.panel(strip.panel + v);
  const int64_t first_row = row * p.num_pieces;
  const PieceFactors factors = {panel + kFactorBytes,
                                panel + p.minimums_at,
                                p.rows.piece_scales + first_row,
                                p.rows.piece_sums + first_row,
                                p.panel_bytes,
                                p.group_shift,
                                p.has_scales,
                                p.has_minimum};
  const int64_t end = strip.end / piece_blocks;
  for (int64_t piece = strip.begin / piece_blocks; piece < end;) {
    const int64_t part_end = piece + part_pieces < end ? piece + part_pieces : end;
    FP32Vec16 part[MR][NV];
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) part[r][i] = zero();
    do {
      INT32Vec16 sum[limb_rows][NV];
#pragma GCC unroll 32
      for (int r = 0; r < limb_rows; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NV; ++i) sum[r][i] = splat_int32(operands.starts[piece * limb_rows + r]);
      operands.multiply(sum, piece * piece_blocks, piece_blocks);
      add_piece<MR, NV, kQuantization>(factors, piece, sum, part);
    } while (++piece < part_end);
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) totals[r * kOutputPanels + i] = add(totals[r * kOutputPanels + i], part[r][i]);
  }
}

// It is not inlined, because GCC 12 spills sums to memory in the larger functions around it.
template <int MR, int NV, int kPanels, Quantization kQuantization>
__attribute__((noinline)) void strip_block(const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v,
                                           RowBlockSlot slot, INT32Vec16* sums, FP32Vec16* totals) {
  if constexpr (joins_pieces(kQuantization))
    strip_of_pieces<MR, NV, kPanels>(p, strip, row, v, slot, totals);
  else
    wint8_strip<MR, NV, kPanels>(p, strip, row, v, slot, sums, totals);
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
