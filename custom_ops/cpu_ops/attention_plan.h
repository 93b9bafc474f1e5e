// SPDX-License-Identifier: Apache-2.0
// Divides the work of one attention call into tasks. The plan decides which thread computes what and which rows share a
// read of the cache. It does not change results, which depend only on the splits that a row attends to.
#pragma once

#include <cstdint>

#include "cpu_ops/kernels.h"

namespace fd {

constexpr int64_t kSplit = 256;  // positions of one partial result

// What a plan depends on: the heads, and how many rows the tasks of a kernel have.
struct PlanShape {
  int64_t heads_per_kv, num_kv_heads, block_size;
  int64_t task_rows;        // maximum rows of a task: their queries and results stay in the L2 cache
  int64_t min_task_rows;    // query tiles with fewer rows would read the cache too often
  int64_t max_shared_rows;  // of a sequence that shares reads; with more rows, arithmetic dominates
};

// Query rows of one sequence that are completed together. Row i is query head i % h of its KV group at new position i /
// h, where h is the number of query heads per KV head.
struct QueryTile {
  int64_t seq, first, count;
  int64_t num_splits;  // that its last row attends to
  int64_t num_tasks;   // that compute it; a single task merges and writes the outputs by itself
  int64_t partials;    // index of its first partial state [kv_head][split][row], if there are several tasks
};

// Splits [first_split, last_split) for the rows of query tiles members[begin, end), which all read the same blocks.
struct Task {
  int64_t begin, end, first_split, last_split;
};

struct AttentionPlan {
  const QueryTile* query_tiles;
  const int64_t* members;
  const Task* tasks;  // each runs once per KV head
  int64_t num_query_tiles, num_tasks, num_partials;
  // No sequence reads what another one writes, and each is one query tile. Tasks then rotate queries and write the new
  // rows of their splits themselves, just before they read them.
  bool is_disjoint;
  bool has_one_sequence;  // only one sequence has rows
};

// Plans a call for num_threads threads. Sequences whose block tables start with the same blocks read the splits that
// they share together; sequences with different first blocks are assumed to share nothing. The arrays of the result
// belong to the calling thread and are valid until its next call.
AttentionPlan plan_attention(const PagedBatch& batch, const PlanShape& shape, int64_t num_threads);

}  // namespace fd
