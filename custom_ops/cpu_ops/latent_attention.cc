// SPDX-License-Identifier: Apache-2.0
// Latent attention over a paged cache for any mix of prefill, decode and verification rows, in the absorbed form for
// all of them. As in attention.cc, the result of a row depends on absolute positions only: one softmax per split of 256
// positions, and the partial results of splits merged in order.
#include "cpu_ops/latent_attention.h"

#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/latent_tile.h"
#include "cpu_ops/linear_tiles.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kLatentTaskRows = 64;  // of PlanShape; rows of one task are whole panels where possible
constexpr int64_t kMaxPanels = kLatentTaskRows / kLanes;

// Writes all new rows to the cache.
template <class T>
void write_latents(const LatentProblem<T>& p) {
  parallel_for(p.a.rows, p.a.rows * p.width >= kMinParallelNormElements, [&](int64_t row) { write_latent(p, row); });
}

// The tiles of a split, each sixteen contiguous rows.
template <class T>
struct LatentSplit {
  int64_t start, visible, num_tiles;  // visible: positions that some row of the task attends to
  const T* tiles[kTilesPerSplit];
};

// The rows of a task in panels.
template <class T>
struct LatentRows : TaskStates<T, kLatentTaskRows> {
  int64_t last_visible[kLatentTaskRows];
  LatentPanel panels[kMaxPanels];
  LatentScratch<T> scratch;

  int64_t num_panels() const { return (this->count + kLanes - 1) / kLanes; }
  int64_t end_position() const { return last_visible[this->count - 1] + 1; }
};

// Calls body(RowCount<rows>()) for the smallest number of rows of a product that holds `rows`.
template <class Body>
FD_INLINE void dispatch_block(int64_t rows, Body&& body) {
  if constexpr (kBlockRows == kLanes) {
    if (rows <= kLanes / 4) return body(RowCount<kLanes / 4>());
    if (rows <= kLanes / 2) return body(RowCount<kLanes / 2>());
    if (rows <= kLanes * 3 / 4) return body(RowCount<kLanes * 3 / 4>());
  }
  body(RowCount<kBlockRows>());
}

// Runs the tasks of the plan.
template <class T>
class AttendLatent {
 public:
  AttendLatent(const LatentProblem<T>& problem, const AttentionPlan& plan)
      : p_(problem), plan_(plan), results_(problem, plan, 1) {}

  void run(bool parallel) const {
    for_each_in_ranges(plan_.num_tasks, parallel, [&](int64_t task) { run_task(plan_.tasks[task]); });
  }

 private:
  void run_task(const Task& task) const {
    LatentRows<T> rows;
    rows.scratch = allocate();
    rows.merges = results_.can_merge(task, 0);
    const int64_t seq = results_.query_tile_at(task.begin).seq;
    gather_rows(task, rows);
    const int64_t end = rows.end_position();
    LatentSplit<T> now = locate_split(seq, task.first_split, end);
    for (int64_t split = task.first_split; split < task.last_split; ++split) {
      const bool more = split + 1 < task.last_split;
      const LatentSplit<T> next = more ? locate_split(seq, split + 1, end) : LatentSplit<T>{};
      attend(rows, now, next, split == task.first_split ? 2 : kTilesPerSplit / 2);
      now = next;
    }
    results_.finish(task, 0, rows);
  }

  int64_t state_floats() const { return kLatentTaskRows * results_.state_floats(); }

  LatentScratch<T> allocate() const {
    const int64_t queries = kLatentTaskRows * p_.width * static_cast<int64_t>(sizeof(T));
    const int64_t values = p_.padded_value_dim() / kLanes * kValueStride<T> * static_cast<int64_t>(sizeof(T));
    const int64_t units = kTilePositions * kTileStride<T> * static_cast<int64_t>(sizeof(RowUnit<T>));
    const int64_t panel = kLanes * p_.width * static_cast<int64_t>(sizeof(T));  // gather_rows
    const int64_t all_scores = kLatentTaskRows * kSplit * static_cast<int64_t>(sizeof(float));
    const int64_t scores = all_scores > panel ? all_scores : panel;
    const int64_t states = state_floats() * static_cast<int64_t>(sizeof(float));
    char* at = static_cast<char*>(
        thread_scratch(static_cast<size_t>(states + queries + values + units + scores), Scratch::kTile));
    const auto take = [&at](int64_t bytes) {
      char* taken = at;
      at += bytes;
      return taken;
    };
    LatentScratch<T> scratch;
    scratch.states = reinterpret_cast<float*>(take(states));
    scratch.queries = reinterpret_cast<T*>(take(queries));
    scratch.values = reinterpret_cast<T*>(take(values));
    scratch.units = reinterpret_cast<RowUnit<T>*>(take(units));
    scratch.scores = reinterpret_cast<float*>(take(scores));
    return scratch;
  }

