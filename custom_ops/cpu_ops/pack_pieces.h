// SPDX-License-Identifier: Apache-2.0
// Finds the outputs of a weight in the pieces that it is packed from.
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Consecutive outputs of one panel that are in the same piece.
struct OutputRun {
  const PackPiece& piece;
  int64_t first;  // index of the first output in the piece
  int64_t lane;   // index of the first output in the panel
  int64_t count;
};

// Calls visit(run) for the runs that form outputs [first, first + count) of the pieces.
template <class Visit>
void for_each_output_run(const PackPieces& pieces, int64_t first, int64_t count, const Visit& visit) {
  int64_t begin = 0, lane = 0;
  for (const PackPiece* piece = pieces.data; count > 0; begin += piece->count, ++piece) {
    const int64_t skipped = first - begin;
    if (skipped >= piece->count) continue;
    const int64_t taken = smaller(piece->count - skipped, count);
    visit(OutputRun{*piece, skipped, lane, taken});
    first += taken, lane += taken, count -= taken;
  }
}

// Sets rows[lane] to the weights [k] of outputs [first, first + count). Outputs stored as columns are copied to rows of
// `transposed` [16][k].
[[maybe_unused]] void panel_row_pointers(const PackPieces& pieces, int64_t first, int64_t count, int64_t k,
                                         uint16_t* transposed, const uint16_t** rows) {
  constexpr int64_t strip = 32;
  for_each_output_run(pieces, first, count, [&](const OutputRun& run) {
    const auto* data = static_cast<const uint16_t*>(run.piece.data);
    const int64_t stride = run.piece.stride;
    for (int64_t i = 0; i < run.count; ++i)
      rows[run.lane + i] = run.piece.is_transposed ? transposed + (run.lane + i) * k : data + (run.first + i) * stride;
    if (!run.piece.is_transposed) return;
    for (int64_t begin = 0; begin < k; begin += strip)
      for (int64_t i = 0; i < run.count; ++i)
        for (int64_t row = begin; row < smaller(begin + strip, k); ++row)
          transposed[(run.lane + i) * k + row] = data[row * stride + run.first + i];
  });
}

}  // namespace
}  // namespace FD_ISA
}  // namespace fd
