# SPDX-License-Identifier: Apache-2.0
"""Verification: which drafts are accepted, and which tokens are emitted."""

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.sampling import IntColumn, SamplingBatch
from fastdeploy.ops.verify import AcceptPolicy, VerifyBatch, verify_draft_tokens
from tests.ops.sampling_rows import tensor

NONE = -1
both = pytest.mark.parametrize("backend", ["cpu", "reference"])


def params_of(drafts: list[int]) -> paddle.Tensor:
    """Return sampling parameters that hold these drafts."""
    params = SamplingBatch(len(drafts)).int_params
    params.array[:, IntColumn.DRAFT_ID] = drafts
    return params.tensor


def verify(
    backend: str,
    target: list[int],
    drafts: list[int],
    allowed: list[int] | None = None,
    relaxed: bool = False,
    policy: AcceptPolicy = AcceptPolicy.NORMAL,
) -> tuple[int, list[int]]:
    """Verify one request; return (accepted drafts, emitted tokens)."""
    batch = VerifyBatch(len(target))
    batch.emitted.array[:] = -9
    batch.fill([0], [len(target)])
    is_allowed = paddle.to_tensor(np.array(allowed or [0] * len(target), np.uint8), place=paddle.CPUPlace())
    registry.lookup(backend)("verify_draft_tokens")(
        tensor(target), params_of(drafts), is_allowed, batch, relaxed, policy
    )
    accepted = int(batch.num_accepted.array[0])
    return accepted, batch.emitted.array[: accepted + 1].tolist()


@both
@pytest.mark.parametrize(
    ("drafts", "accepted", "emitted"),
    [
        ([1, 2, 3, NONE], 3, [1, 2, 3, 4]),  # all accepted, and the token after the last
        ([1, 2, 9, NONE], 2, [1, 2, 3]),
        ([1, 9, 3, NONE], 1, [1, 2]),  # a later equal draft does not count
        ([9, 2, 3, NONE], 0, [1]),
        ([1, NONE, 3, NONE], 1, [1, 2]),  # drafts end where one is missing
    ],
)
def test_drafts_are_accepted_while_they_equal_the_target(
    backend: str, drafts: list[int], accepted: int, emitted: list[int]
) -> None:
    assert verify(backend, [1, 2, 3, 4], drafts) == (accepted, emitted)


@both
def test_plain_decoding_emits_the_target(backend: str) -> None:
    assert verify(backend, [6], [NONE]) == (0, [6])


@both
def test_the_last_row_verifies_no_draft(backend: str) -> None:
    assert verify(backend, [1, 2], [1, 2]) == (1, [1, 2])


@both
def test_relaxed_accepts_allowed_drafts_and_emits_the_draft(backend: str) -> None:
    drafts, allowed = [1, 8, 9, NONE], [0, 1, 0, 1]
    assert verify(backend, [1, 2, 3, 4], drafts, allowed, relaxed=False) == (1, [1, 2])
    assert verify(backend, [1, 2, 3, 4], drafts, allowed, relaxed=True) == (2, [1, 8, 3])


@both
def test_accept_all_and_reject_all_ignore_the_drafts(backend: str) -> None:
    drafts = [7, 8, 9, NONE]
    assert verify(backend, [1, 2, 3, 4], drafts, policy=AcceptPolicy.ACCEPT_ALL) == (3, [7, 8, 9, 4])
    assert verify(backend, [7, 8, 9, 4], drafts, [1] * 4, relaxed=True, policy=AcceptPolicy.REJECT_ALL) == (0, [7])


@both
def test_a_failed_row_ends_verification_without_a_token(backend: str) -> None:
    assert verify(backend, [1, NONE, 3], [1, 2, NONE]) == (1, [1, NONE])


@both
def test_requests_are_verified_separately_and_rows_between_them_are_unchanged(backend: str) -> None:
    batch = VerifyBatch(9)
    batch.emitted.array[:] = -9
    batch.fill([1, 4, 4, 6], [2, 1, 0, 3])
    allowed = paddle.zeros([9], dtype="uint8").cpu()
    target, params = tensor([0, 5, 6, 0, 7, 0, 1, 2, 3]), params_of([0, 5, 6, 0, 7, 0, 1, 9, 3])
    registry.lookup(backend)("verify_draft_tokens")(target, params, allowed, batch, False, 0)
    assert batch.num_accepted.array[:4].tolist() == [1, 0, -1, 1]
    assert batch.emitted.array.tolist() == [-9, 5, 6, -9, 7, -9, 1, 2, -9]


def test_random_drafts_are_verified_as_by_the_reference() -> None:
    rng = np.random.default_rng(4)
    for relaxed, policy in ((False, 0), (True, 0), (False, 1), (True, 2)):
        counts = rng.integers(0, 7, 200)
        starts = np.cumsum([0, *counts[:-1]])
        rows = int(counts.sum())
        target, drafts = (rng.integers(-1, 3, rows).tolist() for _ in range(2))
        allowed = paddle.to_tensor(rng.integers(0, 2, rows).astype(np.uint8), place=paddle.CPUPlace())
        results = []
        for backend in ("cpu", "reference"):
            batch = VerifyBatch(rows)
            batch.fill(starts, counts)
            registry.lookup(backend)("verify_draft_tokens")(
                tensor(target), params_of(drafts), allowed, batch, relaxed, policy
            )
            results.append((batch.num_accepted.array[:200].tolist(), batch.emitted.array.tolist()))
        assert results[0] == results[1]


def test_invalid_arguments_are_refused_by_name() -> None:
    batch, rows, allowed = VerifyBatch(2), tensor([1, 2]), paddle.zeros([2], dtype="uint8").cpu()
    params = params_of([1, 2])
    batch.fill([0], [2])
    with pytest.raises(ValueError, match="verify_draft_tokens: accept_policy: expected 0, 1 or 2, got 3"):
        verify_draft_tokens(rows, params, allowed, batch, False, 3)
    batch.fill([1], [2])
    with pytest.raises(ValueError, match="verify_draft_tokens: row_count: expected ranges within the rows of target"):
        verify_draft_tokens(rows, params, allowed, batch, False, 0)
    batch.fill([-1], [2])
    with pytest.raises(ValueError, match="verify_draft_tokens: first_row"):
        verify_draft_tokens(rows, params, allowed, batch, False, 0)
