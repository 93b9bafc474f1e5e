// SPDX-License-Identifier: Apache-2.0
// Attention over a paged cache for any mix of rows. The arithmetic of one row is fixed by absolute positions: a softmax
// over each split of 256, splits merged in order. Rows that share a task, threads and neighbours decide only who
// computes what.
#include "cpu_ops/attention_rows.h"

#include "common/scratch.h"
#include "common/threads.h"
#include "cpu_ops/families.h"
#include "cpu_ops/linear_tiles.h"

namespace fd {
namespace FD_ISA {
namespace {

constexpr int64_t kMinParallelWork = 1 << 15;   // multiply-adds below which waking a thread costs more than it saves
constexpr int64_t kMinParallelWrite = 1 << 10;  // the same in elements to write: each may miss the caches
constexpr float kLog2E = 1.44269504f;

// The first phase, where tasks do not take their rows themselves: all new rows are taken to the cache, and their
// queries are rotated in place.
template <class T>
void take_rows(const Problem<T>& p) {
  constexpr int64_t strip = 16;
  const int64_t kv_heads = p.a.cache.num_kv_heads, strips = (p.a.rows + strip - 1) / strip;
  parallel_for(kv_heads * strips, p.a.rows * kv_heads * p.head_dim >= kMinParallelWrite, [&](int64_t tile) {
    const int64_t kv_head = tile % kv_heads, first = tile / kv_heads * strip;
    const int64_t end = first + strip < p.a.rows ? first + strip : p.a.rows;
    if (p.a.rotary.cos_sin != nullptr) rotate_queries<T>(p, first, end, kv_head, nullptr);
    take_rows(p, first, end, kv_head);
  });
}

template <class Out>
void write_out(const Record& record, float row_share, int64_t head_dim, Out* out) {
  const F16 share = splat(row_share);
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_rounded(out + d, mul(load(record.values() + d), share));
  if (d < head_dim) store_first(out + d, mul(load(record.values() + d), share), static_cast<int>(head_dim - d));
}

// The rows of a task and KV head, cut into groups of nearly equal size that share the registers.
template <class T>
struct TaskRows {
  int64_t count = 0, num_groups = 0;
  int64_t limits[kTaskRows];
  Row<T>* outs[kTaskRows];
  bool merges = true;          // a split goes to the record of those before it at once
  float* records[kTaskRows];   // where the result of split 0 goes
  int64_t strides[kTaskRows];  // to that of the next split; 0 where they are merged
  Element<T>* queries;         // kQuerySteps<T> each

  int64_t begin(int64_t group) const { return group * count / num_groups; }
  int64_t end_position() const { return limits[count - 1] + 1; }
};

// Turns a query into the elements that the kernel multiplies.
template <class T>
void prepare_query(const Row<T>* query, int64_t head_dim, Element<T>* elements) {
  constexpr int64_t size = Step<T>::kSize;
  int64_t d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_elements(elements + d / size, load_as_float(query + d));
  if (d == head_dim) return;
  store_elements(elements + d / size, load_first(query + d, static_cast<int>(head_dim - d)));
}

// The second phase: the plan's tasks, each once per KV head. Results of pieces that several tasks compute are merged by
// whichever of them ends last.
template <class T>
class Attend {
 public:
  Attend(const Problem<T>& problem, const AttentionPlan& plan)
      : p_(problem), plan_(plan), kv_heads_(problem.a.cache.num_kv_heads), record_(record_size(problem.padded_dim)) {
    const size_t count = static_cast<size_t>(plan.num_pieces * kv_heads_);
    const size_t counters = (2 * count * sizeof(int32_t) + 63) / 64 * 64;
    const size_t partials = static_cast<size_t>(plan.num_partials * record_) * sizeof(float);
    char* scratch = static_cast<char*>(thread_scratch(counters + partials));
    pending_ = reinterpret_cast<int32_t*>(scratch);
    merged_ = pending_ + count;
    partials_ = reinterpret_cast<float*>(scratch + counters);
    for (size_t i = 0; i < count; ++i) {
      pending_[i] = static_cast<int32_t>(plan.pieces[i / kv_heads_].num_tasks);
      merged_[i] = 0;
    }
  }

