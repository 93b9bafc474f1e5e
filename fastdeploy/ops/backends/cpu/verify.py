# SPDX-License-Identifier: Apache-2.0
"""Native kernels of the operators in `fastdeploy.ops.verify`."""

from __future__ import annotations

from paddle import Tensor

from fastdeploy.ops.backends.cpu.library import run_native
from fastdeploy.ops.verify import VerifyBatch


def verify_draft_tokens(
    target: Tensor, int_params: Tensor, draft_is_allowed: Tensor, batch: VerifyBatch, relaxed: bool, accept_policy: int
) -> None:
    """Compare the drafts of all requests with the target's tokens."""
    run_native(
        "fd_verify_draft_tokens",
        target,
        int_params,
        draft_is_allowed,
        batch.first_row.tensor,
        batch.row_count.tensor,
        batch.num_accepted.tensor,
        batch.emitted.tensor,
        relaxed,
        accept_policy,
        batch.num_seqs,
    )
