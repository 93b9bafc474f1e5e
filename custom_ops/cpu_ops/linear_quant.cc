// SPDX-License-Identifier: Apache-2.0
// Linear layers over 8- and 4-bit weights times rows that are quantized to 16 bits (wint8, wint4) or 8 bits (w8a8,
// w4a8). Scales are applied to sums. For any number of rows, an output is computed as
//   total = 0; for each group of k in order: total = fma(exact integer sum over the group, scale of the weights, total)
// times the scale of the row, followed by bias, gate and residual.
#include <utility>

#include "cpu_ops/families.h"
#include "cpu_ops/linear_slice.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_outputs.h"
#include "cpu_ops/quant_rows.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kBlockBytes = 64;

template <Quantization kQuantization>
using Lines = WeightLines<has_four_bits(kQuantization)>;

// Maximum rows of a block: their limbs have to fit the registers.
template <Quantization kQuantization>
constexpr int kRows = kColumnRows / kLimbs<kQuantization>;

// A typed view of the arguments. num_blocks counts the 64-byte blocks of a panel.
template <Quantization kQuantization>
struct Problem {
  const LinearArgs& a;
  QuantizedRows rows;
  int64_t num_blocks, num_groups, panel_bytes, header_bytes;

  explicit Problem(const QuantizedLinearArgs& args)
      : a(args),
        num_blocks((args.k + block_k(kQuantization) - 1) / block_k(kQuantization)),
        num_groups((num_blocks * block_k(kQuantization) + kIntegerGroup<kQuantization> - 1) /
                   kIntegerGroup<kQuantization>),
        panel_bytes(quantized_panel_bytes(kQuantization, args.k)),
        header_bytes(scale_bytes(kQuantization, args.k)) {}