  void run(bool parallel) const {
    const int64_t num_tiles = plan_.num_tasks * kv_heads_;
    for_each_in_stretches(num_tiles, parallel,
                          [&](int64_t tile) { run_task(tile, tile + 1 < num_tiles ? tile + 1 : tile); });
  }

 private:
  // Of one sequence alone a thread does the tasks of a KV head one after the other: what it reads and writes for it
  // stays in its L2 cache. Several sequences come one by one, as they lie in memory.
  const Task& task_of(int64_t tile) const {
    return plan_.tasks[plan_.has_one_sequence ? tile % plan_.num_tasks : tile / kv_heads_];
  }
  int64_t head_of(int64_t tile) const { return plan_.has_one_sequence ? tile / plan_.num_tasks : tile % kv_heads_; }

  // The first split of a tile.
  Split<T> first_of(int64_t tile) const {
    const Task& task = task_of(tile);
    const Piece& last = member(task.end - 1);
    const int64_t end = p_.limit_of(last.seq, last.first + last.count - 1) + 1;
    return read(last.seq, head_of(tile), task.first_split, end);
  }

  // `following` is the tile that this thread will probably run next.
  void run_task(int64_t tile, int64_t following) const {
    const Task& task = task_of(tile);
    const int64_t seq = member(task.begin).seq, kv_head = head_of(tile);
    TaskRows<T> rows;
    gather(task, kv_head, rows);
    Split<T> now = read(seq, kv_head, task.first_split, rows.end_position());
    for (int64_t split = task.first_split; split < task.last_split; ++split) {
      if (plan_.is_apart) take_split(seq, kv_head, split);
      const bool more = split + 1 < task.last_split;
      const Split<T> next = more ? read(seq, kv_head, split + 1, rows.end_position()) : first_of(following);
      for (int64_t group = 0; group < rows.num_groups; ++group)
        attend_rows(rows, group, now, next, split == task.first_split);
      now = next;
    }
    finish(task, kv_head, rows);
  }

  // Takes the new rows at positions of a split to the cache: no other task reads what it holds of them.
  void take_split(int64_t seq, int64_t kv_head, int64_t split) const {
    const int64_t begin = p_.a.cu_seqlens_q[seq], end = p_.a.cu_seqlens_q[seq + 1];
    const int64_t first = begin + split * kSplit - (p_.a.kv_lens[seq] - p_.num_new(seq));
    take_rows(p_, first > begin ? first : begin, first + kSplit < end ? first + kSplit : end, kv_head);
  }

  const Piece& member(int64_t index) const { return plan_.pieces[plan_.members[index]]; }
  // Of a piece's tasks, how many have not ended.
  int32_t* pending(int64_t piece, int64_t kv_head) const { return pending_ + piece * kv_heads_ + kv_head; }
  // Of a piece's splits, how many its first record holds. Only the task that begins there adds to it.
  int32_t* merged(int64_t piece, int64_t kv_head) const { return merged_ + piece * kv_heads_ + kv_head; }
  float* partial(const Piece& piece, int64_t kv_head, int64_t split, int64_t row) const {
    return partials_ + (piece.partials + (kv_head * piece.num_splits + split) * piece.count + row) * record_;
  }

