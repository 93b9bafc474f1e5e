// SPDX-License-Identifier: Apache-2.0
// The loop behind the attainable floor: streams of 64-byte lines, each multiplied by the same few row units of MR rows,
// which stay in the L1 cache.
#pragma once

#include <utility>

#include "cpu_ops/dot.h"
#include "cpu_ops/quant_units.h"
#include "roofline/loops.h"

namespace fd {
namespace FD_ISA {

using roofline::LoopForm;

// How the lines of each format are expanded to weight units, and how sums are combined.
struct PlainLines {
  static constexpr int kLimbs = 1;            // sums per row and output
  static constexpr int kPieceLines = 0;       // lines after which sums are scaled and added to totals; 0: never
  static constexpr bool kScalesRows = false;  // pieces of rows have scales
};
struct Fp32Lines : PlainLines {
  using RowUnit = float;
  using WeightUnit = FP32Vec16;
  using Sum = FP32Vec16;
  static constexpr int kUnits = 1;
  FD_INLINE WeightUnit unit(const uint8_t* line, int) { return load(reinterpret_cast<const float*>(line)); }
};

struct PairLines : PlainLines {
  using RowUnit = RowPair;
  using WeightUnit = WeightPair;
  using Sum = FP32Vec16;
};
struct Bf16Lines : PairLines {
  static constexpr int kUnits = 1;
  FD_INLINE WeightUnit unit(const uint8_t* line, int) { return widen_pairs(load_pairs(line)); }
};
struct CachedLines : PairLines {
  static constexpr int kUnits = 2;
  FD_INLINE WeightUnit unit(const uint8_t* line, int u) { return load_cached_pair(line + 32 * u); }
};

template <Quantization kQuantization>
struct QuantizedLines : WeightLines<has_four_bits(kQuantization)> {
  static constexpr int kLimbs = fd::FD_ISA::kLimbs<kQuantization>;
  static constexpr int kPieceLines =
      joins_pieces(kQuantization) ? static_cast<int>(kPiece / block_k(kQuantization)) : 0;
  static constexpr bool kScalesRows = !has_16_bit_rows(kQuantization);
};

FD_INLINE void clear(FP32Vec16& x) { x = zero(); }
FD_INLINE void clear(INT32Vec16& x) { x = splat_int32(0); }

FD_INLINE void set_row_unit(float& unit) { unit = 0.5f; }
FD_INLINE void set_row_unit(RowPair& unit) { unit = row_pair(0x3f00, 0xbf00); }
FD_INLINE void set_row_unit(RowQuad& unit) {
  const RowCode row[4] = {1, -1, 2, -2};
  unit = row_quad(row);
}

constexpr int kLoopRows = kColumnRows;  // maximum limbs of rows whose sums share the registers
constexpr int64_t kRowUnitLines = 16;   // lines after which the row units repeat

// Returns row units to multiply by, for any number of rows.
template <class Lines>
const typename Lines::RowUnit* loop_row_units() {
  struct RowUnits {
    typename Lines::RowUnit data[kRowUnitLines * Lines::kUnits * kLoopRows];
    RowUnits() {
      for (auto& unit : data) set_row_unit(unit);
    }
  };
  static const RowUnits units;
  return units.data;
}

// NV streams of lines, and what is prefetched meanwhile: line i + `ahead` of the same streams or, after their end, of
// those that start at `next`. If groups have scales, those of a stream start header_bytes - kFactorBytes before it.
template <int NV>
struct LineStreams {
  const uint8_t *begin[NV], *next[NV];
  int64_t count, ahead, header_bytes;
  int group_shift;
};

// Lines [begin, end) of streams, which `count` blocks of rows multiply one after the other; block `index` prefetches
// its share.
struct LineSlot {
  int64_t begin, end, index, count;
};

// Returns the sum of a row from the sums of its limbs.
FD_INLINE FP32Vec16 join_limbs(const INT32Vec16* limbs, int64_t stride, int count) {
  const FP32Vec16 high = to_float(limbs[0]);
  return count == 1 ? high : fma(high, splat(256.0f), to_float(limbs[stride]));
}

// Adds the sums of a piece, times their scales, to totals.
template <class Lines, int MR, int NV>
FD_INLINE void add_piece(const INT32Vec16 (&acc)[MR][NV], const LineStreams<NV>& s, int64_t piece,
                         FP32Vec16 (&totals)[MR / Lines::kLimbs][NV]) {
  static const float row_scales[MR] = {};
  const bool has_scales = s.header_bytes > kFactorBytes;
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const uint8_t* scales = s.begin[v] - s.header_bytes + kFactorBytes + (piece >> s.group_shift) * 2 * kPanel;
    const FP32Vec16 scale = has_scales ? load_half(reinterpret_cast<const uint16_t*>(scales)) : splat(1.0f);
#pragma GCC unroll 32
    for (int r = 0; r < MR / Lines::kLimbs; ++r) {
      FP32Vec16 both = Lines::kScalesRows ? splat(row_scales[r]) : scale;
      if (Lines::kScalesRows && has_scales) both = mul(scale, both);
      totals[r][v] = fma(join_limbs(&acc[Lines::kLimbs * r][v], NV, Lines::kLimbs), both, totals[r][v]);
    }
  }
}

// Multiplies lines of NV streams by MR limbs of rows; returns lines times rows. It is not inlined, because linear
// layers and attention share it.
template <class Lines, int MR, int NV>
__attribute__((noinline)) int64_t multiply_lines(const LineStreams<NV>& streams, LineSlot slot,
                                                 const typename Lines::RowUnit* x) {
  constexpr int rows = MR / Lines::kLimbs;
  const LineStreams<NV> s = streams;
  typename Lines::Sum acc[MR][NV];
  FP32Vec16 totals[rows][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      clear(acc[r][v]);
      if (Lines::kPieceLines > 0) totals[r / Lines::kLimbs][v] = zero();
    }
  int64_t skipped = slot.index;  // lines until this block prefetches again
  for (int64_t first = slot.begin; first < slot.end; first += kRowUnitLines) {
    const bool is_over = first + s.ahead >= s.count;
    const uint8_t *lines[NV], *ahead[NV];
    for (int v = 0; v < NV; ++v) {
      lines[v] = s.begin[v] + 64 * first;
      ahead[v] = is_over ? s.next[v] + 64 * (first + s.ahead - s.count) : lines[v] + 64 * s.ahead;
    }
    const int64_t left = slot.end - first, count = left < kRowUnitLines ? left : kRowUnitLines;
    for (int64_t line = 0; line < count;) {
      const int64_t end =
          Lines::kPieceLines > 0 && line + Lines::kPieceLines < count ? line + Lines::kPieceLines : count;
      for (; line < end; ++line) {
        const bool prefetches = skipped == 0;
        skipped = prefetches ? slot.count - 1 : skipped - 1;
        for (int v = 0; prefetches && v < NV; ++v)
          __builtin_prefetch(ahead[v] + 64 * line, 0, MR <= 4 || kTuning.weight_streams == 1 ? 3 : 2);
#pragma GCC unroll 4
        for (int u = 0; u < Lines::kUnits; ++u) {
          typename Lines::WeightUnit units[NV];
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) units[v] = Lines::unit(lines[v] + 64 * line, u);
          accumulate_products(acc, x + (line * Lines::kUnits + u) * MR, units);
        }
      }
      if constexpr (Lines::kPieceLines > 0) {
        add_piece<Lines>(acc, s, (first + line - 1) / Lines::kPieceLines, totals);
#pragma GCC unroll 32
        for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) clear(acc[r][v]);
      }
    }
  }
  // Use all sums, so that the compiler does not remove products.
  if constexpr (Lines::kPieceLines > 0) {
    asm volatile("" : : "m"(totals));
  } else if constexpr (Lines::kLimbs == 2) {
#pragma GCC unroll 32
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) totals[r][v] = join_limbs(&acc[2 * r][v], NV, 2);
    asm volatile("" : : "m"(totals));
  } else {
    typename Lines::Sum sums[MR][NV];
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = acc[r][v];
    asm volatile("" : : "m"(sums));
  }
  return (slot.end - slot.begin) * NV * rows;
}

