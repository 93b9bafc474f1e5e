// SPDX-License-Identifier: Apache-2.0
// Weights as codes of eight bits with a scale, and perhaps a zero point, for each group of inputs of an output.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fd {

// A weight is (code - zero) * scale. The fields are in the order of fastdeploy/ops/grouped_codes.py.
struct GroupedCodes {
  const uint8_t* codes;   // [rows, inputs]
  const float* scales;    // [rows, groups]
  const float* zeros;     // as scales; null: 0
  const int32_t* groups;  // [inputs], to which group each input belongs
  int64_t num_rows, num_inputs, num_groups;
  int64_t is_signed;  // whether codes are signed bytes

  // Writes the weights of a row for the inputs [begin, end).
  void write_values(int64_t row, int64_t begin, int64_t end, float* values) const {
    if (is_signed != 0) {
      write_values_of(reinterpret_cast<const int8_t*>(codes), row, begin, end, values);
    } else {
      write_values_of(codes, row, begin, end, values);
    }
  }

 private:
  template <class Code>
  void write_values_of(const Code* all_codes, int64_t row, int64_t begin, int64_t end, float* values) const {
    const Code* row_codes = all_codes + row * num_inputs;
    while (begin < end) {  // for each run of inputs that share a scale
      const int32_t group = groups[begin];
      int64_t stop = begin + 1;
      while (stop < end && groups[stop] == group) ++stop;
      const int64_t index = row * num_groups + group;
      const float scale = scales[index], zero = zeros == nullptr ? 0.0f : zeros[index];
      for (int64_t i = begin; i < stop; ++i) *values++ = (static_cast<float>(row_codes[i]) - zero) * scale;
      begin = stop;
    }
  }
};

}  // namespace fd