  void gather(const Task& task, int64_t kv_head, TaskRows<T>& rows) const {
    const size_t query_bytes = static_cast<size_t>(kTaskRows * kQuerySteps<T>) * sizeof(Element<T>);
    const size_t record_bytes = static_cast<size_t>(kTaskRows * record_) * sizeof(float);
    const size_t bytes = query_bytes + record_bytes + static_cast<size_t>(kTaskRows * p_.head_dim) * sizeof(Row<T>);
    char* scratch = static_cast<char*>(thread_scratch(bytes, Scratch::kTile));
    float* records = reinterpret_cast<float*>(scratch + query_bytes);
    const Row<T>* queries[kTaskRows];
    Row<T>* rotated = nullptr;
    if (plan_.is_apart && p_.a.rotary.cos_sin != nullptr) {
      rotated = reinterpret_cast<Row<T>*>(scratch + query_bytes + record_bytes);
      const int64_t seq = member(task.begin).seq;
      rotate_queries(p_, p_.a.cu_seqlens_q[seq], p_.a.cu_seqlens_q[seq + 1], kv_head, rotated);
    }
    for (int64_t m = task.begin; m < task.end; ++m)
      rows.merges &= __atomic_load_n(merged(plan_.members[m], kv_head), __ATOMIC_ACQUIRE) == task.first_split;
    for (int64_t m = task.begin; m < task.end; ++m) {
      const Piece& piece = member(m);
      const bool whole = piece.num_tasks == 1;
      int64_t row = p_.row_of(piece.seq, piece.first), head = piece.first % p_.heads_per_kv;
      int64_t limit = p_.limit_of(piece.seq, piece.first);
      for (int64_t i = 0; i < piece.count; ++i, ++rows.count) {
        const int64_t at = rows.count;
        queries[at] = rotated != nullptr ? rotated + at * p_.head_dim : p_.query_of(row, kv_head) + head * p_.head_dim;
        fetch_head(queries[at], p_.head_dim);
        rows.outs[at] = p_.out_of(row, kv_head) + head * p_.head_dim;
        if (whole) fetch_head<true>(rows.outs[at], p_.head_dim);
        rows.limits[at] = limit;
        rows.records[at] = whole ? records + at * record_ : partial(piece, kv_head, 0, i);
        rows.strides[at] = rows.merges ? 0 : piece.count * record_;
        if (++head < p_.heads_per_kv) continue;
        head = 0;
        ++row, ++limit;
      }
    }
    rows.num_groups = (rows.count + kColumnRows - 1) / kColumnRows;
    rows.queries = reinterpret_cast<Element<T>*>(scratch);
    for (int64_t row = 0; row < rows.count; ++row)
      prepare_query<T>(queries[row], p_.head_dim, rows.queries + row * kQuerySteps<T>);
  }

  // Finds the packets of a split as far as positions before `end` reach.
  Split<T> read(int64_t seq, int64_t kv_head, int64_t split, int64_t end) const {
    Split<T> s;
    s.start = split * kSplit;
    s.see(end);
    s.num_packets = s.num_visible_packets();
    s.is_written_first = plan_.is_apart && end - s.start <= kSplit;
    const int32_t* block = p_.a.block_tables + seq * p_.a.max_blocks + s.start / p_.block_size;
    int64_t offset = s.start % p_.block_size;
    for (int64_t i = 0; i < s.num_packets; ++i) {
      s.stream[i] = p_.key_packet(*block, kv_head, offset);
      s.stream[s.num_packets + i] = p_.value_packet(*block, kv_head, offset);
      offset += kLanes;
      if (offset < p_.block_size) continue;
      offset = 0;
      ++block;
    }
    return s;
  }

  void attend_rows(const TaskRows<T>& rows, int64_t index, const Split<T>& now, const Split<T>& next,
                   bool first_split) const {
    const int64_t first = rows.begin(index), split = now.start / kSplit;
    Group<T> group;
    group.rows = rows.begin(index + 1) - first;
    group.hides_first = p_.a.hides_first;
    group.queries = rows.queries + first * kQuerySteps<T>;
    for (int64_t r = 0; r < group.rows; ++r) {
      group.limits[r] = rows.limits[first + r];
      group.records[r] = {rows.records[first + r] + split * rows.strides[first + r], p_.padded_dim};
    }
    fetch_ahead(now, next, index, rows.num_groups, first_split, group.ahead);
    const bool fresh = split == 0 || !rows.merges;
    const float scale = p_.a.scale * kLog2E;
    with_rows(group.rows,
              [&](auto count) { attend_group<decltype(count)::value>(group, now, p_.head_dim, scale, fresh); });
  }

  // A single group fetches what it reads next itself, and so does the first group of a task. Several groups share the
  // next split.
  static void fetch_ahead(const Split<T>& now, const Split<T>& next, int64_t index, int64_t num_groups,
                          bool first_split, const T* (&ahead)[2 * kPackets]) {
    const int64_t own = 2 * now.num_packets;
    if (num_groups == 1 || (first_split && index == 0)) {
      const int64_t last = 2 * next.num_packets - 1;
      for (int64_t i = 0; i < own; ++i) {
        const int64_t at = i + kAhead<T>, beyond = at - own < last ? at - own : last;
        ahead[i] = at < own ? now.needed(at) : next.needed(beyond);
      }
      return;
    }
    if (first_split) --index, --num_groups;
    const int64_t end = 2 * next.num_packets;
    int64_t wanted = (index * end + num_groups - 1) / num_groups;
    const int64_t stop = ((index + 1) * end + num_groups - 1) / num_groups;
    for (int64_t i = 0; i < own; ++i) ahead[i] = wanted < stop ? next.needed(wanted++) : now.stream[i];
  }

