// SPDX-License-Identifier: Apache-2.0
// Checks of the Paddle bindings. An invalid argument raises "<operator>: <argument>: expected <what>, got <what>" as
// Paddle's InvalidArgument, which Python receives as ValueError. Any other exception from an operator ends the process.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "cpu_ops/kernels.h"
#include "paddle/common/enforce.h"
#include "paddle/phi/api/ext/op_meta_info.h"

namespace fd {

[[noreturn]] inline void raise_invalid(const char* op, const char* argument, const std::string& expected,
                                       const std::string& got) {
  PADDLE_THROW(common::errors::InvalidArgument("%s: %s: expected %s, got %s", op, argument, expected, got));
}

inline void require(bool has_capacity, const char* op, const char* argument, const char* expected, int64_t got) {
  if (__builtin_expect(!has_capacity, 0)) raise_invalid(op, argument, expected, std::to_string(got));
}

inline std::string shape_text(const paddle::Tensor& tensor) {
  std::string text = "[";
  for (int64_t size : tensor.shape()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// One tensor argument and its checks. A size of -1 matches any size.
struct Argument {
  const char* op;
  const char* name;
  const paddle::Tensor& tensor;

  const Argument& has_dtype(paddle::DataType dtype) const {
    if (__builtin_expect(tensor.dtype() != dtype, 0))
      raise_invalid(op, name, "dtype " + phi::DataTypeToString(dtype), phi::DataTypeToString(tensor.dtype()));
    return *this;
  }
  const Argument& has_shape(std::initializer_list<int64_t> sizes) const { return check(sizes, false); }
  // Does the same as has_shape, but the first axis may be longer than the first size.
  const Argument& has_capacity(std::initializer_list<int64_t> sizes) const { return check(sizes, true); }

  int64_t size(int axis) const { return tensor.dims()[axis]; }
  DType float_dtype() const {
    if (tensor.dtype() == paddle::DataType::BFLOAT16) return DType::kBfloat16;
    if (tensor.dtype() == paddle::DataType::FLOAT32) return DType::kFloat32;
    raise_invalid(op, name, "dtype bfloat16 or float32", phi::DataTypeToString(tensor.dtype()));
  }
  template <class T = void>
  T* data() const {
    return static_cast<T*>(const_cast<void*>(tensor.data()));
  }

 private:
  const Argument& check(std::initializer_list<int64_t> sizes, bool at_least) const {
    const auto& dims = tensor.dims();
    bool fits = dims.size() == static_cast<int>(sizes.size()) && tensor.is_cpu();
    int axis = 0;
    for (int64_t size : sizes) {
      if (!fits) break;
      fits = size < 0 || dims[axis] == size || (at_least && axis == 0 && dims[axis] > size);
      ++axis;
    }
    if (__builtin_expect(!fits, 0)) {
      std::string expected = at_least ? "a CPU tensor that holds [" : "a CPU tensor of [";
      const char* comma = "";
      for (int64_t size : sizes) {
        expected += comma + (size < 0 ? std::string("any") : std::to_string(size));
        comma = ", ";
      }
      raise_invalid(op, name, expected + "]", shape_text(tensor));
    }
    return *this;
  }
};

// Returns how a layer is quantized, given {index in QUANTIZATIONS, inputs of a group, whether groups have minimums}.
inline QuantizedForm quantized_form(const char* op, const std::vector<int64_t>& form) {
  const auto size = static_cast<int64_t>(form.size());
  require(size == 3, op, "form", "three numbers", size);
  require(form[0] >= 0 && form[0] <= static_cast<int64_t>(Quantization::kW4a8), op, "quantization", "0 to 3", form[0]);
  require(form[1] == 0 || form[1] == 32 || form[1] == 64 || form[1] == 128, op, "group_size", "0, 32, 64 or 128",
          form[1]);
  return {static_cast<Quantization>(form[0]), static_cast<int32_t>(form[1]), form[2] != 0};
}

// Returns the rows and sequences of a call over a paged cache.
inline PagedBatch paged_batch(const char* op, const paddle::Tensor& cu_seqlens_q, const paddle::Tensor& kv_lens,
                              const paddle::Tensor& block_tables, const paddle::Tensor& slot_mapping, int64_t num_rows,
                              int64_t num_seqs) {
  require(num_rows >= 0 && num_seqs >= 0, op, "num_rows", "counts of at least 0", num_rows < 0 ? num_rows : num_seqs);
  const auto ints = [op](const char* name, const paddle::Tensor& tensor, int64_t count) {
    return Argument{op, name, tensor}.has_dtype(paddle::DataType::INT32).has_capacity({count}).data<int32_t>();
  };
  const Argument table{op, "block_tables", block_tables};
  table.has_dtype(paddle::DataType::INT32).has_capacity({num_seqs, -1});
  return {ints("cu_seqlens_q", cu_seqlens_q, num_seqs + 1),
          ints("kv_lens", kv_lens, num_seqs),
          table.data<int32_t>(),
          ints("slot_mapping", slot_mapping, num_rows),
          num_rows,
          num_seqs,
          table.size(1)};
}

}  // namespace fd
