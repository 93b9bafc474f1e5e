# SPDX-License-Identifier: Apache-2.0
"""Reads log-probabilities of tokens and of their most probable alternatives from the logits of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paddle import Tensor

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import TokenArray
from fastdeploy.ops.input_checks import check_logprob_rows
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import MAX_TOP_LOGPROBS, LogprobBuffers, logprobs

MAX_WIDE_ENTRIES = 1 << 20  # of the buffers for more than MAX_TOP_LOGPROBS alternatives, which take 8 MiB


@dataclass(frozen=True)
class LogprobQuery:
    """Consecutive rows whose log-probabilities are read.

    Attributes:
        first_row: of the logits.
        token_ids: [n] int32, the token whose log-probability is read in each row.
        num_top: number of alternatives; -1, and more than the vocabulary has, are all of it.
        requested: ids whose log-probabilities are read in every row as well.
    """

    first_row: int
    token_ids: TokenArray
    num_top: int
    requested: Sequence[int] = ()


class LogprobReader:
    """Computes log-probabilities, in one call or, with many alternatives, in several calls of fewer rows."""

    def __init__(self, logits: Tensor) -> None:
        """Allocate buffers for MAX_TOP_LOGPROBS alternatives; those for more are allocated when they are needed.

        Args:
            logits: [capacity, V] float32, which every step overwrites.
        """
        self._logits = logits
        self._capacity, self._vocab_size = logits.shape
        self._buffers = LogprobBuffers(self._capacity)
        self._wide_buffers: LogprobBuffers | None = None
        self._shares_memory = selected_backend().shares_memory

    def read(self, queries: Sequence[LogprobQuery]) -> list[list[TokenLogprobs]]:
        """Return the entry of each row of each query.

        All queries with at most MAX_TOP_LOGPROBS alternatives are read together, and so are all requested ids.
        """
        results: list[list[TokenLogprobs]] = [[] for _ in queries]
        widths = [self._num_top(query) for query in queries]
        narrow = [i for i, width in enumerate(widths) if width <= MAX_TOP_LOGPROBS]
        for group in (narrow, *([i] for i, width in enumerate(widths) if width > MAX_TOP_LOGPROBS)):
            rows = [(row, token, widths[i]) for i in group for row, token in _rows_of(queries[i])]
            found = iter(self._read_rows(rows))
            for i in group:
                results[i] = [next(found) for _ in queries[i].token_ids]
        self._read_requested(queries, results)
        return results

    def _read_requested(self, queries: Sequence[LogprobQuery], results: Sequence[list[TokenLogprobs]]) -> None:
        """Add the log-probabilities of the requested ids to the entries of their rows."""
        rows = [(row, token, 0) for query in queries for row, _ in _rows_of(query) for token in query.requested]
        found = iter(self._read_rows(rows))
        for query, entries in zip(queries, results):
            for entry in entries:
                ones = [next(found) for _ in query.requested]
                entry.requested = [(one.token_id, one.logprob, one.rank) for one in ones]

    def _num_top(self, query: LogprobQuery) -> int:
        return self._vocab_size if query.num_top < 0 else min(query.num_top, self._vocab_size)

    def _read_rows(self, rows: Sequence[tuple[int, int, int]]) -> list[TokenLogprobs]:
        """Return the entry of each (row, token, number of alternatives)."""
        if not rows:
            return []
        num_top = max(count for _, _, count in rows)
        buffers = self._buffers_for(num_top)
        size = len(buffers.rows.array)
        return [
            entry
            for begin in range(0, len(rows), size)
            for entry in self._read(rows[begin : begin + size], num_top, buffers)
        ]

    def _buffers_for(self, num_top: int) -> LogprobBuffers:
        if num_top <= MAX_TOP_LOGPROBS:
            return self._buffers
        if self._wide_buffers is None or num_top > self._wide_buffers.top_ids.array.shape[1]:
            num_rows = max(1, min(self._capacity, MAX_WIDE_ENTRIES // num_top))
            self._wide_buffers = LogprobBuffers(num_rows, num_top)
        return self._wide_buffers

    def _read(self, rows: Sequence[tuple[int, int, int]], num_top: int, buffers: LogprobBuffers) -> list[TokenLogprobs]:
        count = len(rows)
        buffers.rows.array[:count] = [row for row, _, _ in rows]
        buffers.chosen.array[:count] = [token for _, token, _ in rows]
        if not self._shares_memory:
            check_logprob_rows(buffers, count, self._capacity, self._vocab_size)
        buffers.upload(count)
        logprobs(self._logits, buffers.rows.tensor, buffers.chosen.tensor, count, num_top, buffers)
        buffers.download(count)
        selected_backend().synchronize()
        top_ids, top_values = buffers.top_ids.array[:count, :num_top], buffers.top_logprobs.array[:count, :num_top]
        return [
            TokenLogprobs(token_id, value, rank, [(i, v) for i, v in zip(ids[:width], values) if v > -math.inf])
            for (_, token_id, width), value, rank, ids, values in zip(
                rows,
                buffers.chosen_logprob.array[:count].tolist(),
                buffers.chosen_rank.array[:count].tolist(),
                top_ids.tolist(),
                top_values.tolist(),
            )
        ]


def _rows_of(query: LogprobQuery) -> Iterator[tuple[int, int]]:
    """Yield each row with its token."""
    return enumerate(query.token_ids.tolist(), start=query.first_row)
