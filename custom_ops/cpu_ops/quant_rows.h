// SPDX-License-Identifier: Apache-2.0
// Quantizes the rows of a linear layer to integers with a scale per row, and interleaves them as the kernel reads them:
// [four k][limbs of the rows of a block], padded with zeros.
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

// Returns the scale of a row, as common/quant.h defines it.
template <bool kIs16Bit>
RowScale scale_of_row(const uint16_t* x, int64_t k) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return row_scale<kIs16Bit>(largest);
}

// Quantizes one row to eight bits and returns its scale.
template <class Out>
float quantize_row(const uint16_t* x, int64_t k, Out* codes) {
  const RowScale row = scale_of_row<false>(x, k);
  write_codes<false, 1>(x, k, row.factor, codes, 0);
  return row.scale;
}

static inline int32_t sum_codes(const RowCode* codes, int64_t count) {
  int32_t sum = 0;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sums = _mm512_setzero_si512();
  for (; i + 64 <= count; i += 64) sums = _mm512_dpbusd_epi32(sums, ones, _mm512_loadu_si512(codes + i));
  sum = _mm512_reduce_add_epi32(sums);
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

// Rows as the kernel reads them; a row of two limbs counts as two.
struct QuantizedRows {
  const RowQuad* quads = nullptr;
  // [blocks of rows][groups][limbs of the block's rows], initial values of the sums: the sum of the row's codes in a
  // group, times minus the offset of the weight codes
  const int32_t* starts = nullptr;
  const float* scales = nullptr;  // [rows]
};

// Quantizes rows in two passes: first the scale of each row, then the codes, one strip of k of a block of rows at a
// time.
template <Quantization kQuantization>
class RowQuantizer {
 public:
  RowQuantizer(const LinearArgs& args, const RowBlocks& row_blocks, int64_t units)
      : a(args),
        blocks(row_blocks),
        row_units(units),
        num_strips((units + kQuadsPerStrip - 1) / kQuadsPerStrip),
        num_groups((num_strips + kStripsPerGroup - 1) / kStripsPerGroup) {
    const int64_t num_quads = a.rows * kNumLimbs * row_units, num_starts = a.rows * kNumLimbs * num_groups;
    const auto quad_bytes = static_cast<int64_t>(sizeof(RowQuad));
    const int64_t normed_bytes = a.norm == nullptr ? 0 : 2 * a.rows * a.k;
    const int64_t bytes = num_quads * quad_bytes + 4 * num_starts + 8 * a.rows + normed_bytes;
    quads = static_cast<RowQuad*>(thread_scratch(static_cast<size_t>(bytes)));
    starts = reinterpret_cast<int32_t*>(quads + num_quads);
    scales = reinterpret_cast<float*>(starts + num_starts);
    factors = scales + a.rows;
    normed = reinterpret_cast<uint16_t*>(factors + a.rows);
  }

  // Quantizes all rows on this thread.
  QuantizedRows quantize() {
    for (int64_t b = 0; b < blocks.count; ++b) write_block(b);
    return {quads, starts, scales};
  }

  // Quantizes all rows on all threads.
  QuantizedRows quantize_together() {
    const int64_t threads = num_threads();
    if (blocks.count < threads)
      quantize_few_blocks(threads);
    else
      parallel_for(blocks.count, true, [&](int64_t b) { write_block(b); });
    return {quads, starts, scales};
  }

 private:
  static constexpr int32_t kOffset = has_four_bits(kQuantization) ? 8 : 128;
  static constexpr int64_t kNumLimbs = kLimbs<kQuantization>;
  static constexpr int64_t kQuadsPerStrip = (has_four_bits(kQuantization) ? kGroup : 256) / 4;
  static constexpr int64_t kStripsPerGroup = kIntegerGroup<kQuantization> / (4 * kQuadsPerStrip);

  void write_block(int64_t block) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first;
    const uint16_t* x = input_rows<uint16_t>(a, first, rows);
    find_scales(x, first, rows);
    write_strips(x, block, 0, num_strips);
  }

  // Divides rows, and then strips, among the threads: for fewer blocks than threads.
  void quantize_few_blocks(int64_t threads) {
    const auto* x = static_cast<const uint16_t*>(a.x);
    parallel_for(threads, true, [&](int64_t part) {
      const int64_t first = part * a.rows / threads, rows = (part + 1) * a.rows / threads - first;
      if (a.norm != nullptr)
        norm_rows(x + first * a.k, static_cast<const uint16_t*>(a.norm), normed + first * a.k, rows, a.k, a.eps);
      find_scales((a.norm == nullptr ? x : normed) + first * a.k, first, rows);
    });
    if (a.norm != nullptr) x = normed;
    parallel_for(threads, true, [&](int64_t part) {
      for (int64_t b = 0; b < blocks.count; ++b)
        write_strips(x + blocks.begin(b) * a.k, b, part * num_strips / threads, (part + 1) * num_strips / threads);
    });
  }

  // Finds the scales of `rows` rows from `first` on, whose data starts at x.
  void find_scales(const uint16_t* x, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const RowScale row = scale_of_row<has_16_bit_rows(kQuantization)>(x + r * a.k, a.k);
      factors[first + r] = row.factor;
      scales[first + r] = row.scale;
    }
    std::memset(starts + first * kNumLimbs * num_groups, 0, static_cast<size_t>(4 * rows * kNumLimbs * num_groups));
  }

  // Quantizes strips [begin, end) of a block of rows, whose data starts at x.
  void write_strips(const uint16_t* x, int64_t block, int64_t begin, int64_t end) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first, limb_rows = rows * kNumLimbs;
    RowCode codes[kColumnRows * 4 * kQuadsPerStrip];
    int32_t sums[kColumnRows] = {};
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t unit = strip * kQuadsPerStrip,
                    units = unit + kQuadsPerStrip < row_units ? kQuadsPerStrip : row_units - unit;
      const int64_t width = 4 * units, count = 4 * unit + width < a.k ? width : a.k - 4 * unit;
      for (int64_t r = 0; r < rows; ++r)
        write_codes<has_16_bit_rows(kQuantization), kNumLimbs>(x + r * a.k + 4 * unit, count, factors[first + r],
                                                               codes + r * kNumLimbs * width, width);
      for (int64_t r = 0; r < limb_rows; ++r) {
        if (count < width)
          std::memset(codes + r * width + count, 0, static_cast<size_t>(width - count) * sizeof(RowCode));
        sums[r] += sum_codes(codes + r * width, width);
      }
      interleave_codes(codes, limb_rows, units, quads + (first * row_units + unit * rows) * kNumLimbs);
      if (strip + 1 < end && (strip + 1) % kStripsPerGroup != 0) continue;
      int32_t* group = starts + (first * num_groups + strip / kStripsPerGroup * rows) * kNumLimbs;
      for (int64_t r = 0; r < limb_rows; ++r) {
        const int32_t start = -kOffset * sums[r];
        kStripsPerGroup == 1 ? group[r] = start : __atomic_add_fetch(group + r, start, __ATOMIC_RELAXED);
        sums[r] = 0;
      }
    }
  }

  const LinearArgs& a;
  const RowBlocks& blocks;
  const int64_t row_units, num_strips, num_groups;
  RowQuad* quads;
  int32_t* starts;
  float *scales, *factors;
  uint16_t* normed;
};

}  // namespace FD_ISA
}  // namespace fd
