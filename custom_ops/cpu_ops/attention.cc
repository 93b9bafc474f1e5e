// SPDX-License-Identifier: Apache-2.0
// Attention over a paged KV cache for any mix of prefill, decode and verification rows. The result of a row depends on
// absolute positions only: one softmax per split of 256 positions, and the partial results of splits merged in order.
// The plan decides which thread computes what, and which rows share a read of the cache, but does not change any
// result.
#include "common/threads.h"
#include "cpu_ops/attention_results.h"
#include "cpu_ops/attention_rows.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int64_t kTaskRows = 96, kMinTaskRows = 24, kMaxSharedRows = 48;  // of PlanShape

// Writes the keys and values of all new rows to the cache and rotates their queries in place. It runs before the tasks,
// unless tasks do this for their own rows (AttentionPlan::is_disjoint).
template <class T>
void write_kv(const Problem<T>& p) {
  constexpr int64_t strip = 16;
  const int64_t kv_heads = p.a.cache.num_kv_heads, strips = (p.a.rows + strip - 1) / strip;
  parallel_for(kv_heads * strips, p.a.rows * kv_heads * p.head_dim >= kMinParallelKvElements, [&](int64_t item) {
    const int64_t kv_head = item % kv_heads, first = item / kv_heads * strip;
    const int64_t end = first + strip < p.a.rows ? first + strip : p.a.rows;
    if (p.a.rotary.cos_sin != nullptr) rotate_queries<T>(p, first, end, kv_head, nullptr);
    write_kv(p, first, end, kv_head);
  });
}

// The rows of a task for one KV head, divided into groups of nearly equal size whose accumulators fit the registers.
template <class T>
struct TaskRows : TaskStates<Activation<T>, kTaskRows> {
  using TaskStates<Activation<T>, kTaskRows>::count;
  int64_t num_groups = 0;
  int64_t last_visible[kTaskRows];
  RowUnit<T>* queries;  // kQueryStride<T> each

  int64_t begin(int64_t group) const { return group * count / num_groups; }
  int64_t end_position() const { return last_visible[count - 1] + 1; }
};

// Converts a query to the row units that the micro-kernel multiplies.
template <class T>
void prepare_query(const Activation<T>* query, int64_t head_dim, RowUnit<T>* row_units) {
  constexpr int64_t size = KUnit<T>::kSize;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_row_units(row_units + d / size, load_as_float(query + d));
  if (d == head_dim) return;
  store_row_units(row_units + d / size, load_first(query + d, static_cast<int>(head_dim - d)));
}

// Runs the tasks of the plan, each once per KV head (a work item).
template <class T>
class Attend {
 public:
  Attend(const Problem<T>& problem, const AttentionPlan& plan)
      : p_(problem), plan_(plan), kv_heads_(problem.a.cache.num_kv_heads), results_(problem, plan, kv_heads_) {}

  void run(bool parallel) const {
    const int64_t num_items = plan_.num_tasks * kv_heads_;
    for_each_in_ranges(num_items, parallel,
                       [&](int64_t item) { run_task(item, item + 1 < num_items ? item + 1 : item); });
  }

 private:
  // The order of work items. For a single sequence, a thread runs the tasks of one KV head one after the other, so that
  // its keys and values stay in the L2 cache. For several sequences, all heads of a task follow one another, as in
  // memory.
  const Task& task_of(int64_t item) const {
    return plan_.tasks[plan_.has_one_sequence ? item % plan_.num_tasks : item / kv_heads_];
  }
  int64_t head_of(int64_t item) const { return plan_.has_one_sequence ? item / plan_.num_tasks : item % kv_heads_; }

  // Returns the first split of a work item.
  Split<T> first_split_of(int64_t item) const {
    const Task& task = task_of(item);
    const QueryTile& last = query_tile_at(task.end - 1);
    const int64_t end = p_.limit_of(last.seq, last.first + last.count - 1) + 1;
    return locate_split(last.seq, head_of(item), task.first_split, end);
  }

