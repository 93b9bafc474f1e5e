// SPDX-License-Identifier: Apache-2.0
// The C ABI that unpacks codes from words and transposes them to [outputs, inputs]. All threads take part.
#include "host/code_words.h"

#include <algorithm>
#include <cstring>

#include "common/export.h"
#include "common/threads.h"

namespace fd::codes {
namespace {

constexpr int kWordBits = 32;
constexpr int kTileRows = 64;                                // words of a column that are transposed at a time
constexpr int kTileColumns = 16;                             // words of a row that are read at a time: a cache line
constexpr int kAwqShifts[] = {0, 16, 4, 20, 8, 24, 12, 28};  // of the outputs of a word

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Some words, transposed: a row holds the words of a column.
struct Tile {
  uint32_t words[kTileColumns][kTileRows] = {};

  void read(const CodeWords& from, const Range& rows, const Range& columns) {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      for (int64_t column = columns.begin; column < columns.end; ++column)
        words[column - columns.begin][row - rows.begin] = from.data[row * from.row_words + column];
  }
};

// Calls visit(range) for ranges of up to `size` in [begin, end).
template <class Visit>
void for_ranges(const Range& whole, int64_t size, const Visit& visit) {
  for (int64_t begin = whole.begin; begin < whole.end; begin += size)
    visit(Range{begin, std::min(whole.end, begin + size)});
}

// Unpacks words of four bits along the inputs: a word becomes eight bytes.
void spread_nibbles(const uint32_t* words, int64_t num_words, uint8_t* to) {
  for (int64_t i = 0; i < num_words; ++i) {
    uint64_t bytes = words[i];
    bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
    bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
    bytes = (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0fu;
    std::memcpy(to + 8 * i, &bytes, 8);
  }
}

// Writes the codes of a range of outputs, [outputs, inputs], of words along the inputs.
void unpack_along_inputs(const CodeWords& from, const Range& outputs, uint8_t* to) {
  const int64_t per_word = kWordBits / from.num_bits;
  Tile tile;
  for_ranges({0, from.num_inputs / per_word}, kTileRows, [&](const Range& rows) {
    tile.read(from, rows, outputs);
    for (int64_t output = 0; output < outputs.size(); ++output) {
      uint8_t* row = to + output * from.num_inputs + rows.begin * per_word;
      if (from.num_bits == 4) {
        spread_nibbles(tile.words[output], rows.size(), row);
      } else {
        std::memcpy(row, tile.words[output], rows.size() * sizeof(uint32_t));
      }
    }
  });
}

// Writes the codes at `shift` in words. Bytes are taken from the words first, since most outputs share a byte with
// another one, and the compiler makes vectors of 16 bytes.
void unpack_column(const uint8_t (*bytes)[kTileRows], int64_t num_words, int64_t num_bits, int shift, uint8_t* to) {
  const uint8_t* from = bytes[shift / 8];
  if (num_bits == 8) {
    std::memcpy(to, from, num_words);
  } else if (shift % 8 == 0) {
    for (int64_t i = 0; i < num_words; ++i) to[i] = from[i] & 15;
  } else {
    for (int64_t i = 0; i < num_words; ++i) to[i] = from[i] >> 4;
  }
}

// Writes the codes of a range of outputs, which begins at a word, of words along the outputs.
void unpack_along_outputs(const CodeWords& from, const Range& outputs, uint8_t* to) {
  const int64_t per_word = kWordBits / from.num_bits;
  const Range columns{outputs.begin / per_word, outputs.end / per_word};
  Tile tile;
  for_ranges({0, from.num_inputs}, kTileRows, [&](const Range& rows) {
    tile.read(from, rows, columns);
    for (int64_t column = 0; column < columns.size(); ++column) {
      uint8_t bytes[4][kTileRows];
      for (int byte = 0; byte < 4; ++byte)
        for (int i = 0; i < kTileRows; ++i) bytes[byte][i] = static_cast<uint8_t>(tile.words[column][i] >> 8 * byte);
      for (int64_t place = 0; place < per_word; ++place) {
        const auto shift = static_cast<int>(from.order == kAwq ? kAwqShifts[place] : place * from.num_bits);
        uint8_t* row = to + (column * per_word + place) * from.num_inputs + rows.begin;
        unpack_column(bytes, rows.size(), from.num_bits, shift, row);
      }
    }
  });
}

// Writes the codes of all outputs, on all threads.
void unpack(const CodeWords& from, uint8_t added, uint8_t* codes) {
  const bool is_along_inputs = from.order == kAlongInputs;
  const int64_t size = is_along_inputs ? kTileColumns : kTileColumns * (kWordBits / from.num_bits);
  parallel_for((from.num_outputs + size - 1) / size, true, [&](int64_t index) {
    const Range outputs{index * size, std::min(from.num_outputs, (index + 1) * size)};
    uint8_t* const begin = codes + outputs.begin * from.num_inputs;
    (is_along_inputs ? unpack_along_inputs : unpack_along_outputs)(from, outputs, begin);
    if (added != 0)
      std::for_each(begin, begin + outputs.size() * from.num_inputs, [=](uint8_t& code) { code += added; });
  });
}

}  // namespace
}  // namespace fd::codes

// Writes the codes [outputs, inputs] of words, to which `added` is added as unsigned bytes.
FD_EXPORT void fd_words_unpack(const fd::codes::CodeWords* from, int64_t added, uint8_t* codes) {
  fd::codes::unpack(*from, static_cast<uint8_t>(added), codes);
}
