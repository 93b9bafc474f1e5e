// SPDX-License-Identifier: Apache-2.0
// The two products of a mixture of experts. Matrices are multiplied with the kernels of linear layers, so that an
// output depends on its row only; the outputs of a row's experts are added in ascending order of the experts.
#include <cstring>

#include "common/scratch.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_slice.h"

namespace fd {
namespace FD_ISA {
namespace {

// Returns the size and format of a shared expert's matrix, which has the format of the experts.
PackedMatrices resized(PackedMatrices m, int64_t outputs, int64_t inputs) {
  m.outputs = outputs, m.inputs = inputs;
  return m;
}

// An expert that has rows.
struct TouchedExpert {
  int64_t id, first_entry, rows;
};

struct TouchedExperts {
  TouchedExpert experts[kMaxExperts];
  int64_t count = 0;

  TouchedExperts(const int32_t* starts, int64_t num_experts) {
    for (int64_t e = 0; e < num_experts; ++e)
      if (starts[e + 1] > starts[e]) experts[count++] = {e, starts[e], starts[e + 1] - starts[e]};
  }
};

// Returns the rows [rows][inputs] of an expert: its only row in place, or copies of its rows.
const void* gather_rows(const ExpertsUpArgs& a, const TouchedExpert& expert) {
  const int64_t row_bytes = a.matrices.inputs * float_size(a.matrices.dtype);
  const auto* normed = static_cast<const char*>(a.normed);
  const int32_t* entries = a.entries + expert.first_entry;
  if (expert.rows == 1) return normed + entries[0] / a.num_chosen * row_bytes;
  auto* rows = static_cast<char*>(thread_scratch(static_cast<size_t>(expert.rows * row_bytes), Scratch::kExperts));
  for (int64_t i = 0; i < expert.rows; ++i)
    std::memcpy(rows + i * row_bytes, normed + entries[i] / a.num_chosen * row_bytes, static_cast<size_t>(row_bytes));
  return rows;
}

// The products of experts_up: one for each touched expert, then that of the shared expert.
Product up_product(const ExpertsUpArgs& a, const TouchedExperts& touched, int64_t index) {
  const PackedMatrices& m = a.matrices;
  if (index == touched.count)
    return product_of(resized(m, a.shared_outputs, m.inputs), a.shared, a.normed, a.shared_activated, a.rows);
  const TouchedExpert& expert = touched.experts[index];
  auto* out = static_cast<char*>(a.activated) + expert.first_entry * m.outputs * float_size(m.dtype);
  return product_of(m, m.packed + expert.id * m.matrix_bytes(), gather_rows(a, expert), out, expert.rows);
}

// Adds the outputs [rows][width] of an expert, times the weights of its entries, to `sums` [all rows][width].
void add_weighted(const ExpertsDownArgs& a, const TouchedExpert& expert, const float* outputs, int64_t width,
                  float* sums) {
  for (int64_t i = 0; i < expert.rows; ++i) {
    const int32_t entry = a.entries[expert.first_entry + i];
    const FP32Vec16 weight = splat(a.weights[entry]);
    float* sum = sums + entry / a.num_chosen * width;
    for (int64_t c = 0; c < width; c += kLanes)
      store(sum + c, fma(weight, load(outputs + i * width + c), load(sum + c)));
  }
}

// Columns [begin, begin + count) of the outputs. `width` is count rounded up to whole panels: the rows of sums have
// this length, and so have those of outputs, because packed matrices are padded with zeros.
struct Columns {
  int64_t begin, count, width;
};

// hidden = round(sums + shared outputs + hidden) in some columns.
template <class T>
void finish_rows(const ExpertsDownArgs& a, const Columns& columns, const float* sums, const float* shared,
                 int64_t shared_stride) {
  for (int64_t row = 0; row < a.rows; ++row) {
    T* hidden = static_cast<T*>(a.hidden) + row * a.matrices.outputs + columns.begin;
    for (int64_t c = 0; c < columns.count; c += kLanes) {
      const int lanes = static_cast<int>(columns.count - c < kLanes ? columns.count - c : kLanes);
      FP32Vec16 value = load(sums + row * columns.width + c);
      if (shared != nullptr) value = add(value, load_first(shared + row * shared_stride + c, lanes));
      value = add(value, load_first(hidden + c, lanes));
      lanes == kLanes ? store_result(hidden + c, value) : store_first(hidden + c, value, lanes);
    }
  }
}

// Computes some columns of all rows.
void down_columns(const ExpertsDownArgs& a, const TouchedExperts& touched, const Columns& columns) {
  const PackedMatrices& m = a.matrices;
  const int64_t first_panel = columns.begin / kPanel, panels = columns.width / kPanel;
  const auto size = static_cast<size_t>(a.rows * columns.width);
  auto* sums = static_cast<float*>(thread_scratch(2 * size * sizeof(float), Scratch::kExperts));
  float* outputs = sums + size;
  std::memset(sums, 0, size * sizeof(float));
  const auto compute = [&](const uint8_t* matrix, const void* x, int64_t rows, int64_t inputs) {
    const PackedMatrices part = resized(m, columns.width, inputs);
    Product p = product_of(part, matrix + first_panel * part.panel_bytes(), x, outputs, rows);
    p.out_dtype = DType::kFloat32;
    multiply(p, prepare(p), 0, panels);
  };
  for (int64_t i = 0; i < touched.count; ++i) {
    const TouchedExpert& expert = touched.experts[i];
    const auto* x = static_cast<const char*>(a.activated) + expert.first_entry * m.inputs * float_size(m.dtype);
    compute(m.packed + expert.id * m.matrix_bytes(), x, expert.rows, m.inputs);
    add_weighted(a, expert, outputs, columns.width, sums);
  }
  if (a.shared != nullptr) compute(a.shared, a.shared_activated, a.rows, a.shared_inputs);
  const float* shared = a.shared != nullptr       ? outputs
                        : a.shared_sum == nullptr ? nullptr
                                                  : a.shared_sum + columns.begin;
  const int64_t shared_stride = a.shared != nullptr ? columns.width : m.outputs;
  m.dtype == DType::kBfloat16 ? finish_rows<uint16_t>(a, columns, sums, shared, shared_stride)
                              : finish_rows<float>(a, columns, sums, shared, shared_stride);
}

}  // namespace

void experts_up(const ExpertsUpArgs& a) {
  if (a.rows == 0) return;
  const PackedMatrices& m = a.matrices;
  const TouchedExperts touched(a.starts, m.count);
  const int64_t panels = num_panels(m.outputs, true), shared_panels = num_panels(a.shared_outputs, true);
  const int64_t all_panels = touched.count * panels + (a.shared == nullptr ? 0 : shared_panels);
  const int64_t tile_panels = panels_per_tile(all_panels, 2);
  const int64_t tiles = (panels + tile_panels - 1) / tile_panels, routed_tiles = touched.count * tiles;
  const int64_t shared_tiles = a.shared == nullptr ? 0 : (shared_panels + tile_panels - 1) / tile_panels;
  const bool parallel = a.rows * a.num_chosen * panels * kPanel * m.inputs >= kMinParallelProducts;
  for_each_in_ranges(
      routed_tiles + shared_tiles, parallel, [](int64_t) { return CurrentProduct(); },
      [&](CurrentProduct& current, int64_t tile) {
        const bool is_shared = tile >= routed_tiles;
        const int64_t index = is_shared ? touched.count : tile / tiles;
        if (current.index != index) {
          current.index = index;
          current.product = up_product(a, touched, index);
          current.rows = prepare(current.product);
        }
        const int64_t first = (tile - index * tiles) * tile_panels, end = is_shared ? shared_panels : panels;
        multiply(current.product, current.rows, first, first + tile_panels < end ? first + tile_panels : end);
      });
}

// Returns the panels of an item of experts_down: two items per thread, because every item prepares all rows again and
// begins to read the matrix of every expert anew.
static int64_t down_panels(int64_t panels) {
  const int64_t each = panels / (2 * num_threads()) / kGroupPanels * kGroupPanels;
  return each < kGroupPanels ? panels_per_tile(panels, 1) : each;
}

void experts_down(const ExpertsDownArgs& a) {
  if (a.rows == 0) return;
  const PackedMatrices& m = a.matrices;
  const TouchedExperts touched(a.starts, m.count);
  const int64_t panels = num_panels(m.outputs, false), each = down_panels(panels);
  const bool parallel = a.rows * a.num_chosen * panels * kPanel * m.inputs >= kMinParallelProducts;
  for_each_in_ranges((panels + each - 1) / each, parallel, [&](int64_t tile) {
    const int64_t first = tile * each, count = first + each < panels ? each : panels - first;
    const int64_t begin = first * kPanel, left = m.outputs - begin;
    down_columns(a, touched, {begin, left < count * kPanel ? left : count * kPanel, count * kPanel});
  });
}

}  // namespace FD_ISA
}  // namespace fd
