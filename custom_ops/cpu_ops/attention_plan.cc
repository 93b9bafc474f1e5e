// SPDX-License-Identifier: Apache-2.0
#include "cpu_ops/attention_plan.h"

#include <algorithm>
#include <vector>

namespace fd {
namespace {

constexpr int64_t kTasksPerThread = 8;     // aimed at: a late thread delays at most one of them
constexpr int64_t kMinSplits = 2;          // splits of a task, if a query tile has several tasks
constexpr int64_t kRowTilesPerThread = 4;  // aimed at: more query tiles would read and widen the same keys more often

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the relative time of a split for this many rows: products, and reading the cache, which all rows share.
int64_t split_cost(int64_t rows) { return rows + 6; }

class Planner {
 public:
  AttentionPlan run(const PagedBatch& batch, const PlanShape& shape, int64_t num_threads) {
    args_ = &batch, shape_ = shape;
    query_tiles_.clear();
    members_.clear();
    tasks_.clear();
    num_partials_ = 0;
    find_shared();
    cut_query_tiles(num_threads);
    add_shared_tasks();
    add_own_tasks(num_threads);
    assign_partials();
    return {query_tiles_.data(),
            members_.data(),
            tasks_.data(),
            static_cast<int64_t>(query_tiles_.size()),
            static_cast<int64_t>(tasks_.size()),
            num_partials_,
            has_own_blocks_ && query_tiles_.size() == num_with_rows_,
            num_with_rows_ == 1};
  }

 private:
  int64_t num_new(int64_t seq) const { return args_->cu_seqlens_q[seq + 1] - args_->cu_seqlens_q[seq]; }
  int64_t num_rows(int64_t seq) const { return num_new(seq) * shape_.heads_per_kv; }
  const int32_t* table(int64_t seq) const { return args_->block_tables + seq * args_->max_blocks; }

  // Returns the whole splits of a sequence before its new positions, which it could share.
  int64_t num_shareable_splits(int64_t seq) const {
    const int64_t rows = num_rows(seq);
    return rows > 0 && rows <= shape_.max_shared_rows ? (args_->kv_lens[seq] - num_new(seq)) / kSplit : 0;
  }

  // Finds for each sequence the first sequence whose table starts with the same block, and how many splits they share.
  void find_shared() {
    const int64_t num_seqs = args_->num_seqs;
    leaders_.assign(static_cast<size_t>(num_seqs), -1);
    shared_.assign(static_cast<size_t>(num_seqs), 0);
    has_own_blocks_ = true;
    num_with_rows_ = 0;
    size_t size = 2;
    while (size < 2 * static_cast<size_t>(num_seqs)) size *= 2;
    first_with_.assign(size, -1);
    for (int64_t seq = 0; seq < num_seqs; ++seq) {
      if (num_new(seq) == 0) continue;
      ++num_with_rows_;
      int64_t& leader = first_with(table(seq)[0]);
      has_own_blocks_ &= leader < 0;
      if (leader < 0 || num_shareable_splits(leader) == 0) leader = seq;
      if (num_shareable_splits(seq) == 0) continue;
      leaders_[seq] = leader;
      if (leader == seq) continue;
      shared_[seq] = common_splits(leader, seq);
      shared_[leader] = std::max(shared_[leader], shared_[seq]);
    }
  }

  // A hash table with open addressing from first block to sequence; -1 marks free entries.
  int64_t& first_with(int32_t block) {
    size_t at = static_cast<uint32_t>(block) * 2654435761u & (first_with_.size() - 1);
    while (first_with_[at] >= 0 && table(first_with_[at])[0] != block) at = (at + 1) & (first_with_.size() - 1);
    return first_with_[at];
  }

  int64_t common_splits(int64_t a, int64_t b) const {
    const int64_t block_size = shape_.block_size,
                  max_splits = std::min(num_shareable_splits(a), num_shareable_splits(b));
    const int64_t num_blocks = divide_up(max_splits * kSplit, block_size);
    int64_t equal = 0;
    while (equal < num_blocks && table(a)[equal] == table(b)[equal]) ++equal;
    return std::min(max_splits, equal * block_size / kSplit);
  }