  int64_t row_units() const { return num_blocks * Lines<kQuantization>::kUnits; }
  const uint8_t* panel(int64_t index) const { return static_cast<const uint8_t*>(a.packed) + index * panel_bytes; }
  const uint8_t* codes(int64_t index) const { return panel(index) + header_bytes; }
  FD_INLINE FP32Vec16 scale(const uint8_t* panel, int64_t group) {
    if constexpr (has_four_bits(kQuantization))
      return load_bf16(reinterpret_cast<const uint16_t*>(panel) + group * kPanel);
    return load(reinterpret_cast<const float*>(panel));
  }
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

// Prefetches the scales of NV panels, which are between their codes.
template <int NV, Quantization kQuantization>
FD_INLINE void prefetch_scales(const Problem<kQuantization>& p, int64_t panel) {
  for (int v = 0; v < NV; ++v)
    for (int64_t at = 0; at < p.header_bytes; at += 64) prefetch<NV>(p.panel(panel + v) + at);
}

// The index of a block of rows among those that multiply the same strip one after the other. Each block prefetches its
// share of the next lines.
struct RowBlockSlot {
  int64_t index, count;
};

// sum[r][v] += `count` blocks of weights of NV panels, `stride` bytes apart, times the values of MR rows. Meanwhile it
// prefetches lines of kNum panels in rotation, starting at `prefetch_from`.
template <class Lines, int kNum, int MR, int NV>
FD_INLINE void dot_blocks(INT32Vec16 (&sum)[MR][NV], const RowQuad* x, const uint8_t* codes,
                          const uint8_t* prefetch_from, int64_t stride, int64_t count, RowBlockSlot slot) {
  int64_t block = 0, skipped = slot.index;  // blocks of weights until this block of rows prefetches again
  do {                                      // do-while and full unrolling keep the sums in registers
    const bool prefetches = slot.count == 1 || skipped == 0;
    skipped = prefetches ? slot.count - 1 : skipped - 1;
    for (int v = 0; prefetches && v < NV; ++v) {
      const int64_t line = block * NV + v;
      prefetch<NV>(prefetch_from + line % kNum * stride + line / kNum * kBlockBytes);
    }
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

// Adds the sum of a group to the total of a row, whose limbs start at `limbs`.
template <int kNumLimbs, int NV>
FD_INLINE FP32Vec16 add_group(const INT32Vec16 (*limbs)[NV], int v, FP32Vec16 scale, FP32Vec16 total) {
  if constexpr (kNumLimbs == 2) return fma(join_limbs(limbs[0][v], limbs[1][v]), scale, total);
  return fma(join_limbs(limbs[0][v]), scale, total);
}

// Blocks [begin, end) of the weights of a group of panels, which starts at `panel`. In 4-bit formats they are whole
// groups of k, in 8-bit formats a part of one group.
struct Strip {
  int64_t panel, begin, end;
};

// Returns the strip of kPanels panels that starts at a block. Strips have nearly equal length. With few rows (NV == 4)
// they are shorter, because the prefetched strip has to fit in L1 beside the current one.
template <int NV, int kPanels, Quantization kQuantization>
FD_INLINE Strip strip_from(const Problem<kQuantization>& p, int64_t panel, int64_t begin) {
  constexpr int64_t group_blocks = kIntegerGroup<kQuantization> / block_k(kQuantization);
  constexpr int64_t step_blocks = has_four_bits(kQuantization) ? group_blocks : 1,
                    max_blocks = (NV == 4 ? kPrefetchBytes / 2 : kPrefetchBytes) / kBlockBytes / kPanels;
  const int64_t num_parts = (p.num_blocks + step_blocks - 1) / step_blocks,
                strips = (p.num_blocks + max_blocks - 1) / max_blocks;
  const int64_t end = begin + (num_parts + strips - 1) / strips * step_blocks,
                group_end = (begin / group_blocks + 1) * group_blocks;
  const int64_t last = has_four_bits(kQuantization) || end < group_end ? end : group_end;
  return {panel, begin, last < p.num_blocks ? last : p.num_blocks};
}

// Prefetches, during the first strip of a group, the scales of the next group and the lines to which outputs are
// written. It is called for panels v .. v + NV - 1 and covers their share. Gated layers write few outputs, which are
// not prefetched.
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void prefetch_epilogue(const Problem<kQuantization>& p, int64_t panel, int64_t row, int64_t v,
                                 RowBlockSlot slot) {
  if (slot.index == 0) prefetch_scales<NV>(p, panel + kPanels + v);
  if (p.a.gated) return;
  for (int64_t r = v * MR / kPanels; r < (v + NV) * MR / kPanels; ++r) prefetch_outputs(p.a, row + r, panel, kPanels);
}

// Multiplies the block of MR rows that starts at `row` by a strip of panels v .. v + NV - 1 of a group of kPanels. sums
// [NV][MR][limbs] carries over to the next strip, totals [MR][kOutputPanels] to the next group of k.
template <int MR, int NV, int kPanels, Quantization kQuantization>
void strip_block(const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v, RowBlockSlot slot,
                 INT32Vec16* sums, FP32Vec16* totals) {
  constexpr int limbs = kLimbs<kQuantization>, units = Lines<kQuantization>::kUnits;
  constexpr int64_t group_blocks = kIntegerGroup<kQuantization> / block_k(kQuantization);
  const uint8_t* codes = p.codes(strip.panel + v);
  const RowQuad* x = p.rows.quads + row * limbs * p.row_units();
  const int32_t* starts = p.rows.starts + row * limbs * p.num_groups;
  const bool is_last = strip.end == p.num_blocks;
  const uint8_t* prefetch_from =
      is_last ? p.codes(strip.panel + kPanels) : p.codes(strip.panel) + strip.end * kBlockBytes;
  prefetch_from += (strip.end - strip.begin) * v / kPanels * kBlockBytes;
  if (strip.begin == 0) prefetch_epilogue<MR, NV, kPanels>(p, strip.panel, row, v, slot);
  int64_t begin = strip.begin;
  do {
    const int64_t group = begin / group_blocks, next = (group + 1) * group_blocks;
    const int64_t end = next < strip.end ? next : strip.end;
    const bool begins_group = has_four_bits(kQuantization) || begin == group * group_blocks;
    const bool ends_group = has_four_bits(kQuantization) || end == next || is_last;
    INT32Vec16 sum[MR * limbs][NV];
#pragma GCC unroll 32
    for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i)
        sum[r][i] = begins_group ? splat_int32(starts[group * MR * limbs + r]) : sums[i * MR * limbs + r];
    dot_blocks<Lines<kQuantization>, kPanels>(sum, x + begin * units * MR * limbs, codes + begin * kBlockBytes,
                                              prefetch_from, p.panel_bytes, end - begin, slot);
    prefetch_from += (end - begin) * NV / kPanels * kBlockBytes;
    begin = end;
    if (!ends_group) {
#pragma GCC unroll 32
      for (int r = 0; r < MR * limbs; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < NV; ++i) sums[i * MR * limbs + r] = sum[r][i];
      return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const FP32Vec16 scale = p.scale(p.panel(strip.panel + v + i), group);
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r) {
        FP32Vec16& total = totals[r * kOutputPanels + i];
        total = add_group<limbs>(sum + r * limbs, i, scale, total);
      }
    }
  } while (has_four_bits(kQuantization) && begin < strip.end);
}

template <int kPanels>
FD_INLINE void clear_totals(FP32Vec16* totals, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < kPanels; ++v) totals[r * kOutputPanels + v] = zero();
}

