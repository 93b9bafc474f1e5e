// SPDX-License-Identifier: Apache-2.0
// Tiles in shared memory: how kernels fetch and multiply them. Nothing else calls the asynchronous copies,
// `load_matrix_x4` or the products of `device.h`, so that another family of instructions can replace these two classes.
//
//   struct Stage { Tile<16, 128> weights; Tile<8, 128> rows; };      // in the kernel's struct of shared memory
//   TilePipeline<Stage, 4, kThreads> pipeline(shared.stages);        // Stage stages[4]
//   TileProduct<float, 1, 1> product;                                // sums of 16 x 8 outputs in registers
//   Pipeline::Source<Tile<16, 128>> weights(...), ...;               // where the rows of a matrix lie
//   pipeline.run(num_stages,
//     [&](Stage& stage, int i) {                                     // issue: copies of stage i
//       weights.copy(stage.weights, 128 * i);
//       rows.copy(stage.rows, 128 * i);
//     },
//     [&](Stage& stage, int i) { product.multiply<4>(stage.weights, 0, stage.rows, 0); });  // 4 steps of 32 bytes
//
// `product.sums[m][n][i]` is output (16 m + product.row(i), 8 n + product.column(i)); every output is one chain of
// instructions in the order of K. Memory that a pipeline has used can be used otherwise after `pipeline.sync()`.
#pragma once

#include "gpu_ops/device.h"

namespace fd::gpu {

// Rows of kBytes bytes in panels of 128, of which 16-byte chunk c of row r lies at c ^ (r % 8), so that the eight rows
// of a matrix lie in different banks.
template <int kNumRows, int kBytes>
struct alignas(128) Tile {
  static_assert(kBytes % 16 == 0);
  static constexpr int kRows = kNumRows, kChunks = kBytes / 16, kPanels = (kBytes + 127) / 128;

  uint8_t bytes[kPanels][kRows][128];

  FD_DEVICE uint8_t* chunk(unsigned row, unsigned c) { return &bytes[0][0][0] + offset(row, c); }
  FD_DEVICE const uint8_t* chunk(unsigned row, unsigned c) const { return &bytes[0][0][0] + offset(row, c); }

  // Unsigned, because signed remainders take the compiler more instructions.
  FD_DEVICE static unsigned offset(unsigned row, unsigned c) {
    return (c / 8 * kRows + row) * 128 + ((c ^ row) % 8) * 16;
  }
};

// Stages of tiles that asynchronous copies fill while others are used. kThreads threads take part: a block, or a warp
// with 32; two pipelines of the same threads must not be under way at once.
template <class Stage, int kStages, int kThreads>
class TilePipeline {
 public:
  static_assert(kStages >= 2 && kThreads % static_cast<int>(kWarpSize) == 0);

  explicit FD_DEVICE TilePipeline(Stage* stages) : stages_(stages) {}

  // Issues stages 0 .. count - 1 by issue(Stage&, index) and uses each by use(Stage&, index), in order.
  template <class Issue, class Use>
  FD_DEVICE void run(int count, Issue issue, Use use) {
    prefetch(count, issue);
    consume(count, issue, use);
  }
  // The same in two steps: what lies between them runs while the first stages are copied.
  template <class Issue>
  FD_DEVICE void prefetch(int count, Issue issue) {
    sync();
    next_ = current_ = 0;
    FD_UNROLL
    for (int i = 0; i < kStages - 1; ++i) this->issue(issue, i, count);
  }
  template <class Issue, class Use>
  FD_DEVICE void consume(int count, Issue issue, Use use) {
    for (int i = 0; i < count; ++i) {
      Stage& stage = wait();
      this->issue(issue, i + kStages - 1, count);
      use(stage, i);
      release();
    }
  }

