// SPDX-License-Identifier: Apache-2.0
// What the Paddle bindings share: a tensor argument that knows its operator and name, and refuses what does not fit in
// one sentence: "<operator>: <argument>: expected <what>, got <what>". It is thrown as Paddle's own InvalidArgument,
// which Python sees as ValueError; any other exception that leaves an operator would end the process.
#pragma once

#include <initializer_list>
#include <string>

#include "cpu_ops/kernels.h"
#include "paddle/common/enforce.h"
#include "paddle/phi/api/ext/op_meta_info.h"

namespace fd {

[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& expected,
                                const std::string& got) {
  PADDLE_THROW(common::errors::InvalidArgument("%s: %s: expected %s, got %s", op, argument, expected, got));
}

inline void require(bool holds, const char* op, const char* argument, const char* expected, int64_t got) {
  if (__builtin_expect(!holds, 0)) refuse(op, argument, expected, std::to_string(got));
}

inline std::string shape_text(const paddle::Tensor& tensor) {
  std::string text = "[";
  for (int64_t size : tensor.shape()) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// A checked view of one tensor argument. Sizes of -1 match anything; `at_least` bounds the first axis from below.
struct Argument {
  const char* op;
  const char* name;
  const paddle::Tensor& tensor;

  const Argument& is(paddle::DataType dtype) const {
    if (__builtin_expect(tensor.dtype() != dtype, 0))
      refuse(op, name, "dtype " + phi::DataTypeToString(dtype), phi::DataTypeToString(tensor.dtype()));
    return *this;
  }
  const Argument& shaped(std::initializer_list<int64_t> sizes) const { return check(sizes, false); }
  // As shaped, but the first axis may be longer than the first size.
  const Argument& holds(std::initializer_list<int64_t> sizes) const { return check(sizes, true); }

  int64_t size(int axis) const { return tensor.dims()[axis]; }
  DType real() const {
    if (tensor.dtype() == paddle::DataType::BFLOAT16) return DType::kBfloat16;
    if (tensor.dtype() == paddle::DataType::FLOAT32) return DType::kFloat32;
    refuse(op, name, "dtype bfloat16 or float32", phi::DataTypeToString(tensor.dtype()));
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
      refuse(op, name, expected + "]", shape_text(tensor));
    }
    return *this;
  }
};

}  // namespace fd