// Multiplies the block of MR rows that starts at `row` by a group of panels, NV at a time, into totals
// [MR][kOutputPanels].
template <int MR, int NV, int kPanels, Quantization kQuantization>
FD_INLINE void group_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, FP32Vec16* totals) {
  INT32Vec16 sums[kPanels * MR * kLimbs<kQuantization>];
  clear_totals<kPanels>(totals, MR);
  for (int64_t begin = 0; begin < p.num_blocks;) {
    const Strip strip = strip_from<NV, kPanels>(p, panel, begin);
    begin = strip.end;
    for (int v = 0; v < kPanels; v += NV)
      strip_block<MR, NV, kPanels>(p, strip, row, v, {0, 1}, sums + v * MR * kLimbs<kQuantization>, totals + v);
  }
}

// Multiplies a block of rows by panels [panel, last).
template <int MR, Quantization kQuantization>
void tile_block(const Problem<kQuantization>& p, int64_t row, int64_t panel, int64_t last) {
  constexpr int NV = panels_at_a_time(MR * kLimbs<kQuantization>);
  constexpr int group = kGroupedPanels<MR * kLimbs<kQuantization>, NV>;
  FP32Vec16 totals[MR][kOutputPanels];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kOutputPanels < last ? panel + kOutputPanels : last;
    int64_t at = panel;
    for (; at + group <= end; at += group) group_block<MR, NV, group>(p, row, at, totals[0] + (at - panel));
    for (; at < end; ++at) group_block<MR, 1, 1>(p, row, at, totals[0] + (at - panel));
    write_outputs(p.a, {totals, p.rows.scales + row, row, MR, panel, end - panel});
  }
}

template <Quantization kQuantization, int... kHeight>
FD_INLINE void dispatch_tile_block(std::integer_sequence<int, kHeight...>, int64_t height,
                                   const Problem<kQuantization>& p, int64_t row, int64_t panel, int64_t last) {
  using TileBlock = void (*)(const Problem<kQuantization>&, int64_t, int64_t, int64_t);
  constexpr TileBlock tile_blocks[] = {tile_block<kHeight + 1, kQuantization>...};
  tile_blocks[height - 1](p, row, panel, last);
}

