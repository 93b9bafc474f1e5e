// SPDX-License-Identifier: Apache-2.0
// Verification of drafts: a thread for each request.

#include "common/verify.h"

#include "common/export.h"
#include "common/sampling.h"
#include "gpu_ops/count.h"
#include "gpu_ops/device.h"

namespace {

using namespace fd::gpu;

FD_KERNEL void verify_draft_tokens(fd::VerifyRule rule, In<int32_t> target, In<int64_t> int_params,
                                   In<uint8_t> draft_is_allowed, In<int32_t> first_row, In<int32_t> row_count,
                                   Out<int32_t> num_accepted, Out<int32_t> emitted, In<int32_t> device_seqs,
                                   int num_seqs) {
  const int request = static_cast<int>(block_index().x * block_size() + thread_index());
  if (request >= read_count(device_seqs, num_seqs)) return;
  const int64_t first = first_row.data[request];
  num_accepted.data[request] = fd::verify_request(
      rule, target.data + first, int_params.data + first * fd::kNumIntParams + fd::kDraftId, fd::kNumIntParams,
      draft_is_allowed.data + first, row_count.data[request], emitted.data + first);
}

}  // namespace

// target, emitted: [num_rows] int32; int_params: [num_rows, kNumIntParams] int64; draft_is_allowed: [num_rows] uint8;
// first_row, row_count, num_accepted: [num_seqs] int32.
FD_EXPORT int fd_verify_draft_tokens(const int32_t* target, const int64_t* int_params, const uint8_t* draft_is_allowed,
                                     int64_t num_rows, const int32_t* first_row, const int32_t* row_count,
                                     int32_t* num_accepted, int32_t* emitted, const int32_t* device_seqs,
                                     int64_t num_seqs, int64_t relaxed, int64_t accept_policy, void* stream) {
  FD_REQUIRE("verify_draft_tokens", num_seqs, num_seqs >= 0 && num_seqs <= INT32_MAX, "0 to 2147483647");
  FD_REQUIRE("verify_draft_tokens", accept_policy,
             accept_policy >= fd::kAcceptNormal && accept_policy <= fd::kRejectAll, "0, 1 or 2");
  if (num_seqs == 0) return kSuccess;
  const auto rows = static_cast<size_t>(num_rows), seqs = static_cast<size_t>(num_seqs);
  const fd::VerifyRule rule{relaxed != 0, static_cast<fd::AcceptPolicy>(accept_policy)};
  const Count count{device_seqs, static_cast<int32_t>(num_seqs)};
  const auto blocks = static_cast<unsigned>((num_seqs + kWarpSize - 1) / kWarpSize);
  return launch(verify_draft_tokens, {blocks, 1, 1}, kWarpSize, 0, stream, rule, In<int32_t>(target, rows),
                In<int64_t>(int_params, rows * fd::kNumIntParams), In<uint8_t>(draft_is_allowed, rows),
                In<int32_t>(first_row, seqs), In<int32_t>(row_count, seqs), Out<int32_t>(num_accepted, seqs),
                Out<int32_t>(emitted, rows), count.array(), count.max);
}
