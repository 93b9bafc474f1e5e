// SPDX-License-Identifier: Apache-2.0
// The C ABI that splits rows of GGUF tensors into codes, scales and minimums, widens them, and checks their scales.
// All threads take part. The caller has checked that the type is one of those below.
#include "host/ggml_blocks.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "common/export.h"
#include "common/threads.h"
#include "host/ggml_iq_types.h"
#include "host/ggml_rows.h"

namespace fd::ggml {
namespace {

constexpr int64_t kTileValues = 1 << 16;  // are read in about the time that waking a thread takes

template <class... Types>
struct TypeList {};
using BlockTypes = TypeList<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S,
                            IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M, TQ1_0, TQ2_0, MXFP4, NVFP4>;
using PlainTypes = TypeList<F32, F16, F64, BF16>;

// Calls visit(type) for the type of this number if the list has it.
template <class Visit, class... Types>
void visit_type(int64_t type_id, TypeList<Types...>, const Visit& visit) {
  (void)((Types::kTypeId == type_id && (visit(Types{}), true)) || ...);
}

// Calls visit(begin, end) for ranges of rows, on all threads.
template <class Visit>
void for_row_ranges(const StoredRows& from, const Visit& visit) {
  const int64_t size = std::max<int64_t>(1, kTileValues / std::max<int64_t>(1, from.num_inputs));
  parallel_for((from.num_rows + size - 1) / size, true,
               [&](int64_t tile) { visit(tile * size, std::min(from.num_rows, (tile + 1) * size)); });
}

// Calls visit(row) for all rows, on all threads.
template <class Visit>
void for_rows(const StoredRows& from, const Visit& visit) {
  for_row_ranges(from, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) visit(row);
  });
}

template <class Wide>
void widen(const StoredRows& from, Wide* wide) {
  visit_type(from.type_id, BlockTypes{}, [&](auto type) {
    using Type = decltype(type);
    for_rows(from, [&](int64_t row) {
      widen_row<Type>(from.row(row), from.num_inputs / Type::kValues, wide + row * from.num_inputs);
    });
  });
  visit_type(from.type_id, PlainTypes{}, [&](auto type) {
    for_rows(from, [&](int64_t row) {
      widen_plain_row<decltype(type)>(from.row(row), from.num_inputs, wide + row * from.num_inputs);
    });
  });
}

// Returns the first row for which is_bad(row) holds, or the number of rows.
template <class IsBad>
int64_t find_first(const StoredRows& from, const IsBad& is_bad) {
  std::atomic<int64_t> first{from.num_rows};
  for_row_ranges(from, [&](int64_t begin, int64_t end) {
    int64_t row = begin, known = first.load();
    while (row < std::min(end, known) && !is_bad(from.row(row))) ++row;
    if (row == end) return;
    while (row < known && !first.compare_exchange_weak(known, row)) {
    }
  });
  return first;
}

}  // namespace
}  // namespace fd::ggml

using fd::ggml::StoredRows;

// Returns null, or an error message if FD_NUM_THREADS is invalid. It must be called before any other function here.
FD_EXPORT const char* fd_num_threads_error() {
  static std::string error;
  try {
    fd::num_threads();
    return nullptr;
  } catch (const std::invalid_argument& e) {
    error = e.what();
    return error.c_str();
  }
}

// Writes codes [rows, inputs] of a type with blocks, and scales and minimums [rows, inputs / 32] in fp16; `minimums` is
// null for a type that has none after splitting.
FD_EXPORT void fd_ggml_split(const StoredRows* from, int8_t* codes, uint16_t* scales, uint16_t* minimums) {
  const int64_t num_groups = from->num_inputs / fd::ggml::kGroup;
  fd::ggml::visit_type(from->type_id, fd::ggml::BlockTypes{}, [&](auto type) {
    using Type = decltype(type);
    fd::ggml::for_rows(*from, [&](int64_t row) {
      uint16_t* row_minimums = minimums == nullptr ? nullptr : minimums + row * num_groups;
      fd::ggml::split_row<Type>(from->row(row), from->num_inputs / Type::kValues,
                                {codes + row * from->num_inputs, scales + row * num_groups, row_minimums});
    });
  });
}

// Writes the values [rows, inputs] as fp32, or as bf16.
FD_EXPORT void fd_ggml_widen(const StoredRows* from, void* wide, int64_t is_bfloat16) {
  if (is_bfloat16 != 0) {
    fd::ggml::widen(*from, static_cast<uint16_t*>(wide));
  } else {
    fd::ggml::widen(*from, static_cast<float*>(wide));
  }
}

// Returns the index of the first row with a scale, a minimum or a plain value that is NaN or infinite in fp32; the
// number of rows if there is none.
FD_EXPORT int64_t fd_ggml_find_bad_scale(const StoredRows* from) {
  int64_t found = from->num_rows;
  fd::ggml::visit_type(from->type_id, fd::ggml::BlockTypes{}, [&](auto type) {
    using Type = decltype(type);
    found = fd::ggml::find_first(*from, [&](const uint8_t* row) {
      return fd::ggml::has_bad_scale<Type>(row, from->num_inputs / Type::kValues);
    });
  });
  fd::ggml::visit_type(from->type_id, fd::ggml::PlainTypes{}, [&](auto type) {
    found = fd::ggml::find_first(
        *from, [&](const uint8_t* row) { return fd::ggml::has_bad_value<decltype(type)>(row, from->num_inputs); });
  });
  return found;
}