  // What `issue` copies into one tile of each stage, from rows in global memory: groups of kGroupRows rows `stride`
  // bytes apart, and groups `group_stride` bytes apart. A thread's chunks have the same number in rows row(),
  // row() + kRowStep, ..
  template <class AnyTile, int kGroupRows = AnyTile::kRows>
  class Source {
   public:
    FD_DEVICE static int row() { return static_cast<int>(thread() / AnyTile::kChunks); }
    FD_DEVICE static int chunk() { return static_cast<int>(thread() % AnyTile::kChunks); }

    // first: this thread's chunk of row() in the first stage; rows from num_rows on are zeros.
    FD_DEVICE Source(const void* first, int64_t stride, int num_rows, int64_t group_stride = 0)
        : first_(static_cast<const uint8_t*>(first)),
          stride_(stride),
          group_stride_(group_stride),
          num_rows_(num_rows - row()) {}

    // Copies the chunks `distance` bytes behind those of the first stage, or zeros.
    FD_DEVICE void copy(AnyTile& tile, int64_t distance, bool exists = true) const {
      const uint8_t* from = first_ + distance;
      const int num_rows = exists ? num_rows_ : 0;
      FD_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        constexpr int kPeriod = kRowStep < 8 ? 8 / kRowStep : 1;  // copies after which a chunk is where it was in a row
        if (kCopies * kRowStep > AnyTile::kRows && row() + i * kRowStep >= AnyTile::kRows) continue;
        uint8_t* to = tile.chunk(row() + i % kPeriod * kRowStep, chunk()) + i / kPeriod * kPeriod * kRowStep * 128;
        copy_async16(to, from + row_distance(i * kRowStep), i * kRowStep < num_rows);
      }
    }

   private:
    static_assert(kThreads % AnyTile::kChunks == 0);
    static constexpr int kRowStep = kThreads / AnyTile::kChunks;
    static constexpr int kCopies = (AnyTile::kRows + kRowStep - 1) / kRowStep;
    static_assert(kRowStep % kGroupRows == 0 || kGroupRows % kRowStep == 0);

    // Bytes from a thread's first row to the one `rows` behind it.
    FD_DEVICE int64_t row_distance(int rows) const {
      return rows / kGroupRows * group_stride_ + rows % kGroupRows * stride_;
    }

    const uint8_t* first_;
    int64_t stride_, group_stride_;
    int num_rows_;
  };

  // The parts of `run`, for other loops. kStages - 1 stages are issued first; then each is waited for, the next one
  // issued into the stage that was released before (none if index >= count), and the stage used and released.
  template <class Issue>
  FD_DEVICE void issue(Issue issue, int index, int count) {
    if (index < count) issue(stages_[next_], index);
    copy_async_commit();  // an empty group too, so that a wait always has the same meaning
    next_ = next_ + 1 == kStages ? 0 : next_ + 1;
  }
  FD_DEVICE Stage& wait() {
    copy_async_wait<kStages - 2>();
    sync();
    Stage& stage = stages_[current_];
    current_ = current_ + 1 == kStages ? 0 : current_ + 1;
    return stage;
  }
  // The barrier in the next `wait` orders what this thread has read before what is copied over it.
  FD_DEVICE void release() {}

  // A barrier of the threads that take part.
  FD_DEVICE static void sync() {
    if constexpr (kIsWarp) {
      sync_warp();
    } else {
      sync_block();
    }
  }
  // This thread's number among them.
  FD_DEVICE static unsigned thread() { return kIsWarp ? lane_index() : thread_index(); }

  // Copies one chunk of each of kRows rows, `stride` bytes apart, in `issue`; those from num_rows on are zeros.
  template <int kRows>
  FD_DEVICE static void copy_chunks(Bytes16 (&to)[kRows], const void* from, int64_t stride, int num_rows) {
    for (int i = static_cast<int>(thread()); i < kRows; i += kThreads)
      copy_async16(&to[i], static_cast<const uint8_t*>(from) + i * stride, i < num_rows);
  }

