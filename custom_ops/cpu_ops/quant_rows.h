// SPDX-License-Identifier: Apache-2.0
// The rows of a quantized linear layer as integers with a scale per row, in the kernel's order: [four k][rows of the
// block, limb by limb], padded with zeros.
#pragma once

#include <limits>

#include "common/scratch.h"
#include "cpu_ops/interleave.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/quant_units.h"

namespace fd {
namespace FD_ISA {

constexpr float kNearest = 12582912.0f;    // 1.5 * 2^23: the sum's last bits are the nearest integer, ties to even
constexpr float kLeastScaled = 0x1p-112f;  // what stays below in magnitude becomes zero: its inverse would overflow
constexpr float kMostWide = 32639.0f;      // of a code of sixteen bits: 32640 has no two signed bytes

// x + kNearest as bits: the last sixteen are those of the integer nearest to |x| < 2^15, ties to even.
FD_INLINE uint32_t nearest_bits(float x) {
  const float shifted = x + kNearest;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits;
}

// codes[i] = nearest(x[i] * factor), as limbs that lie `stride` apart, the high one first.
template <bool kIsWide, int kNumLimbs, class Out>
FD_INLINE void write_codes(const uint16_t* x, int64_t k, float factor, Out* codes, int64_t stride) {
  Out* low = codes + (kNumLimbs - 1) * stride;
  int64_t i = 0;
#if defined(FD_ISA_AVX512)
  const auto write = [](Out* to, __m512i bits) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(bits));
  };
  for (; i + kLanes <= k; i += kLanes) {
    const F16 value = mul(load_bf16(x + i), splat(factor)), kept = kIsWide ? min(value, splat(kMostWide)) : value;
    const __m512i bits = _mm512_castps_si512(add(kept, splat(kNearest)));
    write(low + i, bits);
    if (kNumLimbs == 2) write(codes + i, _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(128)), 8));
  }
#endif
  for (; i < k; ++i) {
    const float value = bf16_to_float(x[i]) * factor;
    const uint32_t bits = nearest_bits(kIsWide && value > kMostWide ? kMostWide : value);
    low[i] = static_cast<Out>(bits);
    if (kNumLimbs == 2) codes[i] = static_cast<Out>((bits + 128) >> 8);
  }
}

// What a row's elements are multiplied by to become integers, and what an integer stands for.
struct RowScale {
  float factor, scale;
};

// Eight bits: absmax becomes 127. Sixteen: the scale is a power of two, so that absmax becomes 2^14 .. 2^15 and all
// bits of bf16 are kept down to absmax / 128. A row with NaN or infinity has the scale NaN, so that its outputs are
// NaN.
template <bool kIsWide>
RowScale scale_of_row(const uint16_t* x, int64_t k) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint16_t magnitude = x[i] & 0x7fff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const float absmax = bf16_to_float(largest), power = bf16_to_float(largest & 0x7f80);
  const bool is_finite = largest < 0x7f80, is_scaled = is_finite && absmax >= kLeastScaled;
  if (!is_scaled) return {0.0f, is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN()};
  return {kIsWide ? 0x1p14f / power : 127.0f / absmax, kIsWide ? power * 0x1p-14f : absmax / 127.0f};
}

// Quantizes one row to eight bits and returns its scale.
template <class Out>
float quantize_row(const uint16_t* x, int64_t k, Out* codes) {
  const RowScale row = scale_of_row<false>(x, k);
  write_codes<false, 1>(x, k, row.factor, codes, 0);
  return row.scale;
}

