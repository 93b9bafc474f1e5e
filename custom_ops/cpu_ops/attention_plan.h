// SPDX-License-Identifier: Apache-2.0
// How the work of one attention call is cut into tasks. It decides who computes what and which rows share a read of the
// cache, never what is computed: that is fixed per row by the splits that the row sees.
#pragma once

#include <cstdint>

#include "cpu_ops/kernels.h"

namespace fd {

constexpr int64_t kSplit = 256;    // positions of one partial result
constexpr int64_t kTaskRows = 96;  // rows of a task, at most: their queries and results stay in the L2 cache

// Rows of one sequence that are finished together. Row i is query head i % h of its KV group at new position i / h,
// where h is the number of query heads per KV head.
struct Piece {
  int64_t seq, first, count;
  int64_t num_splits;  // that its last row sees
  int64_t num_tasks;   // that compute it; 1: that task merges and writes out by itself
  int64_t partials;    // its first partial result of [kv_head][split][row], where there are several tasks
};

// Splits [first_split, last_split) for the rows of pieces members[begin, end), which all read the same blocks.
struct Task {
  int64_t begin, end, first_split, last_split;
};

struct AttentionPlan {
  const Piece* pieces;
  const int64_t* members;
  const Task* tasks;  // each is done once per KV head
  int64_t num_pieces, num_tasks, num_partials;
  // No sequence reads what another one writes, and each is one piece: tasks may therefore rotate queries and write the
  // new rows of their splits themselves, right before they read them.
  bool is_apart;
  bool has_one_sequence;  // with rows
};

// Plans a call for so many threads. Sequences whose block tables begin alike read the whole splits that they share
// together; those that begin with blocks of their own are taken to share none. What the result points to belongs to the
// calling thread and lasts until its next call.
AttentionPlan plan_attention(const AttentionArgs& a, int64_t num_threads);

}  // namespace fd