  // Copies a tile in `issue` whose rows lie one after another in groups of kGroupRows: source(group, offset) is the
  // address of a byte of a group in global memory. Rows from num_rows on are filled with zeros.
  template <int kGroupRows, class AnyTile, class Source>
  FD_DEVICE static void copy_groups(AnyTile& tile, int num_rows, Source source) {
    constexpr int kRows = AnyTile::kRows, kChunks = AnyTile::kChunks, kMostRows = kThreads / kChunks;
    constexpr int kStep = kMostRows < kRows ? kMostRows : kRows;  // rows that the threads copy at a time
    constexpr int kGroupStep = kStep > kGroupRows ? kStep : kGroupRows;
    static_assert(kThreads % kChunks == 0 && (kStep & (kStep - 1)) == 0 && kGroupStep % kStep == 0 &&
                  kRows % kGroupStep == 0);
    const unsigned first = thread() / kChunks, chunk = thread() % kChunks;
    if (kMostRows > kRows && first >= kRows) return;
    const unsigned group = kStep > kGroupRows ? first / kGroupRows : 0;
    const unsigned offset = (first - group * kGroupRows) * (16 * kChunks) + 16 * chunk;
    const uint8_t* groups[kRows / kGroupStep];
    FD_UNROLL
    for (int i = 0; i < kRows / kGroupStep; ++i) groups[i] = source(group + i * kGroupStep / kGroupRows, offset);
    FD_UNROLL
    for (int row = 0; row < kRows; row += kStep) {
      uint8_t* to = tile.chunk(first, chunk ^ row % 8) + row * 128;  // where chunk(first + row, chunk) is
      const uint8_t* from = groups[row / kGroupStep] + row % kGroupStep * (16 * kChunks);
      copy_async16(to, from, row < num_rows - static_cast<int>(first));
    }
  }

 private:
  static constexpr bool kIsWarp = kThreads == static_cast<int>(kWarpSize);

  Stage* stages_;
  int next_ = 0, current_ = 0;
};

// Sums of 16 kMTiles x 8 kNTiles outputs, which a warp holds in registers: bfloat16 products in float, or products of
// signed bytes in int32_t. A step multiplies 32 bytes of each row (16 or 32 elements).
template <class Sum, int kMTiles, int kNTiles>
struct TileProduct {
  static_assert(std::is_same_v<Sum, float> || std::is_same_v<Sum, int32_t>);
  static_assert(kNTiles == 1 || kNTiles % 2 == 0);

  struct A {  // 16 rows of a step
    uint32_t word[4];
  };
  struct B {  // 8 rows of a step
    uint32_t word[2];
  };

  Sum sums[kMTiles][kNTiles][4];

  FD_DEVICE TileProduct() { clear(); }

  FD_DEVICE static int row(int i) { return static_cast<int>(lane_index() / 4) + i / 2 * 8; }
  FD_DEVICE static int column(int i) { return static_cast<int>(lane_index() % 4) * 2 + i % 2; }

  FD_DEVICE void clear() {
    FD_UNROLL
    for (int m = 0; m < kMTiles; ++m) FD_UNROLL
    for (int n = 0; n < kNTiles; ++n) FD_UNROLL
    for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
  }

