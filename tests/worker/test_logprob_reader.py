# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of any number of alternatives are those of the reference, whatever the buffers hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.reference import sampling as reference
from fastdeploy.ops.sampling import LogprobBuffers
from fastdeploy.worker import logprob_reader
from fastdeploy.worker.logprob_reader import LogprobQuery, LogprobReader
from tests.ops.sampling_rows import logits_of, random_logits, tensor

ROWS, VOCAB = 7, 300


@pytest.fixture
def logits() -> HostBuffer:
    values = random_logits(np.random.default_rng(3), ROWS, VOCAB)
    values[2, 40:240] = -np.inf
    return logits_of(values)


def expected(logits: HostBuffer, first_row: int, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    out, count = LogprobBuffers(len(token_ids), VOCAB), len(token_ids)
    rows = tensor(list(range(first_row, first_row + count)))
    reference.logprobs(logits.tensor, rows, tensor(token_ids), count, num_top, out)
    top_ids, top_values = out.top_ids.array[:, :num_top].tolist(), out.top_logprobs.array[:, :num_top].tolist()
    return [
        TokenLogprobs(
            token_id,
            out.chosen_logprob.array[i].item(),
            out.chosen_rank.array[i].item(),
            [(t, v) for t, v in zip(top_ids[i], top_values[i]) if v > -np.inf],
        )
        for i, token_id in enumerate(token_ids)
    ]


def check(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> None:
    assert [(one.token_id, one.rank, [t for t, _ in one.top]) for one in found] == [
        (one.token_id, one.rank, [t for t, _ in one.top]) for one in wanted
    ]
    for one, other in zip(found, wanted):
        values = [one.logprob, *(v for _, v in one.top)], [other.logprob, *(v for _, v in other.top)]
        assert np.allclose(*values, rtol=2e-7, atol=2e-6)


@pytest.mark.parametrize("max_entries", [1 << 20, 2 * VOCAB, 1])
def test_any_number_of_alternatives_in_any_order_of_calls(
    monkeypatch: pytest.MonkeyPatch, logits: HostBuffer, max_entries: int
) -> None:
    monkeypatch.setattr(logprob_reader, "MAX_WIDE_ENTRIES", max_entries)
    reader, token_ids = LogprobReader(logits.tensor), [5, 299, 20, 0, 7]
    for num_top in (0, 20, 21, 3, VOCAB - 1, 25, VOCAB, 1):
        [found] = reader.read([LogprobQuery(1, np.array(token_ids, np.int32), num_top)])
        check(found, expected(logits, 1, token_ids, num_top))
    assert reader.read([LogprobQuery(1, np.zeros(0, np.int32), 50)]) == [[]]


def test_minus_one_and_more_than_the_vocabulary_are_the_vocabulary(logits: HostBuffer) -> None:
    reader = LogprobReader(logits.tensor)
    for num_top in (-1, VOCAB + 1, 2**31 - 1):
        [[found]] = reader.read([LogprobQuery(0, np.array([9], np.int32), num_top)])
        assert sorted(token_id for token_id, _ in found.top) == list(range(VOCAB))
        assert sum(np.exp(value) for _, value in found.top) == pytest.approx(1.0, abs=1e-5)
        assert found.top[found.rank - 1] == (9, found.logprob)


@pytest.mark.parametrize("num_ids", [1, 3, 20])
def test_requested_ids_have_the_same_bits_as_alternatives(logits: HostBuffer, num_ids: int) -> None:
    reader, requested = LogprobReader(logits.tensor), [250, 299, 40, *range(17)][:num_ids]
    [entries] = reader.read([LogprobQuery(1, np.array([5, 299, 20], np.int32), -1, requested)])
    for entry in entries:
        ranks = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
        assert [token_id for token_id, _, _ in entry.requested] == requested
        for token_id, logprob, rank in entry.requested:
            assert token_id not in ranks or (logprob, rank) == ranks[token_id]
            assert token_id in ranks or logprob == -np.inf
    [[entry]] = reader.read([LogprobQuery(0, np.array([9], np.int32), 3)])
    assert entry.requested == []


def test_queries_of_many_requests_are_answered_as_each_of_them_alone(
    monkeypatch: pytest.MonkeyPatch, logits: HostBuffer
) -> None:
    queries = [
        LogprobQuery(first, np.array(ids, np.int32), num_top, requested)
        for first, ids, num_top, requested in (
            *((4, [7, 8], 0, []), (0, [9], 3, [1, 2]), (2, [30, 31, 32], 40, [299])),
            *((6, [5], 20, []), (1, [], 2, [4]), (0, [250], -1, [])),
        )
    ]
    calls, logprobs = [], logprob_reader.logprobs

    def counting(*arguments: Any) -> None:
        calls.append(arguments[4])
        logprobs(*arguments)

    monkeypatch.setattr(logprob_reader, "logprobs", counting)
    reader = LogprobReader(logits.tensor)
    found = reader.read(queries)
    assert calls == [20, 40, VOCAB, 0]
    assert found == [reader.read([query])[0] for query in queries]


def test_buffers_for_many_alternatives_are_allocated_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, logits: HostBuffer
) -> None:
    sizes: list[tuple[int, int]] = []

    class Recorder(LogprobBuffers):
        def __init__(self, max_rows: int, max_top_n: int = 20) -> None:
            sizes.append((max_rows, max_top_n))
            super().__init__(max_rows, max_top_n)

    monkeypatch.setattr(logprob_reader, "LogprobBuffers", Recorder)
    reader, token = LogprobReader(logits.tensor), np.array([9], np.int32)
    for num_top in (0, 20, 50, 40, 50, -1, 60):
        reader.read([LogprobQuery(0, token, num_top)])
    assert sizes == [(7, 20), (7, 50), (7, 300)]