  void cut_query_tiles(int64_t num_threads) {
    int64_t rows = shape_.task_rows;
    while (rows > shape_.min_task_rows && num_tiles(rows) < kRowTilesPerThread * num_threads) rows /= 2;
    first_query_tile_.clear();
    for (int64_t seq = 0; seq < args_->num_seqs; ++seq) {
      first_query_tile_.push_back(static_cast<int64_t>(query_tiles_.size()));
      const int64_t block = shared_[seq] > 0 ? shape_.max_shared_rows : rows,
                    before = args_->kv_lens[seq] - num_new(seq);
      for (int64_t first = 0; first < num_rows(seq); first += block) {
        const int64_t count = std::min(block, num_rows(seq) - first);
        const int64_t last_position = before + (first + count - 1) / shape_.heads_per_kv;
        query_tiles_.push_back({seq, first, count, last_position / kSplit + 1, 0, 0});
      }
    }
  }

  // Returns the number of tasks if query tiles have this many rows.
  int64_t num_tiles(int64_t rows) const {
    int64_t count = 0;
    for (int64_t seq = 0; seq < args_->num_seqs; ++seq) {
      const int64_t splits = divide_up(args_->kv_lens[seq], kSplit);
      count += divide_up(num_rows(seq), rows) * std::max(splits / kMinSplits, int64_t{1});
    }
    return count * shape_.num_kv_heads;
  }

  void add_shared_tasks() {
    for (int64_t leader = 0; leader < args_->num_seqs; ++leader) {
      if (leaders_[leader] != leader || shared_[leader] == 0) continue;
      group_.clear();
      for (int64_t seq = leader; seq < args_->num_seqs; ++seq)
        if (leaders_[seq] == leader && shared_[seq] > 0) group_.push_back(seq);
      std::sort(group_.begin(), group_.end(),
                [this](int64_t a, int64_t b) { return shared_[a] != shared_[b] ? shared_[a] > shared_[b] : a < b; });
      share_splits();
    }
  }

  // group_ is sorted by the number of shared splits, so the sequences that share a split are its first ones.
  void share_splits() {
    size_t count = group_.size();
    for (int64_t split = 0, end; split < shared_[group_[0]]; split = end) {
      while (shared_[group_[count - 1]] <= split) --count;
      end = std::min(split + kMinSplits, shared_[group_[count - 1]]);
      for (size_t i = 0; i < count;) {
        const int64_t begin = static_cast<int64_t>(members_.size());
        for (int64_t rows = 0; i < count && (rows += num_rows(group_[i])) <= shape_.task_rows; ++i) {
          members_.push_back(first_query_tile_[group_[i]]);
          ++query_tiles_[members_.back()].num_tasks;
        }
        tasks_.push_back({begin, static_cast<int64_t>(members_.size()), split, end});
      }
    }
  }

  // Adds the tasks of splits that a query tile reads alone. The longest tiles, which are last in a prompt, come first.
  void add_own_tasks(int64_t num_threads) {
    int64_t total = 0;
    for (const QueryTile& query_tile : query_tiles_) total += own_splits(query_tile) * split_cost(query_tile.count);
    const int64_t share = total * shape_.num_kv_heads / (kTasksPerThread * num_threads);
    for (int64_t i = static_cast<int64_t>(query_tiles_.size()) - 1; i >= 0; --i) {
      QueryTile& query_tile = query_tiles_[i];
      const int64_t own = own_splits(query_tile), first = query_tile.num_splits - own;
      const int64_t max_splits = std::max(kMinSplits, share / split_cost(query_tile.count));
      const int64_t count = num_threads == 1 ? 1 : divide_up(own, max_splits), begin = members_.size();
      members_.push_back(i);
      for (int64_t task = 0; task < count; ++task)
        tasks_.push_back({begin, begin + 1, first + task * own / count, first + (task + 1) * own / count});
      query_tile.num_tasks += count;
    }
  }

  int64_t own_splits(const QueryTile& query_tile) const { return query_tile.num_splits - shared_[query_tile.seq]; }

  void assign_partials() {
    for (QueryTile& query_tile : query_tiles_) {
      if (query_tile.num_tasks == 1) continue;
      query_tile.partials = num_partials_;
      num_partials_ += shape_.num_kv_heads * query_tile.num_splits * query_tile.count;
    }
  }

  const PagedBatch* args_ = nullptr;
  PlanShape shape_{};
  std::vector<QueryTile> query_tiles_;
  std::vector<int64_t> members_;
  std::vector<Task> tasks_;
  int64_t num_partials_ = 0;
  size_t num_with_rows_ = 0;    // sequences
  bool has_own_blocks_ = true;  // no two sequences begin with the same block
  std::vector<int64_t> leaders_, shared_, first_with_, first_query_tile_, group_;
};

}  // namespace

AttentionPlan plan_attention(const PagedBatch& batch, const PlanShape& shape, int64_t num_threads) {
  thread_local Planner planner;
  return planner.run(batch, shape, num_threads);
}

}  // namespace fd