  // Adds the products of rows a_row .. of `a` and b_row .. of `b` over kSteps steps from 16-byte chunk `chunk`. What a
  // step multiplies is loaded before the products of the step before it, which hide how long that takes.
  template <int kSteps, class TileA, class TileB>
  FD_DEVICE void multiply(const TileA& a, int a_row, const TileB& b, int b_row, int chunk = 0) {
    A rows[2][kMTiles];
    B columns[kNTiles == 1 ? kSteps : 2][kNTiles];
    const auto load = [&](int step) {
      FD_UNROLL
      for (int m = 0; m < kMTiles; ++m) rows[step % 2][m] = load_a(a, a_row + 16 * m, chunk + 2 * step);
      if constexpr (kNTiles == 1) {
        if (step % 2 == 0) load_b_steps(b, b_row, chunk + 2 * step, columns[step][0], columns[step + 1][0]);
      } else {
        FD_UNROLL
        for (int n = 0; n < kNTiles; n += 2)
          load_b(b, b_row + 8 * n, chunk + 2 * step, columns[step % 2][n], columns[step % 2][n + 1]);
      }
    };
    static_assert(kNTiles > 1 || kSteps % 2 == 0);
    load(0);
    FD_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 < kSteps) load(step + 1);
      FD_UNROLL
      for (int m = 0; m < kMTiles; ++m) FD_UNROLL
      for (int n = 0; n < kNTiles; ++n) multiply(m, n, rows[step % 2][m], columns[kNTiles == 1 ? step : step % 2][n]);
    }
  }

  // sums[m][n] += a b.
  FD_DEVICE void multiply(int m, int n, const A& a, const B& b) {
    if constexpr (std::is_same_v<Sum, float>) {
      mma_bf16(sums[m][n], a.word, b.word);
    } else {
      mma_s8(sums[m][n], a.word, b.word);
    }
  }

  // sums += a b of bytes, which are unsigned in a if kIsUnsigned, for one tile of 16 x 8 outputs.
  template <bool kIsUnsigned>
  FD_DEVICE static void multiply_bytes(int32_t (&sums)[4], const A& a, const B& b) {
    if constexpr (kIsUnsigned) {
      mma_u8_s8(sums, a.word, b.word);
    } else {
      mma_s8(sums, a.word, b.word);
    }
  }

  // Loads rows row .. row + 15 of a step that begins at 16-byte chunk `chunk`.
  template <class TileA>
  FD_DEVICE static A load_a(const TileA& tile, int row, int chunk) {
    const int lane = static_cast<int>(lane_index());
    return a_of(load_matrix_x4(tile.chunk(row + lane % 16, chunk + lane / 16)));
  }
  // The same of the transposed tile (bfloat16): K runs over its rows row .. row + 15, the 16 rows of A over the 16
  // elements from `chunk`.
  template <class TileA>
  FD_DEVICE static A load_a_transposed(const TileA& tile, int row, int chunk) {
    const int lane = static_cast<int>(lane_index());
    return a_of(load_matrix_x4_transposed(tile.chunk(row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2)));
  }
  // Loads rows row .. row + 7 of a step, and row + 8 .. row + 15.
  template <class TileB>
  FD_DEVICE static void load_b(const TileB& tile, int row, int chunk, B& first, B& second) {
    const int lane = static_cast<int>(lane_index());
    b_of(load_matrix_x4(tile.chunk(row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2)), first, second);
  }
  // Loads rows row .. row + 7 of two steps.
  template <class TileB>
  FD_DEVICE static void load_b_steps(const TileB& tile, int row, int chunk, B& first, B& second) {
    const int lane = static_cast<int>(lane_index());
    b_of(load_matrix_x4(tile.chunk(row + lane % 8, chunk + lane / 8)), first, second);
  }
  // Of the transposed tile (bfloat16): K runs over its rows row .. row + 15, the 8 rows of `first` over the elements of
  // `chunk`, those of `second` over the next chunk.
  template <class TileB>
  FD_DEVICE static void load_b_transposed(const TileB& tile, int row, int chunk, B& first, B& second) {
    const int lane = static_cast<int>(lane_index());
    b_of(load_matrix_x4_transposed(tile.chunk(row + lane % 16, chunk + lane / 16)), first, second);
  }
  // Of the transposed tile: two steps, the first over its rows row .. row + 15, the second over the 16 rows after them.
  template <class TileB>
  FD_DEVICE static void load_b_steps_transposed(const TileB& tile, int row, int chunk, B (&steps)[2]) {
    const int lane = static_cast<int>(lane_index());
    b_of(load_matrix_x4_transposed(tile.chunk(row + lane, chunk)), steps[0], steps[1]);
  }

 private:
  FD_DEVICE static A a_of(const Matrices4& m) { return {{m.word[0], m.word[1], m.word[2], m.word[3]}}; }
  FD_DEVICE static void b_of(const Matrices4& m, B& first, B& second) {
    first = {{m.word[0], m.word[1]}};
    second = {{m.word[2], m.word[3]}};
  }
};

}  // namespace fd::gpu
