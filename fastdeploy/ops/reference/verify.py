# SPDX-License-Identifier: Apache-2.0
"""Verification in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddle import Tensor

if TYPE_CHECKING:
    from fastdeploy.ops.verify import VerifyBatch

_DRAFT_COLUMN = 10  # of SamplingBatch.int_params
_NORMAL, _ACCEPT_ALL = 0, 1


def verify_draft_tokens(
    target: Tensor, int_params: Tensor, draft_is_allowed: Tensor, batch: VerifyBatch, relaxed: bool, accept_policy: int
) -> None:
    """As `fastdeploy.ops.verify.verify_draft_tokens`."""
    drafts, tokens, allowed = int_params[:, _DRAFT_COLUMN].tolist(), target.tolist(), draft_is_allowed.tolist()
    for b in range(batch.num_seqs):
        first, count = int(batch.first_row.array[b]), int(batch.row_count.array[b])
        emitted: list[int] = []
        for row in range(first, first + count):
            draft = drafts[row] if row < first + count - 1 else -1
            equal = tokens[row] == draft or (relaxed and allowed[row])
            accepted = draft >= 0 and (accept_policy == _ACCEPT_ALL or (accept_policy == _NORMAL and equal))
            emitted.append(draft if accepted else tokens[row])
            if not accepted:
                break
        batch.num_accepted.array[b] = len(emitted) - 1
        batch.emitted.array[first : first + len(emitted)] = emitted