static inline int32_t sum_codes(const Code* codes, int64_t count) {
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

// Codes [rows][4 * units] as elements [units][rows].
static inline void interleave_codes(const Code* codes, int64_t rows, int64_t units, QuadElement* packed) {
  const auto at = [=](int64_t r, int64_t u) { return codes + 4 * (r * units + u); };
  interleave(
      rows, units, packed, [=](int64_t r, int64_t u) { return load_pairs(at(r, u)); },
      [=](int64_t r, int64_t u) { return quad_element(at(r, u)); });
}

// Rows as the kernel reads them; a row of two limbs counts as two.
struct QuantizedRows {
  const QuadElement* elements = nullptr;
  // [blocks of rows][groups][limbs of the block's rows]: minus what was added to the weights, times the sum of the
  // group
  const int32_t* starts = nullptr;
  const float* scales = nullptr;  // [rows]
};

// Makes them in two passes: what each row is multiplied by, then elements, a strip of k of a block of rows at a time.
template <Quantization kQuantization>
class RowPreparation {
 public:
  RowPreparation(const LinearArgs& args, const Blocks& row_blocks, int64_t units)
      : a(args),
        blocks(row_blocks),
        row_units(units),
        num_strips((units + kStripUnits - 1) / kStripUnits),
        num_groups((num_strips + kStripsOfGroup - 1) / kStripsOfGroup) {
    const int64_t num_elements = a.rows * kNumLimbs * row_units, num_starts = a.rows * kNumLimbs * num_groups;
    const auto element_bytes = static_cast<int64_t>(sizeof(QuadElement));
    const int64_t normed_bytes = a.norm == nullptr ? 0 : 2 * a.rows * a.k;
    const int64_t bytes = num_elements * element_bytes + 4 * num_starts + 8 * a.rows + normed_bytes;
    elements = static_cast<QuadElement*>(thread_scratch(static_cast<size_t>(bytes)));
    starts = reinterpret_cast<int32_t*>(elements + num_elements);
    scales = reinterpret_cast<float*>(starts + num_starts);
    factors = scales + a.rows;
    normed = reinterpret_cast<uint16_t*>(factors + a.rows);
  }

  // On this thread alone.
  QuantizedRows make() {
    for (int64_t b = 0; b < blocks.count; ++b) write_block(b);
    return {elements, starts, scales};
  }

  // On all threads.
  QuantizedRows make_together() {
    const int64_t threads = num_threads();
    if (blocks.count < threads)
      share(threads);
    else
      parallel_for(blocks.count, true, [&](int64_t b) { write_block(b); });
    return {elements, starts, scales};
  }

 private:
  static constexpr int32_t kOffset = has_four_bits(kQuantization) ? 8 : 128;
  static constexpr int64_t kNumLimbs = kLimbs<kQuantization>;
  static constexpr int64_t kStripUnits = (has_four_bits(kQuantization) ? kGroup : 256) / 4;
  static constexpr int64_t kStripsOfGroup = kIntegerK<kQuantization> / (4 * kStripUnits);

  void write_block(int64_t block) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first;
    const uint16_t* x = input_rows<uint16_t>(a, first, rows);
    find_scales(x, first, rows);
    write_strips(x, block, 0, num_strips);
  }

  // Few blocks of rows, on all threads.
  void share(int64_t threads) {
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

  // Rows from `first` on, which begin at x.
  void find_scales(const uint16_t* x, int64_t first, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      const RowScale row = scale_of_row<has_wide_rows(kQuantization)>(x + r * a.k, a.k);
      factors[first + r] = row.factor;
      scales[first + r] = row.scale;
    }
    std::memset(starts + first * kNumLimbs * num_groups, 0, static_cast<size_t>(4 * rows * kNumLimbs * num_groups));
  }

  // Strips [begin, end) of a block of rows, which begins at x.
  void write_strips(const uint16_t* x, int64_t block, int64_t begin, int64_t end) {
    const int64_t first = blocks.begin(block), rows = blocks.begin(block + 1) - first, limb_rows = rows * kNumLimbs;
    Code codes[kColumnRows * 4 * kStripUnits];
    int32_t sums[kColumnRows] = {};
    for (int64_t strip = begin; strip < end; ++strip) {
      const int64_t unit = strip * kStripUnits, units = unit + kStripUnits < row_units ? kStripUnits : row_units - unit;
      const int64_t width = 4 * units, count = 4 * unit + width < a.k ? width : a.k - 4 * unit;
      for (int64_t r = 0; r < rows; ++r)
        write_codes<has_wide_rows(kQuantization), kNumLimbs>(x + r * a.k + 4 * unit, count, factors[first + r],
                                                             codes + r * kNumLimbs * width, width);
      for (int64_t r = 0; r < limb_rows; ++r) {
        if (count < width) std::memset(codes + r * width + count, 0, static_cast<size_t>(width - count) * sizeof(Code));
        sums[r] += sum_codes(codes + r * width, width);
      }
      interleave_codes(codes, limb_rows, units, elements + (first * row_units + unit * rows) * kNumLimbs);
      if (strip + 1 < end && (strip + 1) % kStripsOfGroup != 0) continue;
      int32_t* group = starts + (first * num_groups + strip / kStripsOfGroup * rows) * kNumLimbs;
      for (int64_t r = 0; r < limb_rows; ++r) {
        const int32_t start = -kOffset * sums[r];
        kStripsOfGroup == 1 ? group[r] = start : __atomic_add_fetch(group + r, start, __ATOMIC_RELAXED);
        sums[r] = 0;
      }
    }
  }

  const LinearArgs& a;
  const Blocks& blocks;
  const int64_t row_units, num_strips, num_groups;
  QuadElement* elements;
  int32_t* starts;
  float *scales, *factors;
  uint16_t* normed;
};

}  // namespace FD_ISA
}  // namespace fd
