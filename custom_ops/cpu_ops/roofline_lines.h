// SPDX-License-Identifier: Apache-2.0
// The one loop behind the attainable floor: streams of lines of 64 bytes, each times the same few elements of MR rows,
// which stay in the L1 cache.
#pragma once

#include <utility>

#include "cpu_ops/dot.h"
#include "cpu_ops/quant_units.h"
#include "cpu_ops/roofline_loops.h"

namespace fd {
namespace FD_ISA {

// What a line of memory holds, as units of the registers, and what becomes of sums.
struct PlainLines {
  static constexpr int kLimbs = 1;           // sums that make up one of a row
  static constexpr bool kIsGrouped = false;  // every kElementLines lines have a scale
};
struct Fp32Lines : PlainLines {
  using Element = float;
  using Unit = F16;
  using Sum = F16;
  static constexpr int kUnits = 1;
  FD_INLINE Unit unit(const uint8_t* line, int) { return load(reinterpret_cast<const float*>(line)); }
};

struct PairLines : PlainLines {
  using Element = PairElement;
  using Unit = PairUnit;
  using Sum = F16;
};
struct Bf16Lines : PairLines {
  static constexpr int kUnits = 1;
  FD_INLINE Unit unit(const uint8_t* line, int) { return widen_unit(load_pairs(line)); }
};
struct CachedLines : PairLines {
  static constexpr int kUnits = 2;
  FD_INLINE Unit unit(const uint8_t* line, int u) { return cached_unit(line + 32 * u); }
};

template <Quantization kQuantization>
struct QuantizedLines : CodeLines<has_four_bits(kQuantization)> {
  static constexpr int kLimbs = fd::FD_ISA::kLimbs<kQuantization>;
  static constexpr bool kIsGrouped = has_four_bits(kQuantization);
};

FD_INLINE void clear_sum(F16& x) { x = zero(); }
FD_INLINE void clear_sum(I16& x) { x = splat_int(0); }

FD_INLINE void set_element(float& element) { element = 0.5f; }
FD_INLINE void set_element(PairElement& element) { element = pair_element(0x3f00, 0xbf00); }
FD_INLINE void set_element(QuadElement& element) {
  const Code row[4] = {1, -1, 2, -2};
  element = quad_element(row);
}

constexpr int kLoopRows = kColumnRows;  // limbs of rows that share the registers, at most
constexpr int64_t kElementLines = 16;   // lines after which a row's elements begin again
static_assert(kElementLines == kGroup / block_k(Quantization::kWint4), "a group of four bits ends with the elements");

// Elements to multiply by, for any number of rows.
template <class Lines>
const typename Lines::Element* loop_elements() {
  struct Elements {
    typename Lines::Element data[kElementLines * Lines::kUnits * kLoopRows];
    Elements() {
      for (auto& element : data) set_element(element);
    }
  };
  static const Elements elements;
  return elements.data;
}

// Where NV streams of lines begin, and what is fetched meanwhile: line i + `ahead` of the same streams, or, once they
// are over, of those that begin at `next`. The scales of a stream's groups, if any, end `scales` bytes before it.
template <int NV>
struct LineStreams {
  const uint8_t *begin[NV], *next[NV];
  int64_t count, ahead, scale_bytes;
};

// Lines [begin, end) of streams, which blocks of rows meet in turns: each fetches its share.
struct LineTurn {
  int64_t begin, end, own, count;
};

// Adds up the sums of a row's limbs.
FD_INLINE F16 joined_limbs(const I16* limbs, int64_t stride, int count) {
  const F16 high = to_float(limbs[0]);
  return count == 1 ? high : fma(high, splat(256.0f), to_float(limbs[stride]));
}

// Adds a group's sums, times its scales, to totals.
template <int kNumLimbs, int MR, int NV>
FD_INLINE void add_groups(const I16 (&acc)[MR][NV], const LineStreams<NV>& s, int64_t group,
                          F16 (&totals)[MR / kNumLimbs][NV]) {
#pragma GCC unroll 4
  for (int v = 0; v < NV; ++v) {
    const F16 scale = load_bf16(reinterpret_cast<const uint16_t*>(s.begin[v] - s.scale_bytes) + group * kPanel);
#pragma GCC unroll 32
    for (int r = 0; r < MR / kNumLimbs; ++r)
      totals[r][v] = fma(joined_limbs(&acc[kNumLimbs * r][v], NV, kNumLimbs), scale, totals[r][v]);
  }
}

// Multiplies lines of NV streams by MR rows' limbs; returns lines times rows. Not inlined: linear layers and attention
// share it.
template <class Lines, int MR, int NV>
__attribute__((noinline)) int64_t multiply_lines(const LineStreams<NV>& streams, LineTurn turn,
                                                 const typename Lines::Element* x) {
  constexpr int rows = MR / Lines::kLimbs;
  const LineStreams<NV> s = streams;
  typename Lines::Sum acc[MR][NV];
  F16 totals[rows][NV];
#pragma GCC unroll 32
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      clear_sum(acc[r][v]);
      if (Lines::kIsGrouped) totals[r / Lines::kLimbs][v] = zero();
    }
  int64_t others = turn.own;
  for (int64_t first = turn.begin; first < turn.end; first += kElementLines) {
    const bool is_over = first + s.ahead >= s.count;
    const uint8_t *lines[NV], *ahead[NV];
    for (int v = 0; v < NV; ++v) {
      lines[v] = s.begin[v] + 64 * first;
      ahead[v] = is_over ? s.next[v] + 64 * (first + s.ahead - s.count) : lines[v] + 64 * s.ahead;
    }
    const int64_t left = turn.end - first, count = left < kElementLines ? left : kElementLines;
    for (int64_t line = 0; line < count; ++line) {
      const bool fetches = others == 0;
      others = fetches ? turn.count - 1 : others - 1;
      for (int v = 0; fetches && v < NV; ++v)
        __builtin_prefetch(ahead[v] + 64 * line, 0, MR <= 4 || !kFetchesStreams ? 3 : 2);
#pragma GCC unroll 4
      for (int u = 0; u < Lines::kUnits; ++u) {
        typename Lines::Unit units[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) units[v] = Lines::unit(lines[v] + 64 * line, u);
        dot_units(acc, x + (line * Lines::kUnits + u) * MR, units);
      }
    }
    if constexpr (Lines::kIsGrouped) {
      add_groups<Lines::kLimbs>(acc, s, first / kElementLines, totals);
      if (MR * NV + rows * NV > 24) asm volatile("" : "+m"(totals));  // registers are for sums
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) clear_sum(acc[r][v]);
    }
  }
  // All are used, so that no product can be left out.
  if constexpr (Lines::kIsGrouped) {
    asm volatile("" : : "m"(totals));
  } else if constexpr (Lines::kLimbs == 2) {
#pragma GCC unroll 32
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) totals[r][v] = joined_limbs(&acc[2 * r][v], NV, 2);
    asm volatile("" : : "m"(totals));
  } else {
    typename Lines::Sum sums[MR][NV];
#pragma GCC unroll 32
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[r][v] = acc[r][v];
    asm volatile("" : : "m"(sums));
  }
  return (turn.end - turn.begin) * NV * rows;
}