  // `following` is the work item that this thread will probably run next.
  void run_task(int64_t item, int64_t following) const {
    const Task& task = task_of(item);
    const int64_t seq = query_tile_at(task.begin).seq, kv_head = head_of(item);
    TaskRows<T> rows;
    gather_rows(task, kv_head, rows);
    Split<T> now = locate_split(seq, kv_head, task.first_split, rows.end_position());
    for (int64_t split = task.first_split; split < task.last_split; ++split) {
      if (plan_.is_disjoint) write_kv_of_split(seq, kv_head, split);
      const bool more = split + 1 < task.last_split;
      const Split<T> next =
          more ? locate_split(seq, kv_head, split + 1, rows.end_position()) : first_split_of(following);
      for (int64_t group = 0; group < rows.num_groups; ++group)
        attend_rows_of_group(rows, group, now, next, split == task.first_split);
      now = next;
    }
    results_.finish(task, kv_head, rows);
  }

  // Writes the keys and values of new rows at the positions of a split. No other task reads them.
  void write_kv_of_split(int64_t seq, int64_t kv_head, int64_t split) const {
    const int64_t begin = p_.a.cu_seqlens_q[seq], end = p_.a.cu_seqlens_q[seq + 1];
    const int64_t first = begin + split * kSplit - (p_.a.kv_lens[seq] - p_.num_new(seq));
    write_kv(p_, first > begin ? first : begin, first + kSplit < end ? first + kSplit : end, kv_head);
  }

  const QueryTile& query_tile_at(int64_t index) const { return results_.query_tile_at(index); }

  void gather_rows(const Task& task, int64_t kv_head, TaskRows<T>& rows) const {
    const size_t query_bytes = static_cast<size_t>(kTaskRows * kQueryStride<T>) * sizeof(RowUnit<T>);
    const int64_t state_floats = results_.state_floats();
    const size_t state_bytes = static_cast<size_t>(kTaskRows * state_floats) * sizeof(float);
    const size_t bytes =
        query_bytes + state_bytes + static_cast<size_t>(kTaskRows * p_.head_dim) * sizeof(Activation<T>);
    char* scratch = static_cast<char*>(thread_scratch(bytes, Scratch::kTile));
    float* states = reinterpret_cast<float*>(scratch + query_bytes);
    const Activation<T>* queries[kTaskRows];
    Activation<T>* rotated = nullptr;
    if (plan_.is_disjoint && p_.a.rotary.cos_sin != nullptr) {
      rotated = reinterpret_cast<Activation<T>*>(scratch + query_bytes + state_bytes);
      const int64_t seq = query_tile_at(task.begin).seq;
      rotate_queries(p_, p_.a.cu_seqlens_q[seq], p_.a.cu_seqlens_q[seq + 1], kv_head, rotated);
    }
    rows.merges = results_.can_merge(task, kv_head);
    for (int64_t m = task.begin; m < task.end; ++m) {
      const QueryTile& query_tile = query_tile_at(m);
      const bool whole = query_tile.num_tasks == 1;
      int64_t row = p_.row_of(query_tile.seq, query_tile.first), head = query_tile.first % p_.heads_per_kv;
      int64_t limit = p_.limit_of(query_tile.seq, query_tile.first);
      for (int64_t i = 0; i < query_tile.count; ++i, ++rows.count) {
        const int64_t at = rows.count;
        queries[at] = rotated != nullptr ? rotated + at * p_.head_dim : p_.query_of(row, kv_head) + head * p_.head_dim;
        prefetch_head(queries[at], p_.head_dim);
        rows.outs[at] = p_.out_of(row, kv_head) + head * p_.head_dim;
        if (whole) prefetch_head<true>(rows.outs[at], p_.head_dim);
        rows.last_visible[at] = limit;
        results_.place(query_tile, kv_head, i, states + at * state_floats, at, rows);
        if (++head < p_.heads_per_kv) continue;
        head = 0;
        ++row, ++limit;
      }
    }
    rows.num_groups = (rows.count + kColumnRows - 1) / kColumnRows;
    rows.queries = reinterpret_cast<RowUnit<T>*>(scratch);
    for (int64_t row = 0; row < rows.count; ++row)
      prepare_query<T>(queries[row], p_.head_dim, rows.queries + row * kQueryStride<T>);
  }

