// SPDX-License-Identifier: Apache-2.0
// Types of GGUF tensors that store every value as a number of its own.
#pragma once

#include "host/ggml_numbers.h"

namespace fd::ggml {

struct F32 {
  static constexpr int kTypeId = 0, kBytes = 4;
  static float value(const uint8_t* from) { return load<float>(from); }
};

struct F16 {
  static constexpr int kTypeId = 1, kBytes = 2;
  static float value(const uint8_t* from) { return half_at(from); }
};

struct F64 {
  static constexpr int kTypeId = 28, kBytes = 8;
  static float value(const uint8_t* from) { return static_cast<float>(load<double>(from)); }
};

struct BF16 {
  static constexpr int kTypeId = 30, kBytes = 2;
  static float value(const uint8_t* from) { return float_of_bfloat16(load<uint16_t>(from)); }
};

}  // namespace fd::ggml
