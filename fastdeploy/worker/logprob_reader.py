# SPDX-License-Identifier: Apache-2.0
"""Reads log-probabilities of tokens and of their most probable alternatives from the logits of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from paddle import Tensor

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import TokenArray
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.sampling import MAX_TOP_LOGPROBS, LogprobBuffers, logprobs

MAX_WIDE_ENTRIES = 1 << 20  # of the buffers for more than MAX_TOP_LOGPROBS alternatives, which take 8 MiB


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

    def read(
        self, first_row: int, token_ids: TokenArray, num_top: int, requested: Sequence[int] = ()
    ) -> list[TokenLogprobs]:
        """Return the log-probability of token_ids[i] in row first_row + i, for each i, with those of the alternatives.

        Args:
            num_top: number of alternatives; -1, and more than the vocabulary has, are all of it.
            requested: ids whose log-probabilities are read in every row as well.
        """
        num_top = self._vocab_size if num_top < 0 else min(num_top, self._vocab_size)
        rows = np.arange(first_row, first_row + len(token_ids), dtype=np.int32)
        entries = self._read_rows(rows, token_ids, num_top)
        if requested:
            ids = np.array(requested, np.int32)
            for row, entry in zip(rows, entries):
                found = self._read_rows(np.full_like(ids, row), ids, 0)
                entry.requested = [(one.token_id, one.logprob, one.rank) for one in found]
        return entries

    def _read_rows(self, rows: TokenArray, token_ids: TokenArray, num_top: int) -> list[TokenLogprobs]:
        """Return the log-probability of token_ids[i] in row rows[i], for each i."""
        buffers = self._buffers_for(num_top)
        size = len(buffers.rows.array)
        return [
            entry
            for begin in range(0, len(token_ids), size)
            for entry in self._read(rows[begin : begin + size], token_ids[begin : begin + size], num_top, buffers)
        ]

    def _buffers_for(self, num_top: int) -> LogprobBuffers:
        if num_top <= MAX_TOP_LOGPROBS:
            return self._buffers
        if self._wide_buffers is None or num_top > self._wide_buffers.top_ids.array.shape[1]:
            num_rows = max(1, min(self._capacity, MAX_WIDE_ENTRIES // num_top))
            self._wide_buffers = LogprobBuffers(num_rows, num_top)
        return self._wide_buffers

    def _read(
        self, rows: TokenArray, token_ids: TokenArray, num_top: int, buffers: LogprobBuffers
    ) -> list[TokenLogprobs]:
        count = len(token_ids)
        buffers.rows.array[:count] = rows
        buffers.chosen.array[:count] = token_ids
        buffers.upload(count)
        logprobs(self._logits, buffers.rows.tensor, buffers.chosen.tensor, count, num_top, buffers)
        buffers.download(count)
        selected_backend().synchronize()
        top_ids, top_values = buffers.top_ids.array[:count, :num_top], buffers.top_logprobs.array[:count, :num_top]
        return [
            TokenLogprobs(token_id, value, rank, [(i, v) for i, v in zip(ids, values) if v > -math.inf])
            for token_id, value, rank, ids, values in zip(
                token_ids.tolist(),
                buffers.chosen_logprob.array[:count].tolist(),
                buffers.chosen_rank.array[:count].tolist(),
                top_ids.tolist(),
                top_values.tolist(),
            )
        ]