  // Locates the KV tiles of a split that hold positions before `end`.
  Split<T> locate_split(int64_t seq, int64_t kv_head, int64_t split, int64_t end) const {
    Split<T> s;
    s.start = split * kSplit;
    s.limit_to(end);
    s.num_tiles = s.num_visible_tiles();
    s.writes_last_tiles = plan_.is_disjoint && end - s.start <= kSplit;
    const int32_t* block = p_.a.block_tables + seq * p_.a.max_blocks + s.start / p_.block_size;
    int64_t offset = s.start % p_.block_size;
    for (int64_t i = 0; i < s.num_tiles; ++i) {
      s.stream[i] = p_.key_tile(*block, kv_head, offset);
      s.stream[s.num_tiles + i] = p_.value_tile(*block, kv_head, offset);
      offset += kLanes;
      if (offset < p_.block_size) continue;
      offset = 0;
      ++block;
    }
    return s;
  }

  void attend_rows_of_group(const TaskRows<T>& rows, int64_t index, const Split<T>& now, const Split<T>& next,
                            bool first_split) const {
    const int64_t first = rows.begin(index), split = now.start / kSplit;
    RowGroup<T> group;
    group.rows = rows.begin(index + 1) - first;
    group.num_masked_prefix = p_.a.num_masked_prefix;
    group.queries = rows.queries + first * kQueryStride<T>;
    for (int64_t r = 0; r < group.rows; ++r) {
      group.last_visible[r] = rows.last_visible[first + r];
      group.states[r] = {rows.states[first + r] + split * rows.strides[first + r], p_.padded_dim};
    }
    plan_prefetch(now, next, index, rows.num_groups, first_split, group.prefetched);
    const bool is_first = split == 0 || !rows.merges;
    const float scale = p_.a.scale * kLog2E;
    dispatch_rows(group.rows,
                  [&](auto count) { attend_group<decltype(count)::value>(group, now, p_.head_dim, scale, is_first); });
  }

  // Chooses the tiles that a group prefetches while it reads those of the current split. A single group, or the first
  // group of a task, prefetches the tiles that it will read shortly; the other groups divide the next split among
  // themselves.
  static void plan_prefetch(const Split<T>& now, const Split<T>& next, int64_t index, int64_t num_groups,
                            bool first_split, const T* (&prefetched)[2 * kTilesPerSplit]) {
    const int64_t own = 2 * now.num_tiles;
    if (num_groups == 1 || (first_split && index == 0)) {
      const int64_t last = 2 * next.num_tiles - 1;
      for (int64_t i = 0; i < own; ++i) {
        const int64_t at = i + kPrefetchTiles<T>, beyond = at - own < last ? at - own : last;
        prefetched[i] = at < own ? now.in_read_order(at) : next.in_read_order(beyond);
      }
      return;
    }
    if (first_split) --index, --num_groups;
    const int64_t end = 2 * next.num_tiles;
    int64_t tile = (index * end + num_groups - 1) / num_groups;
    const int64_t stop = ((index + 1) * end + num_groups - 1) / num_groups;
    for (int64_t i = 0; i < own; ++i) prefetched[i] = tile < stop ? next.in_read_order(tile++) : now.stream[i];
  }

  const Problem<T>& p_;
  const AttentionPlan& plan_;
  int64_t kv_heads_;
  TaskResults<Problem<T>> results_;
};

template <class T>
void append_attention_typed(const AttentionArgs& a) {
  const Problem<T> p(a);
  const PlanShape shape{p.heads_per_kv, a.cache.num_kv_heads, p.block_size, kTaskRows, kMinTaskRows, kMaxSharedRows};
  const AttentionPlan plan = plan_attention(a, shape, num_threads());
  if (!plan.is_disjoint) write_kv(p);
  int64_t work = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) work += p.num_new(seq) * a.kv_lens[seq] * a.num_heads * p.head_dim;
  Attend<T>(p, plan).run(work >= kMinParallelScores);
}

}  // namespace

void append_attention(const AttentionArgs& a) {
  switch (a.cache.dtype) {
    case DType::kFloat32:
      return append_attention_typed<float>(a);
    case DType::kBfloat16:
      return append_attention_typed<uint16_t>(a);
    case DType::kInt8:
      return append_attention_typed<int8_t>(a);
  }
}

}  // namespace FD_ISA
}  // namespace fd
