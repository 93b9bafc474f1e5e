// SPDX-License-Identifier: Apache-2.0
// Quantizes the rows of a linear layer to integers with a scale per row or per piece of a row, and interleaves them as
// the kernel reads them: [four k][limbs of the rows of a block], padded with zeros.
#pragma once

#include "common/scratch.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

// Writes codes[i] = nearest(x[i] * factor) as limbs that are `stride` codes apart, the high limb first.
template <bool kIs16Bit, int kNumLimbs, class Out>
FD_INLINE void write_codes(const uint16_t* x, int64_t k, float factor, Out* codes, int64_t stride) {
  Out* low = codes + (kNumLimbs - 1) * stride;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const auto write = [](Out* to, __m512i bits) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bits));
  };
  for (; i + kLanes <= k; i += kLanes) {
    const FP32Vec16 value = mul(load_bf16(x + i), splat(factor)),
                    limited = kIs16Bit ? min(value, splat(kMax16BitCode)) : value;
    const __m512i bits = _mm512_castps_si512(add(limited, splat(kRoundingShift)));
    write(low + i, bits);
    if (kNumLimbs == 2) write(codes + i, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(128)), 8));
  }
#endif
  for (; i < k; ++i) {
    const uint32_t bits = code_bits<kIs16Bit>(bf16_to_float(x[i]), factor);
    low[i] = static_cast<Out>(kNumLimbs == 2 ? low_limb(bits) : bits);
    if (kNumLimbs == 2) codes[i] = static_cast<Out>(high_limb(bits));
  }
}

// Returns the scale of a row, or of a piece of one, as common/quant.h defines it.
template <bool kIs16Bit>
FD_INLINE RowScale scale_of(const uint16_t* x, int64_t count) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return row_scale<kIs16Bit>(largest);
}

// Quantizes one row to eight bits and returns its scale.
template <class Out>
float quantize_row(const uint16_t* x, int64_t k, Out* codes) {
  const RowScale row = scale_of<false>(x, k);
  write_codes<false, 1>(x, k, row.factor, codes, 0);
  return row.scale;
}

static inline int32_t sum_codes(const RowCode* codes, int64_t count) {
  int32_t sum = 0;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const __m256i ones = _mm256_set1_epi8(1);
  __m256i sums = _mm256_setzero_si256();
  for (; i + 32 <= count; i += 32)
    sums = _mm256_dpbusd_epi32(sums, ones, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
  sum = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(sums));
#endif
  for (; i < count; ++i) sum += codes[i];
  return sum;
}

// Interleaves codes [rows][4 * units] as RowQuads [units][rows].
static inline void interleave_codes(const RowCode* codes, int64_t rows, int64_t units, RowQuad* packed) {
  const auto at = [=](int64_t r, int64_t u) { return codes + 4 * (r * units + u); };
  interleave(
      rows, units, packed, [=](int64_t r, int64_t u) { return load_pairs(at(r, u)); },
      [=](int64_t r, int64_t u) { return row_quad(at(r, u)); });
}

// Rows as the kernel reads them; a row of two limbs counts as two. A block is a block of rows.
struct QuantizedRows {
  const RowQuad* quads = nullptr;
  // [blocks][pieces][limbs of the block's rows], initial values of the sums: the sum of the piece's codes times minus
  // the offset of the weight codes
  const int32_t* starts = nullptr;
  const float* scales = nullptr;        // [rows], with 16 bits
  const float* piece_scales = nullptr;  // [blocks][pieces][rows of the block], with 8 bits
  const float* piece_sums = nullptr;    // [blocks][pieces][rows of the block]: what minimums are multiplied by
};

