// SPDX-License-Identifier: Apache-2.0
// The products of all heads of a row, each with a matrix of its own. A head is multiplied with the kernels of linear
// layers and has the bits of one.
#include "cpu_ops/families.h"
#include "cpu_ops/linear_slice.h"

namespace fd {
namespace FD_ISA {
namespace {

// Rows of an item. A head's matrix stays in the caches from one item to the next, and so do the prepared rows.
constexpr int64_t kItemRows = kTileBlocks * kColumnRows;

// Returns the product of a head for the rows from kItemRows * chunk on.
Product head_product(const ProjectHeadsArgs& a, int64_t head, int64_t chunk) {
  const PackedMatrices& m = a.matrices;
  const int64_t row = chunk * kItemRows, left = a.rows - row, out_stride = m.count * m.outputs;
  const auto* x = static_cast<const char*>(a.x) + (row * a.x_stride + head * a.head_stride) * float_size(m.dtype);
  auto* out = static_cast<char*>(a.out) + (row * out_stride + head * m.outputs) * float_size(m.dtype);
  Product p = product_of(m, m.packed + head * m.matrix_bytes(), x, out, left < kItemRows ? left : kItemRows);
  p.x_stride = a.x_stride, p.out_stride = out_stride;
  return p;
}

}  // namespace

void project_heads(const ProjectHeadsArgs& a) {
  if (a.rows == 0) return;
  const PackedMatrices& m = a.matrices;
  const int64_t panels = num_panels(m.outputs, false), chunks = (a.rows + kItemRows - 1) / kItemRows;
  const int64_t tile_panels = panels_per_tile(m.count * panels, 1), tiles = (panels + tile_panels - 1) / tile_panels;
  const bool parallel = a.rows * m.count * panels * kPanel * m.inputs >= kMinParallelProducts;
  for_each_in_ranges(
      m.count * chunks * tiles, parallel, [](int64_t) { return CurrentProduct(); },
      [&](CurrentProduct& current, int64_t item) {
        const int64_t index = item / tiles, first = item % tiles * tile_panels;
        if (current.index != index) {
          current.index = index;
          current.product = head_product(a, index / chunks, index % chunks);
          current.rows = prepare(current.product);
        }
        multiply(current.product, current.rows, first, first + tile_panels < panels ? first + tile_panels : panels);
      });
}

}  // namespace FD_ISA
}  // namespace fd
