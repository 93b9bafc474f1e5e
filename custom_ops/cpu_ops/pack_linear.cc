// SPDX-License-Identifier: Apache-2.0
// Packs stored weights into the panels that linear.cc reads. In k units of four bytes (a pair of k in bf16, one k in
// fp32) a panel is [units][16]. Outputs that are stored as rows are transposed; outputs stored as columns are only
// interleaved.
#include <cstring>

#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"
#include "cpu_ops/pack_pieces.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace fd {
namespace FD_ISA {
namespace {

// Panels of a tile, at most: 1 KiB of each row of a matrix [in, out].
constexpr int64_t kPanelsPerTile = 32;
// Units of a strip of a matrix [in, out]. Neighbouring panels read the same cache lines of these rows, which stay in L1
// even if all of them map to the same cache set.
constexpr int64_t kUnitsPerStrip = 8;
constexpr int64_t kUnit = 4;                     // bytes
constexpr int64_t kUnitStride = kUnit * kPanel;  // bytes from one unit of a lane to the next

#if defined(__SSE2__)
FD_INLINE __m128i load_16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
// For panels that are written one after the other: the system has just cleared their pages, so the lines are in the
// caches.
FD_INLINE void store_16(void* p, __m128i x) { _mm_store_si128(static_cast<__m128i*>(p), x); }
// For many panels that are written in rotation: streaming stores do not read a line before they overwrite it.
FD_INLINE void stream_16(void* p, __m128i x) { _mm_stream_si128(static_cast<__m128i*>(p), x); }
FD_INLINE void finish_stores() { _mm_sfence(); }
#else
FD_INLINE void finish_stores() {}
#endif

// Returns how many of `count` lanes can be written with aligned stores of `at_a_time` lanes.
FD_INLINE int64_t whole_lanes(const void* target, int64_t count, int64_t at_a_time) {
  return reinterpret_cast<uintptr_t>(target) % 16 == 0 ? count / at_a_time * at_a_time : 0;
}

// Transposes four units of four rows, which are `stride` bytes apart, into four lanes.
FD_INLINE void transpose_4x4(const char* rows, int64_t stride, char* target) {
#if defined(__SSE2__)
  __m128i row[4];
  for (int i = 0; i < 4; ++i) row[i] = load_16(rows + i * stride);
  const __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]), high01 = _mm_unpackhi_epi32(row[0], row[1]);
  const __m128i low23 = _mm_unpacklo_epi32(row[2], row[3]), high23 = _mm_unpackhi_epi32(row[2], row[3]);
  const __m128i unit[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                           _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
  for (int i = 0; i < 4; ++i) store_16(target + i * kUnitStride, unit[i]);
#else
  for (int lane = 0; lane < 4; ++lane)
    for (int unit = 0; unit < 4; ++unit)
      std::memcpy(target + unit * kUnitStride + lane * kUnit, rows + lane * stride + unit * kUnit, kUnit);
#endif
}

// Transposes the first `end` units of `count` rows, which are `stride` bytes apart, into as many lanes. Meanwhile it
// prefetches the rows of the next panel as one stream; the hardware would start sixteen short streams for each panel.
void transpose_units(const char* rows, int64_t stride, int64_t count, int64_t end, char* target) {
  const int64_t whole = whole_lanes(target, count, 4);
  const char* next = rows + count * stride;
  for (int64_t unit = 0; unit < end; unit += 4) {
    for (int64_t i = 0; i < count * 4 * kUnit; i += 64) __builtin_prefetch(next + unit * count * kUnit + i, 0, 2);
    for (int64_t lane = 0; lane < count; lane += 4) {
      const char* from = rows + lane * stride + unit * kUnit;
      char* to = target + unit * kUnitStride + lane * kUnit;
      if (lane < whole && unit + 4 <= end) {
        transpose_4x4(from, stride, to);
        continue;
      }
      for (int64_t i = 0; i < smaller(4, count - lane); ++i)
        for (int64_t j = 0; j < smaller(4, end - unit); ++j)
          std::memcpy(to + j * kUnitStride + i * kUnit, from + i * stride + j * kUnit, kUnit);
    }
  }
}

// Packs all `end` units of outputs that are stored as rows.
template <class T>
void pack_rows(const PackArgs& a, const OutputRun& run, int64_t end, T* panel) {
  constexpr int64_t size = KUnit<T>::kSize;
  const T* rows = static_cast<const T*>(run.piece.data) + run.first * run.piece.stride;
  T* target = panel + run.lane * size;
  const int64_t whole = smaller(end, a.k / size), stride = run.piece.stride * static_cast<int64_t>(sizeof(T));
  transpose_units(reinterpret_cast<const char*>(rows), stride, run.count, whole, reinterpret_cast<char*>(target));
  if (whole == end || size == 1) return;  // the padding of fp32 is zeros only
  for (int64_t i = 0; i < run.count; ++i)
    target[whole * kUnitSize<T> + i * size] = rows[i * run.piece.stride + a.k - 1];
}

// Interleaves one unit of `count` outputs that are stored as columns.
FD_INLINE void interleave(const float* rows, int64_t, int64_t count, float* target) {
  int64_t i = 0;
#if defined(__SSE2__)
  for (const int64_t whole = whole_lanes(target, count, 4); i < whole; i += 4) stream_16(target + i, load_16(rows + i));
#endif
  for (; i < count; ++i) target[i] = rows[i];
}
FD_INLINE void interleave(const uint16_t* rows, int64_t stride, int64_t count, uint16_t* target) {
  int64_t i = 0;
#if defined(__SSE2__)
  for (const int64_t whole = whole_lanes(target, count, 8); i < whole; i += 8) {
    const __m128i even = load_16(rows + i), odd = load_16(rows + stride + i);
    stream_16(target + 2 * i, _mm_unpacklo_epi16(even, odd));
    stream_16(target + 2 * i + 8, _mm_unpackhi_epi16(even, odd));
  }
#endif
  for (; i < count; ++i) target[2 * i] = rows[i], target[2 * i + 1] = rows[stride + i];
}

// Packs units [begin, end) of outputs that are stored as columns.
template <class T>
void pack_columns(const PackArgs& a, const OutputRun& run, int64_t begin, int64_t end, T* panel) {
  constexpr int64_t size = KUnit<T>::kSize;
  const T* columns = static_cast<const T*>(run.piece.data) + run.first;
  T* target = panel + run.lane * size;
  const int64_t whole = smaller(end, a.k / size), stride = run.piece.stride;
  const bool begins_line = run.first % kLineElements<T> == 0;
  for (int64_t unit = begin; unit < whole; ++unit) {
    const T* rows = columns + unit * size * stride;
    if (begins_line)  // the next strip: rows are too far apart for the hardware prefetcher
      for (int64_t i = 0; i < size; ++i) __builtin_prefetch(rows + (kUnitsPerStrip * size + i) * stride, 0, 2);
    interleave(rows, stride, run.count, target + unit * kUnitSize<T>);
  }
  if (whole == end || size == 1) return;
  for (int64_t i = 0; i < run.count; ++i) target[whole * kUnitSize<T> + i * size] = columns[(a.k - 1) * stride + i];
}

template <class T>
void pack_panel(const PackArgs& a, int64_t index, int64_t begin, int64_t end, T* panel) {
  const PanelRows rows = rows_of_panel(index, a.n, a.gated);
  if (rows.count < kPanel || a.k % 2 != 0)
    std::memset(panel + begin * kUnitSize<T>, 0, static_cast<size_t>((end - begin) * kUnitSize<T>) * sizeof(T));
  for_each_output_run(a.pieces, rows.first, rows.count, [&](const OutputRun& run) {
    run.piece.is_transposed ? pack_columns(a, run, begin, end, panel) : pack_rows(a, run, end, panel);
  });
}

// Returns the panel that holds outputs 16 * index .. 16 * index + 15 of the stored matrix.
int64_t stored_panel(const PackArgs& a, int64_t index) {
  const int64_t up = num_panels(a.n, false);
  return !a.gated ? index : index < up ? 2 * index : 2 * (index - up) + 1;
}

// Packs panels [first, last) one after the other.
template <class T>
void pack_stored_rows(const PackArgs& a, int64_t first, int64_t last, T* packed) {
  const int64_t units = (a.k + 1) / 2 * 2 / KUnit<T>::kSize;
  for (int64_t panel = first; panel < last; ++panel)
    pack_panel(a, panel, 0, units, packed + panel * units * kUnitSize<T>);
}

// Packs the panels of stored outputs [16 * first, 16 * last) strip by strip.
template <class T>
void pack_stored_columns(const PackArgs& a, int64_t first, int64_t last, T* packed) {
  const int64_t units = (a.k + 1) / 2 * 2 / KUnit<T>::kSize;
  for (int64_t unit = 0; unit < units; unit += kUnitsPerStrip) {
    for (int64_t index = first; index < last; ++index) {
      const int64_t panel = stored_panel(a, index);
      pack_panel(a, panel, unit, smaller(unit + kUnitsPerStrip, units), packed + panel * units * kUnitSize<T>);
    }
  }
  finish_stores();
}

// Each thread packs a range of neighbouring panels. Two threads that wrote to the same untouched huge page would both
// clear it.
template <class T>
void pack_typed(const PackArgs& a) {
  T* packed = static_cast<T*>(a.packed);
  const bool is_transposed = a.pieces.data->is_transposed;
  const int64_t panels = num_panels(a.n, a.gated), per_thread = panels / num_threads();
  const int64_t at_once = per_thread < 1 ? 1 : smaller(per_thread, kPanelsPerTile);
  for_each_in_ranges((panels + at_once - 1) / at_once, a.n * a.k >= kMinParallelProducts, [&](int64_t group) {
    const int64_t first = group * at_once, last = smaller(first + at_once, panels);
    is_transposed ? pack_stored_columns(a, first, last, packed) : pack_stored_rows(a, first, last, packed);
  });
}

}  // namespace

void pack_linear(const PackArgs& a) { a.dtype == DType::kBfloat16 ? pack_typed<uint16_t>(a) : pack_typed<float>(a); }

}  // namespace FD_ISA
}  // namespace fd