// Row blocks can be interleaved: all blocks multiply a strip of panels before the next strip. The strip is then read
// from memory once, and the next one arrives while all blocks multiply. Otherwise the first block would wait for memory
// and the other blocks for arithmetic only.
#if defined(FD_ISA_AVX512)
constexpr int kInterleavedRows = 12, kInterleavedPanels = 2;  // limbs and panels whose sums fill the registers
#else
constexpr int kInterleavedRows = kColumnRows, kInterleavedPanels = 1;
#endif
constexpr int64_t kMaxInterleavedRows = 40;  // limbs; with more, arithmetic takes longer than reading weights
constexpr int64_t kMaxInterleavedBlocks = (kMaxInterleavedRows + kInterleavedRows - 1) / kInterleavedRows;

// Returns whether row blocks are interleaved. In 4-bit formats arithmetic takes longer than reading the weights, and
// the sums of a group end too often.
template <Quantization kQuantization>
bool interleaves_row_blocks(int64_t rows) {
  const int64_t limb_rows = rows * kLimbs<kQuantization>;
  return !has_four_bits(kQuantization) && limb_rows > kColumnRows && limb_rows <= kMaxInterleavedRows;
}

// Rows of an interleaved block. As there are several blocks of nearly equal size, each has at least half of the
// maximum.
template <Quantization kQuantization>
constexpr int kMaxInterleavedBlockRows = kInterleavedRows / kLimbs<kQuantization>;
template <Quantization kQuantization>
constexpr int kMinInterleavedBlockRows = kMaxInterleavedBlockRows<kQuantization> / 2;

template <int NV, int kPanels, Quantization kQuantization, int... kMore>
FD_INLINE void dispatch_strip_block(std::integer_sequence<int, kMore...>, int64_t height,
                                    const Problem<kQuantization>& p, const Strip& strip, int64_t row, int64_t v,
                                    RowBlockSlot slot, INT32Vec16* sums, FP32Vec16* totals) {
  using StripBlock =
      void (*)(const Problem<kQuantization>&, const Strip&, int64_t, int64_t, RowBlockSlot, INT32Vec16*, FP32Vec16*);
  constexpr StripBlock strip_blocks[] = {
      strip_block<kMinInterleavedBlockRows<kQuantization> + kMore, NV, kPanels, kQuantization>...};
  strip_blocks[height - kMinInterleavedBlockRows<kQuantization>](p, strip, row, v, slot, sums, totals);
}

// Multiplies all rows by a group of panels, NV at a time, into totals [rows][kOutputPanels].
template <int NV, int kPanels, Quantization kQuantization>
void interleaved_group(const Problem<kQuantization>& p, const RowBlocks& blocks, int64_t panel, FP32Vec16* totals) {
  constexpr std::make_integer_sequence<int, kMaxInterleavedBlockRows<kQuantization> -
                                                kMinInterleavedBlockRows<kQuantization> + 1>
      heights;
  INT32Vec16 sums[kMaxInterleavedBlocks * kInterleavedRows * kPanels];
  clear_totals<kPanels>(totals, blocks.rows);
  for (int64_t begin = 0; begin < p.num_blocks;) {
    const Strip strip = strip_from<NV, kPanels>(p, panel, begin);
    begin = strip.end;
    for (int64_t v = 0; v < kPanels; v += NV)
      for (int64_t b = 0; b < blocks.count; ++b) {
        const int64_t row = blocks.begin(b), height = blocks.begin(b + 1) - row;
        dispatch_strip_block<NV, kPanels>(heights, height, p, strip, row, v, {b, blocks.count},
                                          sums + (row * kPanels + v * height) * kLimbs<kQuantization>,
                                          totals + row * kOutputPanels + v);
      }
  }
}

