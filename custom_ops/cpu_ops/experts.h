// SPDX-License-Identifier: Apache-2.0
// The arguments of the operators of mixtures of experts.
//
// An entry is a pair of a row and one of its experts, row * num_chosen + place; the experts of a row are in ascending
// order. `entries` lists them by expert, then by row; those of expert e are entries[starts[e]] to
// entries[starts[e + 1] - 1].
#pragma once

#include "cpu_ops/kernels.h"

namespace fd {

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxChosenExperts = 32;

// The orders are those of SCORINGS, GROUP_SCORES and NORMALISATIONS in fastdeploy/ops/experts.py.
enum class Scoring { kSoftmax, kSigmoid };
enum class GroupScore { kLargest, kTwoLargest };
enum class Normalisation { kNone, kClamp, kAdd };

struct RouterRule {
  int64_t num_chosen;
  Scoring scoring;
  int64_t num_groups, num_kept_groups;
  GroupScore group_score;
  Normalisation normalisation;
  float epsilon, scale;
};

// Normalises rows as rms_norm does, chooses their experts and lists the rows of each expert.
struct RouteArgs {
  const void* hidden;            // Float [rows, width]
  const void* norm;              // Float [width]
  const void* gate;              // [num_experts / 16, rounded up][width][16] of gate_dtype, padded with zeros
  const float* correction_bias;  // [num_experts] or null
  void* normed;                  // Float [rows, width]
  int32_t* ids;                  // [rows, num_chosen]
  float* weights;                // [rows, num_chosen]
  int32_t* starts;               // [num_experts + 1]
  int32_t* entries;              // [rows * num_chosen]
  int32_t* load;                 // [2]: experts that have rows, and the most rows of one expert
  int64_t rows, width, num_experts;
  RouterRule rule;
  float eps;  // of the norm
  DType dtype, gate_dtype;
};

// activated[i, :] = silu(gate(x)) * up(x), rounded, where x is the normalised row of entries[i].
struct ExpertsUpArgs {
  const void* normed;  // Float [rows, inputs]
  const int32_t* starts;
  const int32_t* entries;
  void* activated;          // Float [rows * num_chosen, outputs]
  PackedMatrices matrices;  // of one projection, expert after expert
  int64_t rows, num_chosen;
  const uint8_t* shared;   // the packed matrix, in the same format, of an expert of all rows, or null
  int64_t shared_outputs;  // of it
  void* shared_activated;  // Float [rows, shared_outputs]
};

// hidden = round(sum of the weighted outputs of a row's experts in ascending order + output of the shared expert +
// hidden), where each weighted output is added by one fused step in fp32.
struct ExpertsDownArgs {
  const void* activated;  // of ExpertsUpArgs
  const int32_t* starts;
  const int32_t* entries;
  const float* weights;  // [rows, num_chosen]
  void* hidden;          // Float [rows, outputs]
  PackedMatrices matrices;
  int64_t rows, num_chosen;
  const uint8_t* shared;         // as in ExpertsUpArgs
  int64_t shared_inputs;         // of it
  const void* shared_activated;  // Float [rows, shared_inputs]
  const float* shared_sum;       // [rows, outputs]: the output of a shared expert of another format, or null
};

}  // namespace fd
