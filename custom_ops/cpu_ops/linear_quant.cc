// SPDX-License-Identifier: Apache-2.0
// Linear layers over 8- and 4-bit weights times rows that are quantized to 16 bits (wint8, wint4) or 8 bits (w8a8,
// w4a8), as common/quant.h defines them, for any number of rows.
#include <utility>

#include "cpu_ops/families.h"
#include "cpu_ops/linear_slice.h"
#include "cpu_ops/quant_strips.h"

namespace fd {
namespace FD_ISA {
namespace {

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

// Writes the outputs of `rows` rows from `row` on and of panels [panel, end).
template <Quantization kQuantization>
FD_INLINE void write_block_outputs(const Problem<kQuantization>& p, const FP32Vec16 (*totals)[kOutputPanels],
                                   int64_t row, int64_t rows, int64_t panel, int64_t end) {
  const float* scales = has_16_bit_rows(kQuantization) ? p.rows.scales + row : nullptr;
  const uint8_t* factors = joins_pieces(kQuantization) ? p.panel(panel) : nullptr;
  write_outputs(p.a, {totals, scales, factors, p.panel_bytes, row, rows, panel, end - panel});
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
    write_block_outputs(p, totals, row, MR, panel, end);
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
    write_block_outputs(p, totals, 0, blocks.rows, panel, end);
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
  if (is_shared) problem.rows = RowQuantizer<kQuantization>(a, blocks).quantize_together();
  const auto prepare_problem = [&](int64_t first_panel) {
    Problem<kQuantization> own = problem;
    prefetch_start(own.panel(first_panel));
    if (!is_shared) own.rows = RowQuantizer<kQuantization>(a, blocks).quantize();
    return own;
  };
  for_each_tile(a, blocks, prepare_problem, [&](const Problem<kQuantization>& p, const Tile& tile) {
    multiply_blocks(p, blocks, tile);
    write_block_maxima(a, blocks, tile);
  });
}

template <Quantization kQuantization>
PreparedRows prepare_rows_as(const QuantizedLinearArgs& a) {
  return {nullptr, RowQuantizer<kQuantization>(a, row_blocks<kQuantization>(a.rows)).quantize()};
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
  return dispatch_format(a.form, [&](auto format) { return prepare_rows_as<format.value>(a); });
}

void multiply_quantized_panels(const QuantizedLinearArgs& a, const PreparedRows& rows, int64_t first, int64_t last) {
  dispatch_format(a.form, [&](auto format) { multiply_panels_as<format.value>(a, rows, first, last); });
}

void linear_quantized(const QuantizedLinearArgs& a) {
  dispatch_format(a.form, [&](auto format) { linear_quantized_as<format.value>(a); });
}

}  // namespace FD_ISA
}  // namespace fd