  // Lists the rows of a task, and packs their queries.
  void gather_rows(const Task& task, LatentRows<T>& rows) const {
    T* queries = reinterpret_cast<T*>(rows.scratch.scores);  // of one panel, [kLanes][width], until it is packed
    for (int64_t m = task.begin; m < task.end; ++m) {
      const QueryTile& query_tile = results_.query_tile_at(m);
      for (int64_t i = 0; i < query_tile.count; ++i) {
        const int64_t at = rows.count++, row = query_tile.first + i, lane = at % kLanes;
        rows.outs[at] = p_.output_of(query_tile.seq, row);
        rows.last_visible[at] = p_.limit_of(query_tile.seq, row);
        results_.place(query_tile, 0, i, rows.scratch.states + at * results_.state_floats(), at, rows);
        copy_query(query_tile.seq, row, queries + lane * p_.width);
        if (lane == kLanes - 1) pack_panel(queries, kLanes, at / kLanes, rows);
      }
    }
    if (rows.count % kLanes != 0) pack_panel(queries, rows.count % kLanes, rows.count / kLanes, rows);
  }

  void copy_query(int64_t seq, int64_t i, T* to) const {
    std::memcpy(to, p_.absorbed_of(seq, i), static_cast<size_t>(p_.latent_dim) * sizeof(T));
    p_.rotate(p_.rope_query_of(seq, i), p_.row_of(seq, i), to + p_.latent_dim);
  }

  void pack_panel(T* queries, int64_t count, int64_t index, LatentRows<T>& rows) const {
    std::memset(queries + count * p_.width, 0, static_cast<size_t>((kLanes - count) * p_.width) * sizeof(T));
    pack_queries(queries, p_.width, rows.scratch.queries + index * kLanes * p_.width);
    rows.panels[index].count = count;
    rows.panels[index].last_visible = rows.last_visible + index * kLanes;
  }

  // Locates the tiles of a split that hold positions before `end`.
  LatentSplit<T> locate_split(int64_t seq, int64_t split, int64_t end) const {
    const int64_t block_size = p_.a.cache.block_size;
    LatentSplit<T> s;
    s.start = split * kSplit;
    s.visible = end - s.start < kSplit ? end - s.start : kSplit;
    s.num_tiles = (s.visible + kTilePositions - 1) / kTilePositions;
    const int32_t* table = p_.a.block_tables + seq * p_.a.max_blocks;
    for (int64_t tile = 0; tile < s.num_tiles; ++tile) {
      const int64_t position = s.start + tile * kTilePositions;
      s.tiles[tile] = p_.cached(table[position / block_size] * block_size + position % block_size);
    }
    return s;
  }

  // Adds a split to the states of all rows. Meanwhile it prefetches the tiles that are `ahead` of the one that is
  // scored, and then the first half of the next split.
  void attend(LatentRows<T>& rows, const LatentSplit<T>& now, const LatentSplit<T>& next, int64_t ahead) const {
    const LatentScratch<T>& scratch = rows.scratch;
    const int64_t certain = rows.last_visible[0] + 1 - now.start;  // every row attends to these positions
    for (int64_t tile = 0; tile < now.num_tiles; ++tile) {
      const int64_t first = tile * kTilePositions;
      load_tile(p_, now.tiles[tile], first, now.visible, certain, scratch);
      for (int64_t i = 0; i < rows.num_panels(); ++i) {
        const T* queries = scratch.queries + i * kLanes * p_.width;
        const bool prefetches = i == 0 && tile + ahead < now.num_tiles;
        score_tile<T>(scratch.units, queries, p_.num_units(), p_.a.scale * kLog2E,
                      scratch.scores + (i * kSplit + first) * kLanes, prefetches ? now.tiles[tile + ahead] : queries);
      }
    }
    for (int64_t i = 0; i < rows.num_panels(); ++i) attend_panel(rows, i, now, i == 0 ? next : LatentSplit<T>{});
  }