// Maximum streams that MR limbs multiply at a time: their sums have to fit the registers.
template <int MR>
constexpr int kMaxStreams = 4 * MR <= kColumnRows   ? 4
                            : 2 * MR <= kColumnRows ? 2
                                                    : 1;

// Streams of equal size that follow one another in memory.
struct LineRun {
  const uint8_t* begin;  // lines of the first stream
  const uint8_t* next;   // first line of the run that is read after this one; null: the streams that follow these
  int64_t bytes;         // from one stream to the next
  int64_t lines;         // per stream
  int64_t scales_at, scale_bytes;  // offset of the scales from the first line of a stream, and their size
  int group_shift;                 // of scales before the lines
  int64_t ahead_bytes;

  template <int NV>
  LineStreams<NV> streams(int64_t at) const {
    LineStreams<NV> result;
    for (int v = 0; v < NV; ++v) {
      result.begin[v] = begin + (at + v) * bytes;
      result.next[v] = next == nullptr ? result.begin[v] + NV * bytes : next + (at + v) * bytes;
      for (int64_t i = 0; i < scale_bytes; i += 64) __builtin_prefetch(result.next[v] + scales_at + i, 0, 2);
    }
    const int64_t max_height = ahead_bytes / (64 * NV);
    result.count = lines;
    result.header_bytes = -scales_at, result.group_shift = group_shift;
    result.ahead = max_height < lines ? max_height : lines;
    return result;
  }
};