// Multiplies all rows by panels [panel, last).
template <Quantization kQuantization>
void interleaved_tile(const Problem<kQuantization>& p, const RowBlocks& blocks, int64_t panel, int64_t last) {
  constexpr int group = kTuning.weight_streams > 1 ? static_cast<int>(kTuning.weight_streams) : kInterleavedPanels;
  FP32Vec16 totals[kMaxInterleavedBlocks * kMaxInterleavedBlockRows<kQuantization>][kOutputPanels];
  for (int64_t end; panel < last; panel = end) {
    end = panel + kOutputPanels < last ? panel + kOutputPanels : last;
    int64_t at = panel;
    for (; at + group <= end; at += group)
      interleaved_group<kInterleavedPanels, group>(p, blocks, at, totals[0] + (at - panel));
    for (; at < end; ++at) interleaved_group<1, 1>(p, blocks, at, totals[0] + (at - panel));
    write_outputs(p.a, {totals, p.rows.scales, 0, blocks.rows, panel, end - panel});
  }
}

template <Quantization kQuantization>
RowBlocks row_blocks(int64_t rows) {
  return RowBlocks(rows, interleaves_row_blocks<kQuantization>(rows) ? kMaxInterleavedBlockRows<kQuantization>
                                                                     : kRows<kQuantization>);
}

// Multiplies the blocks of a tile by its panels.
template <Quantization kQuantization>
void multiply_blocks(const Problem<kQuantization>& p, const RowBlocks& blocks, const Tile& tile) {
  if (interleaves_row_blocks<kQuantization>(p.a.rows)) return interleaved_tile(p, blocks, tile.panel, tile.last);
  for (int64_t b = tile.block; b < tile.end; ++b) {
    const int64_t row = blocks.begin(b);
    dispatch_tile_block(std::make_integer_sequence<int, kRows<kQuantization>>(), blocks.begin(b + 1) - row, p, row,
                        tile.panel, tile.last);
  }
}

template <Quantization kQuantization>
void linear_quantized_as(const QuantizedLinearArgs& a) {
  if (a.rows == 0) return;
  Problem<kQuantization> problem(a);
  const RowBlocks blocks = row_blocks<kQuantization>(a.rows);
  // In place (x == out), threads must not prepare rows after other threads have written outputs.
  const bool is_shared = a.rows * a.k > kTuning.max_private_inputs || a.x == a.out;
  if (is_shared) problem.rows = RowQuantizer<kQuantization>(a, blocks, problem.row_units()).quantize_together();
  const auto prepare_problem = [&](int64_t first_panel) {
    Problem<kQuantization> own = problem;
    prefetch_start(own.panel(first_panel));
    if (!is_shared) own.rows = RowQuantizer<kQuantization>(a, blocks, own.row_units()).quantize();
    return own;
  };
  for_each_tile(a, blocks, prepare_problem, [&](const Problem<kQuantization>& p, const Tile& tile) {
    multiply_blocks(p, blocks, tile);
    write_block_maxima(a, blocks, tile);
  });
}

template <Quantization kQuantization>
PreparedRows prepare_rows_as(const QuantizedLinearArgs& a) {
  const Problem<kQuantization> p(a);
  return {nullptr, RowQuantizer<kQuantization>(a, row_blocks<kQuantization>(a.rows), p.row_units()).quantize()};
}

template <Quantization kQuantization>
void multiply_panels_as(const QuantizedLinearArgs& a, const PreparedRows& rows, int64_t first, int64_t last) {
  Problem<kQuantization> p(a);
  p.rows = rows.quantized;
  const RowBlocks blocks = row_blocks<kQuantization>(a.rows);
  multiply_blocks(p, blocks, {first, last, 0, blocks.count});
}

}  // namespace

PreparedRows prepare_quantized_rows(const QuantizedLinearArgs& a) {
  return dispatch_format(a.quantization, [&](auto format) { return prepare_rows_as<format.value>(a); });
}

void multiply_quantized_panels(const QuantizedLinearArgs& a, const PreparedRows& rows, int64_t first, int64_t last) {
  dispatch_format(a.quantization, [&](auto format) { multiply_panels_as<format.value>(a, rows, first, last); });
}

void linear_quantized(const QuantizedLinearArgs& a) {
  dispatch_format(a.quantization, [&](auto format) { linear_quantized_as<format.value>(a); });
}

}  // namespace FD_ISA
}  // namespace fd