  void attend_panel(LatentRows<T>& rows, int64_t index, const LatentSplit<T>& now, const LatentSplit<T>& next) const {
    LatentPanel& panel = rows.panels[index];
    if (panel.last_visible[panel.count - 1] < now.start) return;
    const int64_t split = now.start / kSplit, end = now.num_tiles * kTilePositions;
    for (int64_t r = 0; r < panel.count; ++r) {
      const int64_t at = index * kLanes + r;
      panel.states[r] = {rows.states[at] + split * rows.strides[at], p_.padded_value_dim()};
    }
    float* scores = rows.scratch.scores + index * kSplit * kLanes;
    mask_scores(panel, now.start, end, p_.a.num_masked_prefix, scores);
    FP32Vec16 maximum, sum;
    weigh_scores<T>(end, scores, maximum, sum);
    PanelMerge merge;
    merge.is_first = split == 0 || !rows.merges;
    merge_panel_sums(panel, now.start, maximum, sum, merge);
    const RowUnit<T>* weights = reinterpret_cast<const RowUnit<T>*>(scores);
    for (int64_t first = 0; first < panel.count; first += kBlockRows)
      dispatch_block(panel.count - first, [&](auto rows_of_block) {
        add_columns<decltype(rows_of_block)::value>(panel, merge, weights, end, first, rows.scratch.values, next);
      });
  }

  // Adds the weighted values of MR rows in all dimensions. Meanwhile the first half of the next split is prefetched.
  template <int MR>
  void add_columns(const LatentPanel& panel, const PanelMerge& merge, const RowUnit<T>* weights, int64_t end,
                   int64_t first, const T* values, const LatentSplit<T>& next) const {
    constexpr int panels = kBlockRows / MR;
    const int64_t units = end / KUnit<T>::kSize, width = p_.padded_value_dim(), step = units * kUnitSize<T>;
    int64_t tile = 0, offset = 0;
    const auto next_lines = [&]() -> const T* {
      if (tile >= next.num_tiles || tile >= kTilesPerSplit / 2) return nullptr;
      const T* lines = next.tiles[tile] + offset;
      if ((offset += step) >= kTilePositions * p_.width) offset = 0, ++tile;
      return lines;
    };
    int64_t column = 0;
    for (; column + panels * kLanes <= width; column += panels * kLanes)
      add_values<MR, panels>(panel, merge, weights, units, first, values + column / kLanes * kValueStride<T>, column,
                             next_lines());
    for (; column < width; column += kLanes)
      add_values<MR, 1>(panel, merge, weights, units, first, values + column / kLanes * kValueStride<T>, column,
                        next_lines());
  }

  const LatentProblem<T>& p_;
  const AttentionPlan& plan_;
  TaskResults<LatentProblem<T>> results_;
};

template <class T>
void append_latent_attention_typed(const LatentAttentionArgs& a) {
  const LatentProblem<T> p(a);
  write_latents(p);
  const PlanShape shape{a.num_heads, 1, a.cache.block_size, kLatentTaskRows, kLatentTaskRows, kLatentTaskRows};
  const AttentionPlan plan = plan_attention(a, shape, num_threads());
  int64_t work = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) work += p.num_new(seq) * a.kv_lens[seq] * a.num_heads * p.width;
  AttendLatent<T>(p, plan).run(work >= kMinParallelScores);
}

}  // namespace

void append_latent_attention(const LatentAttentionArgs& a) {
  a.cache.dtype == DType::kBfloat16 ? append_latent_attention_typed<uint16_t>(a)
                                    : append_latent_attention_typed<float>(a);
}

}  // namespace FD_ISA
}  // namespace fd
