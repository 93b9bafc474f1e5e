// SPDX-License-Identifier: Apache-2.0
// Where the outputs of a weight to pack lie.
#pragma once

#include <algorithm>

#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {
namespace {

// Consecutive outputs within one piece, and the first of the panel's lanes that they take.
struct Run {
  const PackPiece& piece;
  int64_t first, lane, count;
};

// Calls visit(run) for the runs that make up outputs [first, first + count) of the pieces in order.
template <class Visit>
void for_each_run(const PackPieces& pieces, int64_t first, int64_t count, const Visit& visit) {
  int64_t begin = 0, lane = 0;
  for (const PackPiece* piece = pieces.data; count > 0; begin += piece->count, ++piece) {
    const int64_t skipped = first - begin;
    if (skipped >= piece->count) continue;
    const int64_t taken = std::min(piece->count - skipped, count);
    visit(Run{*piece, skipped, lane, taken});
    first += taken, lane += taken, count -= taken;
  }
}

// Points rows[lane] at the weights [k] of outputs [first, first + count): where they are stored as rows, or else turned
// into rows in `turned` [16][k].
[[maybe_unused]] void panel_rows(const PackPieces& pieces, int64_t first, int64_t count, int64_t k, uint16_t* turned,
                                 const uint16_t** rows) {
  constexpr int64_t strip = 32;
  for_each_run(pieces, first, count, [&](const Run& run) {
    const auto* data = static_cast<const uint16_t*>(run.piece.data);
    const int64_t stride = run.piece.stride;
    for (int64_t i = 0; i < run.count; ++i)
      rows[run.lane + i] = run.piece.is_transposed ? turned + (run.lane + i) * k : data + (run.first + i) * stride;
    if (!run.piece.is_transposed) return;
    for (int64_t begin = 0; begin < k; begin += strip)
      for (int64_t i = 0; i < run.count; ++i)
        for (int64_t row = begin; row < std::min(begin + strip, k); ++row)
          turned[(run.lane + i) * k + row] = data[row * stride + run.first + i];
  });
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