// Streams that MR rows take at a time, at most: their sums have to fit the registers.
template <int MR>
constexpr int kMostStreams = 4 * MR <= kColumnRows   ? 4
                             : 2 * MR <= kColumnRows ? 2
                                                     : 1;

// Equal streams that lie one after the other.
struct LineRun {
  const uint8_t* begin;  // the first stream's lines
  const uint8_t* next;   // the first line of the run that is read after this one; null: the streams after these
  int64_t bytes;         // from a stream to the next
  int64_t lines;         // of a stream
  int64_t scales_at, scale_bytes;  // what lies between: from a stream's first line on; it is fetched
  int64_t ahead_bytes;

  template <int NV>
  LineStreams<NV> streams(int64_t at) const {
    LineStreams<NV> result;
    for (int v = 0; v < NV; ++v) {
      result.begin[v] = begin + (at + v) * bytes;
      result.next[v] = next == nullptr ? result.begin[v] + NV * bytes : next + (at + v) * bytes;
      for (int64_t i = 0; i < scale_bytes; i += 64) __builtin_prefetch(result.next[v] + scales_at + i, 0, 2);
    }
    const int64_t most = ahead_bytes / (64 * NV);
    result.count = lines;
    result.scale_bytes = -scales_at;
    result.ahead = most < lines ? most : lines;
    return result;
  }
};

