// SPDX-License-Identifier: Apache-2.0
// The C ABI that unpacks codes, widens them, and converts those whose groups no operator has. All threads take part.
#include "host/grouped_codes.h"

#include "common/export.h"
#include "common/threads.h"
#include "host/ggml_rows.h"

namespace fd {
namespace {

constexpr int64_t kTileValues = 1 << 16;  // are read in about the time that waking a thread takes
constexpr int64_t kChunk = 256;           // values that are computed before they are rounded

// Calls visit(row) for all rows, on all threads.
template <class Visit>
void for_rows(int64_t num_rows, int64_t num_inputs, const Visit& visit) {
  const int64_t size = std::max<int64_t>(1, kTileValues / std::max<int64_t>(1, num_inputs));
  parallel_for((num_rows + size - 1) / size, true, [&](int64_t tile) {
    for (int64_t row = tile * size; row < std::min(num_rows, (tile + 1) * size); ++row) visit(row);
  });
}

template <class Wide>
void widen(const GroupedCodes& from, Wide* wide) {
  for_rows(from.num_rows, from.num_inputs, [&](int64_t row) {
    for (int64_t begin = 0; begin < from.num_inputs; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, from.num_inputs);
      float values[kChunk];
      from.write_values(row, begin, end, values);
      for (int64_t i = begin; i < end; ++i) ggml::store(values[i - begin], wide + row * from.num_inputs + i);
    }
  });
}

void unpack_row(const uint8_t* packed, int64_t num_inputs, bool has_four_bits, uint8_t added, uint8_t* codes) {
  if (!has_four_bits) {
    for (int64_t i = 0; i < num_inputs; ++i) codes[i] = static_cast<uint8_t>(packed[i] + added);
    return;
  }
  for (int64_t i = 0; i < num_inputs / 2; ++i) {
    codes[2 * i] = static_cast<uint8_t>((packed[i] & 15) + added);
    codes[2 * i + 1] = static_cast<uint8_t>((packed[i] >> 4) + added);
  }
  if (num_inputs % 2 != 0) codes[num_inputs - 1] = static_cast<uint8_t>((packed[num_inputs / 2] & 15) + added);
}

}  // namespace
}  // namespace fd

using fd::GroupedCodes;

// Writes codes [rows, inputs] that are packed along the inputs, the first one in the lowest bits: 4 or 8 bits each, to
// which `added` is added as unsigned bytes. A row has `row_bytes`, of which the last ones may be unused.
FD_EXPORT void fd_codes_unpack(const uint8_t* packed, int64_t num_rows, int64_t row_bytes, int64_t num_inputs,
                               int64_t bits, int64_t added, uint8_t* codes) {
  fd::for_rows(num_rows, num_inputs, [&](int64_t row) {
    fd::unpack_row(packed + row * row_bytes, num_inputs, bits == 4, static_cast<uint8_t>(added),
                   codes + row * num_inputs);
  });
}

// Writes the weights [rows, inputs] as fp32, or as bf16 with one more rounding.
FD_EXPORT void fd_codes_widen(const GroupedCodes* from, void* wide, int64_t is_bfloat16) {
  if (is_bfloat16 != 0) {
    fd::widen(*from, static_cast<uint16_t*>(wide));
  } else {
    fd::widen(*from, static_cast<float*>(wide));
  }
}

// Writes codes of eight bits [rows, inputs] of the fp32 weights, and for each 32 inputs a scale in fp16.
FD_EXPORT void fd_codes_convert(const GroupedCodes* from, int8_t* codes, uint16_t* scales) {
  constexpr int64_t kGroup = fd::ggml::kGroup;
  const int64_t num_inputs = from->num_inputs, num_scales = (num_inputs + kGroup - 1) / kGroup;
  fd::for_rows(from->num_rows, num_inputs, [&](int64_t row) {
    for (int64_t group = 0; group < num_scales; ++group) {
      const int64_t begin = group * kGroup, end = std::min(begin + kGroup, num_inputs);
      float values[kGroup] = {};
      int8_t converted[kGroup];
      from->write_values(row, begin, end, values);
      fd::ggml::quantize_group(values, converted, scales + row * num_scales + group);
      std::copy(converted, converted + (end - begin), codes + row * num_inputs + begin);
    }
  });
}