// Quantizes rows, one strip of k of a block of rows at a time, after the scale of each row is known if it has one.
template <Quantization kQuantization>
class RowQuantizer {
 public:
  RowQuantizer(const QuantizedLinearArgs& args, const RowBlocks& row_blocks)
      : a(args),
        blocks(row_blocks),
        row_units(quads_per_row(kQuantization, args.k)),
        num_strips((row_units + kQuadsPerStrip - 1) / kQuadsPerStrip),
        num_pieces((4 * row_units + kSumLength<kQuantization> - 1) / kSumLength<kQuantization>) {
    const int64_t num_quads = a.rows * kNumLimbs * row_units, num_starts = a.rows * kNumLimbs * num_pieces;
    const int64_t num_scales = kIs16Bit ? 2 * a.rows : a.rows * num_pieces;
    const int64_t num_sums = a.form.has_minimum ? a.rows * num_pieces : 0;
    const auto quad_bytes = static_cast<int64_t>(sizeof(RowQuad));
    const int64_t normed_bytes = a.norm == nullptr ? 0 : 2 * a.rows * a.k;
    const int64_t bytes = num_quads * quad_bytes + 4 * (num_starts + num_scales + num_sums) + normed_bytes;
    quads = static_cast<RowQuad*>(thread_scratch(static_cast<size_t>(bytes)));
    starts = reinterpret_cast<int32_t*>(quads + num_quads);
    scales = reinterpret_cast<float*>(starts + num_starts);
    factors = scales + a.rows;
    sums = scales + num_scales;
    normed = reinterpret_cast<uint16_t*>(sums + num_sums);
  }

  // Quantizes all rows on this thread.
  QuantizedRows quantize() {
    for (int64_t b = 0; b < blocks.count; ++b) write_block(b);
    return quantized();
  }

  // Quantizes all rows on all threads.
  QuantizedRows quantize_together() {
    const int64_t threads = num_threads();
    if (blocks.count < threads)
      quantize_few_blocks(threads);
    else
      parallel_for(blocks.count, true, [&](int64_t b) { write_block(b); });
    return quantized();
  }

 private:
  static constexpr bool kIs16Bit = has_16_bit_rows(kQuantization);
  static constexpr int64_t kNumLimbs = kLimbs<kQuantization>;
  static constexpr int64_t kQuadsPerStrip = (joins_pieces(kQuantization) ? kPart : kWint8Piece) / 4;
  static constexpr int64_t kStripsPerPiece =
      joins_pieces(kQuantization) ? 1 : kSumLength<kQuantization> / (4 * kQuadsPerStrip);

  QuantizedRows quantized() const { return {quads, starts, scales, scales, sums}; }