// Multiplies streams [first, last) of a run by MR rows' limbs, as many streams at a time as the form says and the
// registers hold; returns lines times rows.
template <class Lines, int MR, int NV = kMostStreams<MR>>
int64_t multiply_block(const LineRun& run, int64_t first, int64_t last, const LoopForm& form) {
  if constexpr (NV > 1)
    if (form.streams < NV) return multiply_block<Lines, MR, NV / 2>(run, first, last, form);
  const auto* x = loop_elements<Lines>();
  const LineTurn whole = {0, run.lines, 0, 1};
  int64_t done = 0;
  for (; first + NV <= last; first += NV) done += multiply_lines<Lines, MR, NV>(run.streams<NV>(first), whole, x);
  for (; first < last; ++first) done += multiply_lines<Lines, MR, 1>(run.streams<1>(first), whole, x);
  return done;
}

// The same for any number of rows, in blocks of nearly equal height.
template <class Lines, int... kHeight>
int64_t multiply_run(std::integer_sequence<int, kHeight...>, const LineRun& run, int64_t first, int64_t last,
                     int64_t rows, const LoopForm& form) {
  using Block = int64_t (*)(const LineRun&, int64_t, int64_t, const LoopForm&);
  constexpr Block by_height[] = {multiply_block<Lines, (kHeight + 1) * Lines::kLimbs>...};
  constexpr int64_t most = sizeof...(kHeight);
  const int64_t blocks = (rows + most - 1) / most;
  int64_t done = 0;
  for (int64_t b = 0; b < blocks; ++b)
    done += by_height[(b + 1) * rows / blocks - b * rows / blocks - 1](run, first, last, form);
  return done;
}

// Streams that rows meet in turns, and their limbs in a turn: those whose sums fill the registers.
constexpr int kTurnStreams = 2 * 12 <= kColumnRows ? 2 : 1, kTurnLimbs = kColumnRows / kTurnStreams;
constexpr int64_t kTurnLines = 64;  // of a stream in a turn: they stay in the L1 cache

// The same in turns: of every strip of the streams, all blocks of rows, before the next strip.
template <class Lines, int NV, int... kHeight>
int64_t multiply_in_turns(std::integer_sequence<int, kHeight...>, const LineRun& run, int64_t first, int64_t last,
                          int64_t rows) {
  using Block = int64_t (*)(const LineStreams<NV>&, LineTurn, const typename Lines::Element*);
  constexpr Block by_height[] = {multiply_lines<Lines, (kHeight + 1) * Lines::kLimbs, NV>...};
  constexpr int64_t most = sizeof...(kHeight);
  const int64_t blocks = (rows + most - 1) / most;
  const auto* x = loop_elements<Lines>();
  int64_t done = 0;
  for (; first + NV <= last; first += NV) {
    const LineStreams<NV> streams = run.streams<NV>(first);
    for (int64_t begin = 0; begin < run.lines; begin += kTurnLines) {
      const int64_t end = begin + kTurnLines < run.lines ? begin + kTurnLines : run.lines;
      for (int64_t b = 0; b < blocks; ++b)
        done += by_height[(b + 1) * rows / blocks - b * rows / blocks - 1](streams, {begin, end, b, blocks}, x);
    }
  }
  if (first < last) {
    constexpr std::integer_sequence<int, kHeight...> heights;
    if constexpr (NV > 1) done += multiply_in_turns<Lines, 1>(heights, run, first, last, rows);
  }
  return done;
}

template <class Lines>
int64_t multiply_run(const LineRun& run, int64_t first, int64_t last, int64_t rows, const LoopForm& form) {
  constexpr int most = kLoopRows / Lines::kLimbs, in_turn = kTurnLimbs / Lines::kLimbs;
  if (form.in_turns && rows > most)
    return multiply_in_turns<Lines, kTurnStreams>(std::make_integer_sequence<int, in_turn>(), run, first, last, rows);
  return multiply_run<Lines>(std::make_integer_sequence<int, most>(), run, first, last, rows, form);
}

}  // namespace FD_ISA
}  // namespace fd