  void finish(const Task& task, int64_t kv_head, const TaskRows<T>& rows) const {
    if (member(task.begin).num_tasks == 1) {
      for (int64_t r = 0; r < rows.count; r += kLanes)
        write_rows(rows, r, r + kLanes < rows.count ? r + kLanes : rows.count);
      return;
    }
    for (int64_t m = task.begin; m < task.end; ++m) {
      const int64_t piece = plan_.members[m];
      if (rows.merges)
        __atomic_store_n(merged(piece, kv_head), static_cast<int32_t>(task.last_split), __ATOMIC_RELEASE);
      if (__atomic_sub_fetch(pending(piece, kv_head), 1, __ATOMIC_ACQ_REL) == 0) merge(piece, kv_head);
    }
  }

  // Writes rows [first, end), whose sums fit the lanes of a vector.
  void write_rows(const TaskRows<T>& rows, int64_t first, int64_t end) const {
    const auto record = [&](int64_t r) { return Record{rows.records[r], p_.padded_dim}; };
    float shares[kLanes];
    for (float& share : shares) share = 1;
    for (int64_t r = first; r < end; ++r) shares[r - first] = record(r).sum();
    store(shares, div(splat(1.0f), load(shares)));
    for (int64_t r = first; r < end; ++r) write_out(record(r), shares[r - first], p_.head_dim, rows.outs[r]);
  }

  // Merges the splits of a piece that are not into its first record, as groups do, and writes the rows out.
  void merge(int64_t index, int64_t kv_head) const {
    const Piece& piece = plan_.pieces[index];
    const int64_t split = *merged(index, kv_head);
    for (int64_t first = 0; first < piece.count; first += kLanes)
      merge_rows(piece, kv_head, split, first, first + kLanes < piece.count ? first + kLanes : piece.count);
  }

  void merge_rows(const Piece& piece, int64_t kv_head, int64_t next_split, int64_t first, int64_t end) const {
    const auto record = [&](int64_t split, int64_t r) {
      return Record{partial(piece, kv_head, split, first + r), p_.padded_dim};
    };
    const int64_t count = end - first;
    int64_t last[kLanes];
    float maxima[kLanes] = {}, sums[kLanes] = {}, keep[kLanes], take[kLanes];
    for (int64_t r = 0; r < count; ++r) {
      last[r] = p_.limit_of(piece.seq, piece.first + first + r) / kSplit;
      maxima[r] = record(0, r).maximum();
      sums[r] = record(0, r).sum();
    }
    F16 top = load(maxima), total = load(sums), kept, taken;
    for (int64_t split = next_split; split <= last[count - 1]; ++split) {
      for (int64_t r = 0; r < count; ++r) {
        maxima[r] = split <= last[r] ? record(split, r).maximum() : kLowest;
        sums[r] = split <= last[r] ? record(split, r).sum() : 0.0f;
      }
      merge_sums(top, total, load(maxima), load(sums), kept, taken);
      store(keep, kept);
      store(take, taken);
      for (int64_t r = 0; r < count; ++r)
        if (split <= last[r]) merge_values(record(0, r), record(split, r), keep[r], take[r]);
    }
    store(sums, div(splat(1.0f), total));
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = p_.row_of(piece.seq, piece.first + first + r);
      const int64_t head = (piece.first + first + r) % p_.heads_per_kv;
      write_out(record(0, r), sums[r], p_.head_dim, p_.out_of(row, kv_head) + head * p_.head_dim);
    }
  }

  const Problem<T>& p_;
  const AttentionPlan& plan_;
  int64_t kv_heads_, record_;
  int32_t *pending_, *merged_;
  float* partials_;
};

template <class T>
void append_attention_typed(const AttentionArgs& a) {
  const Problem<T> p(a);
  const AttentionPlan plan = plan_attention(a, num_threads());
  if (!plan.is_apart) take_rows(p);
  int64_t work = 0;
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) work += p.num_new(seq) * a.kv_lens[seq] * a.num_heads * p.head_dim;
  Attend<T>(p, plan).run(work >= kMinParallelWork);
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