  void write_block(int64_t block) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first;
    const StridedRows<uint16_t> x = input_rows<uint16_t>(a, first, rows);
    find_scales(x, first, rows);
    write_strips(x, block, 0, num_strips);
  }

  // Divides rows, and then strips, among the threads: for fewer blocks than threads.
  void quantize_few_blocks(int64_t threads) {
    const StridedRows<uint16_t> stored = {static_cast<const uint16_t*>(a.x), a.x_stride};
    const StridedRows<uint16_t> x = a.norm == nullptr ? stored : StridedRows<uint16_t>{normed, a.k};
    parallel_for(threads, true, [&](int64_t part) {
      const int64_t first = part * a.rows / threads, rows = (part + 1) * a.rows / threads - first;
      if (a.norm != nullptr)
        norm_rows(stored.from(first), stored.stride, static_cast<const uint16_t*>(a.norm), normed + first * a.k, rows,
                  a.k, a.eps);
      find_scales({x.from(first), x.stride}, first, rows);
    });
    parallel_for(threads, true, [&](int64_t part) {
      for (int64_t b = 0; b < blocks.count; ++b)
        write_strips({x.from(blocks.begin(b)), x.stride}, b, part * num_strips / threads,
                     (part + 1) * num_strips / threads);
    });
  }

  // Finds the scales of rows x, which are `rows` rows from `first` on, unless pieces have scales of their own.
  void find_scales(const StridedRows<uint16_t>& x, int64_t first, int64_t rows) {
    for (int64_t r = 0; kIs16Bit && r < rows; ++r) {
      const RowScale row = scale_of<true>(x.from(r), a.k);
      factors[first + r] = row.factor;
      scales[first + r] = row.scale;
    }
    if (kStripsPerPiece == 1) return;
    std::memset(starts + first * kNumLimbs * num_pieces, 0, static_cast<size_t>(4 * rows * kNumLimbs * num_pieces));
  }

  // Quantizes strips [begin, end) of the rows x of a block.
  void write_strips(const StridedRows<uint16_t>& x, int64_t block, int64_t begin, int64_t end) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first, limb_rows = rows * kNumLimbs;
    RowCode codes[kColumnRows * 4 * kQuadsPerStrip];
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t unit = strip * kQuadsPerStrip,
                    units = unit + kQuadsPerStrip < row_units ? kQuadsPerStrip : row_units - unit;
      const int64_t width = 4 * units, count = 4 * unit + width < a.k ? width : a.k - 4 * unit;
      for (int64_t r = 0; r < rows; ++r)
        write_row(x.from(r) + 4 * unit, count, first, rows, r, strip, codes + r * kNumLimbs * width, width);
      for (int64_t r = 0; count < width && r < limb_rows; ++r)
        std::memset(codes + r * width + count, 0, static_cast<size_t>(width - count) * sizeof(RowCode));
      if constexpr (joins_pieces(kQuantization))
        write_starts(codes, width, first, rows, strip);
      else
        add_to_starts(codes, width, first, limb_rows, strip);
      interleave_codes(codes, limb_rows, units, quads + (first * row_units + unit * rows) * kNumLimbs);
    }
  }

  // Writes the codes of `count` inputs of row r of a block, which start at x, and the scales of their pieces.
  void write_row(const uint16_t* x, int64_t count, int64_t first, int64_t rows, int64_t r, int64_t strip,
                 RowCode* codes, int64_t width) {
    if constexpr (kIs16Bit) return write_codes<true, kNumLimbs>(x, count, factors[first + r], codes, width);
    float* piece_scales = scales + first * num_pieces + strip * kPart / kPiece * rows + r;
    for (int64_t i = 0; i < count; i += kPiece, piece_scales += rows) {
      const int64_t length = count - i < kPiece ? count - i : kPiece;
      const RowScale piece = scale_of<false>(x + i, length);
      write_codes<false, 1>(x + i, length, piece.factor, codes + i, 0);
      *piece_scales = piece.scale;
    }
  }

  // Writes the starts of the pieces of a strip, and what their minimums are multiplied by.
  void write_starts(const RowCode* codes, int64_t width, int64_t first, int64_t rows, int64_t strip) {
    const int64_t first_piece = strip * kPart / kPiece;
    for (int64_t i = 0; i < width; i += kPiece) {
      const int64_t piece = first_piece + i / kPiece, length = width - i < kPiece ? width - i : kPiece;
      int32_t* to = starts + (first * num_pieces + piece * rows) * kNumLimbs;
      for (int64_t r = 0; r < rows * kNumLimbs; ++r) to[r] = sum_codes(codes + r * width + i, length);
      if (a.form.has_minimum) write_sums(to, first * num_pieces + piece * rows, rows);
      for (int64_t r = 0; r < rows * kNumLimbs; ++r) to[r] *= -a.form.code_offset();
    }
  }

  // Writes the sums of a piece's codes, whose limbs are given, times the scales of a piece of 8 bits. `at` is the index
  // of its first row.
  void write_sums(const int32_t* limbs, int64_t at, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t sum = kNumLimbs == 2 ? 256 * limbs[2 * r] + limbs[2 * r + 1] : limbs[r];
      sums[at + r] = kIs16Bit ? static_cast<float>(sum) : ScalarLanes::mul(static_cast<float>(sum), scales[at + r]);
    }
  }

  // Adds a strip to the starts of wint8 without groups, whose pieces may consist of several strips.
  void add_to_starts(const RowCode* codes, int64_t width, int64_t first, int64_t limb_rows, int64_t strip) {
    int32_t* to = starts + first * kNumLimbs * num_pieces + strip / kStripsPerPiece * limb_rows;
    for (int64_t r = 0; r < limb_rows; ++r) {
      const int32_t start = -a.form.code_offset() * sum_codes(codes + r * width, width);
      kStripsPerPiece == 1 ? to[r] = start : __atomic_add_fetch(to + r, start, __ATOMIC_RELAXED);
    }
  }

  const QuantizedLinearArgs& a;
  const RowBlocks& blocks;
  const int64_t row_units, num_strips, num_pieces;
  RowQuad* quads;
  int32_t* starts;
  float *scales, *factors, *sums;
  uint16_t* normed;
};

}  // namespace FD_ISA
}  // namespace fd
