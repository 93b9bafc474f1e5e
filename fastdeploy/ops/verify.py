# SPDX-License-Identifier: Apache-2.0
"""Verification by comparison: drafts are accepted as long as they equal the tokens that the target sampled.

For drafts that are a function of the context this *is* optimal speculative sampling: a draft is accepted with its
probability under the target (Leviathan et al. 2023 with a one-hot draft distribution).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.reference import verify as reference
from fastdeploy.ops.registry import Lookup, OpEntry, register
from fastdeploy.ops.sampling import IntColumn, SamplingBatch


class AcceptPolicy(IntEnum):
    """Which drafts are accepted; the others than NORMAL serve to measure speed."""

    NORMAL = 0
    ACCEPT_ALL = 1
    REJECT_ALL = 2


class VerifyBatch:
    """Row ranges and results of up to `max_rows` rows and as many requests.

    Attributes:
        num_seqs: number of requests in this call.
        first_row, row_count: [max_rows] int32, the verification rows of each request; there may be gaps between
            requests. Row i of a request verifies its draft i; its last row samples the bonus token.
        num_accepted: [max_rows] int32, per request; -1 for a request without rows.
        emitted: [max_rows] int32; emitted[first_row + i] is token i of the num_accepted + 1 emitted tokens.
    """

    def __init__(self, max_rows: int) -> None:
        self.num_seqs = 0
        self.first_row = HostBuffer(max_rows, "int32")
        self.row_count = HostBuffer(max_rows, "int32")
        self.num_accepted = HostBuffer(max_rows, "int32")
        self.emitted = HostBuffer(max_rows, "int32")

    def fill(self, first_row: NDArray | Sequence[int], row_count: NDArray | Sequence[int]) -> None:
        """Set the number of requests and their row ranges."""
        self.num_seqs = len(row_count)
        for seq, (first, count) in enumerate(zip(first_row, row_count)):
            self.first_row.memory[seq] = first
            self.row_count.memory[seq] = count

    def upload(self) -> None:
        """Send the row ranges to the device."""
        self.first_row.upload(self.num_seqs)
        self.row_count.upload(self.num_seqs)

    def download(self, num_seqs: int, num_rows: int) -> None:
        """Fetch the results of the first requests and rows; they are there after `Backend.synchronize`."""
        self.num_accepted.download(num_seqs)
        self.emitted.download(num_rows)


def verify_draft_tokens(
    target: Tensor, int_params: Tensor, draft_is_allowed: Tensor, batch: VerifyBatch, relaxed: bool, accept_policy: int
) -> None:
    """Verify the drafts of every request; fill batch.num_accepted and batch.emitted.

    Args:
        target: [num_rows] int32, the token sampled at each row.
        int_params: [num_rows, 13] int64, SamplingBatch.int_params; column DRAFT_ID is the draft that each row verifies,
            -1 for none.
        draft_is_allowed: [num_rows] uint8, SamplingBatch.draft_is_allowed.
        relaxed: accept every draft in the allowed set (lossy).
        accept_policy: an AcceptPolicy.

    Raises:
        ValueError: a range exceeds the rows, or the policy is unknown.
    """
    _VERIFY.run(target, int_params, draft_is_allowed, batch, relaxed, accept_policy)


def _example(lookup: Lookup) -> Sequence[Tensor]:
    rng = np.random.default_rng(3)
    counts = np.array([1, 4, 0, 6, 3])
    starts = np.cumsum([0, *counts[:-1]])
    target, drafts = rng.integers(0, 3, (2, 14)).astype(np.int32)
    int_params = SamplingBatch(14).int_params
    int_params.array[:, IntColumn.DRAFT_ID] = drafts
    allowed = paddle.to_tensor(rng.integers(0, 2, 14).astype(np.uint8))
    results = []
    for relaxed, policy in ((False, 0), (True, 0), (False, 1), (True, 2)):
        batch = VerifyBatch(14)
        batch.fill(starts, counts)
        lookup("verify_draft_tokens")(paddle.to_tensor(target), int_params.tensor, allowed, batch, relaxed, policy)
        results += [batch.num_accepted.tensor[:5], batch.emitted.tensor]
    return results


_VERIFY = register(OpEntry("verify_draft_tokens", reference.verify_draft_tokens, examples=[_example]))