// Multiplies streams [first, last) of a run by MR limbs of rows, as many streams at a time as the form says and the
// registers allow; returns lines times rows.
template <class Lines, int MR, int NV = kMaxStreams<MR>>
int64_t multiply_block(const LineRun& run, int64_t first, int64_t last, const LoopForm& form) {
  if constexpr (NV > 1)
    if (form.streams < NV) return multiply_block<Lines, MR, NV / 2>(run, first, last, form);
  const auto* x = loop_row_units<Lines>();
  const LineSlot whole = {0, run.lines, 0, 1};
  int64_t done = 0;
  for (; first + NV <= last; first += NV) done += multiply_lines<Lines, MR, NV>(run.streams<NV>(first), whole, x);
  for (; first < last; ++first) done += multiply_lines<Lines, MR, 1>(run.streams<1>(first), whole, x);
  return done;
}

// Does the same for any number of rows, in blocks of nearly equal size.
template <class Lines, int... kHeight>
int64_t multiply_run(std::integer_sequence<int, kHeight...>, const LineRun& run, int64_t first, int64_t last,
                     int64_t rows, const LoopForm& form) {
  using Block = int64_t (*)(const LineRun&, int64_t, int64_t, const LoopForm&);
  constexpr Block blocks_by_rows[] = {multiply_block<Lines, (kHeight + 1) * Lines::kLimbs>...};
  constexpr int64_t max_height = sizeof...(kHeight);
  const int64_t blocks = (rows + max_height - 1) / max_height;
  int64_t done = 0;
  for (int64_t b = 0; b < blocks; ++b)
    done += blocks_by_rows[(b + 1) * rows / blocks - b * rows / blocks - 1](run, first, last, form);
  return done;
}

// Streams and limbs of an interleaved block: their sums fill the registers.
constexpr int kInterleavedStreams = 2 * 12 <= kColumnRows ? 2 : 1,
              kInterleavedLimbs = kColumnRows / kInterleavedStreams;
constexpr int64_t kInterleavedLines = 64;  // lines of a strip: they stay in the L1 cache

// Does the same with interleaved blocks: all blocks of rows multiply a strip of the streams before the next strip.
template <class Lines, int NV, int... kHeight>
int64_t multiply_interleaved(std::integer_sequence<int, kHeight...>, const LineRun& run, int64_t first, int64_t last,
                             int64_t rows) {
  using Block = int64_t (*)(const LineStreams<NV>&, LineSlot, const typename Lines::RowUnit*);
  constexpr Block blocks_by_rows[] = {multiply_lines<Lines, (kHeight + 1) * Lines::kLimbs, NV>...};
  constexpr int64_t max_height = sizeof...(kHeight);
  const int64_t blocks = (rows + max_height - 1) / max_height;
  const auto* x = loop_row_units<Lines>();
  int64_t done = 0;
  for (; first + NV <= last; first += NV) {
    const LineStreams<NV> streams = run.streams<NV>(first);
    for (int64_t begin = 0; begin < run.lines; begin += kInterleavedLines) {
      const int64_t end = begin + kInterleavedLines < run.lines ? begin + kInterleavedLines : run.lines;
      for (int64_t b = 0; b < blocks; ++b)
        done += blocks_by_rows[(b + 1) * rows / blocks - b * rows / blocks - 1](streams, {begin, end, b, blocks}, x);
    }
  }
  if (first < last) {
    constexpr std::integer_sequence<int, kHeight...> heights;
    if constexpr (NV > 1) done += multiply_interleaved<Lines, 1>(heights, run, first, last, rows);
  }
  return done;
}

template <class Lines>
int64_t multiply_run(const LineRun& run, int64_t first, int64_t last, int64_t rows, const LoopForm& form) {
  constexpr int max_height = kLoopRows / Lines::kLimbs, interleaved_rows = kInterleavedLimbs / Lines::kLimbs;
  if (form.interleaves_row_blocks && rows > max_height)
    return multiply_interleaved<Lines, kInterleavedStreams>(std::make_integer_sequence<int, interleaved_rows>(), run,
                                                            first, last, rows);
  return multiply_run<Lines>(std::make_integer_sequence<int, max_height>(), run, first, last, rows, form);
}

}  // namespace FD_ISA
}  // namespace fd
