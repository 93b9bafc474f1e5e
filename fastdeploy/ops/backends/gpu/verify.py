# SPDX-License-Identifier: Apache-2.0
"""Kernels of the operators in `fastdeploy.ops.verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle import Tensor

from fastdeploy.ops.backends.gpu.checks import require_dtype, require_length, require_rows
from fastdeploy.ops.backends.gpu.library import active, launch
from fastdeploy.ops.sampling import IntColumn
from fastdeploy.ops.verify import VerifyBatch

_OPERATOR = "verify_draft_tokens"


def verify_draft_tokens(
    target: Tensor, int_params: Tensor, draft_is_allowed: Tensor, batch: VerifyBatch, relaxed: bool, accept_policy: int
) -> None:
    """Compare the drafts of all requests with the target's tokens; the row ranges are not checked."""
    num_rows = target.shape[0]
    require_dtype(_OPERATOR, "int32", target=target)
    require_dtype(_OPERATOR, "int64", int_params=int_params)
    require_dtype(_OPERATOR, "uint8", draft_is_allowed=draft_is_allowed)
    require_rows(_OPERATOR, num_rows, len(IntColumn), int_params=int_params)
    require_length(_OPERATOR, num_rows, draft_is_allowed=draft_is_allowed, emitted=batch.emitted.tensor)
    require_length(_OPERATOR, batch.num_seqs, num_accepted=batch.num_accepted.tensor)
    launch(
        "fd_verify_draft_tokens",
        target,
        int_params,
        draft_is_allowed,
        num_rows,
        batch.first_row.tensor,
        batch.row_count.tensor,
        batch.num_accepted.tensor,
        batch.emitted.tensor,
        *active().seq_count(batch.num_seqs),
        relaxed,
        accept_policy,
    )


KERNELS: dict[str, Callable[..., Any]] = {_OPERATOR: verify_draft_tokens}
