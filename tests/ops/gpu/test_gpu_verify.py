# SPDX-License-Identifier: Apache-2.0
"""Verification on an emulated GPU: the results of the reference, in one launch, and nothing else is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.sampling import IntColumn, SamplingBatch
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch
from tests.ops.gpu.emulated import SEEDS, count, counts_on_device, emulate

UNUSED = -9
RULES = ((False, 0), (True, 0), (False, 1), (True, 2))


def verify(kernel: Callable[..., Any], num_seqs: int, relaxed: bool, policy: int, passed_seqs: int) -> list[list[int]]:
    """Verify random drafts of `num_seqs` requests with gaps between their rows; return all results."""
    rng = np.random.default_rng(num_seqs)
    counts = rng.integers(0, 8, num_seqs)
    starts = np.cumsum([0, *(counts[:-1] + rng.integers(0, 2, num_seqs - 1))])
    rows = 10 * num_seqs
    target, drafts = rng.integers(-1, 3, (2, rows)).astype(np.int32)
    sampling, batch = SamplingBatch(rows), VerifyBatch(rows)
    sampling.int_params.array[:] = 2**40
    sampling.int_params.array[:, IntColumn.DRAFT_ID] = drafts
    for results in (batch.num_accepted, batch.emitted):
        results.array[:] = UNUSED
    batch.first_row.array[:] = batch.row_count.array[:] = 2**30
    batch.fill(starts, counts)
    batch.num_seqs = passed_seqs
    allowed = paddle.to_tensor(rng.integers(0, 2, rows).astype(np.uint8))
    kernel(paddle.to_tensor(target), sampling.int_params.tensor, allowed, batch, relaxed, policy)
    return [batch.num_accepted.array.tolist(), batch.emitted.array.tolist()]


@pytest.mark.parametrize(("relaxed", "policy"), RULES)
@pytest.mark.parametrize("num_seqs", [*range(1, 21), 31, 32, 33, 65])
def test_gpu_verification_gives_the_results_of_the_reference(num_seqs: int, relaxed: bool, policy: int) -> None:
    kernel = emulate(SEEDS[num_seqs % 4])("verify_draft_tokens")
    got = verify(kernel, num_seqs, relaxed, policy, num_seqs)
    assert got == verify(registry.lookup("reference")("verify_draft_tokens"), num_seqs, relaxed, policy, num_seqs)


def test_gpu_verification_of_504_requests_needs_one_launch_and_no_count_from_the_host() -> None:
    expected = verify(registry.lookup("reference")("verify_draft_tokens"), 504, False, 0, 504)
    assert verify(emulate(has_checks=False)("verify_draft_tokens"), 504, False, 0, 504) == expected
    kernel, results = emulate()("verify_draft_tokens"), list[list[int]]()
    with counts_on_device(2**30, 504):
        counted = count(lambda: results.extend(verify(kernel, 504, False, 0, 700)))
    assert results == expected
    assert counted["launches"] == 1


def test_gpu_verification_refuses_an_unknown_policy_and_too_few_rows() -> None:
    kernel, batch, params = emulate()("verify_draft_tokens"), VerifyBatch(2), SamplingBatch(2).int_params.tensor
    target, allowed = paddle.to_tensor([1, 2], dtype="int32"), paddle.zeros([2], "uint8")
    batch.fill([0], [2])
    with pytest.raises(ValueError, match="verify_draft_tokens: accept_policy: expected 0, 1 or 2, got 3"):
        kernel(target, params, allowed, batch, False, 3)
    with pytest.raises(ValueError, match=r"verify_draft_tokens: draft_is_allowed: expected \[2 or more\], got \[1\]"):
        kernel(target, params, allowed[:1], batch, False, AcceptPolicy.NORMAL)
    with pytest.raises(ValueError, match="verify_draft_tokens: target: expected int32, got int64"):
        kernel(target.astype("int64"), params, allowed, batch, False, AcceptPolicy.NORMAL)
