# SPDX-License-Identifier: Apache-2.0
"""Splits the rows with logits of a step into batches that fit the logits buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fastdeploy.core.step import StepPlan


@dataclass(slots=True)
class LogitsRange:
    """Consecutive rows with logits of one request: all its verification rows, or some of its prompt rows.

    Attributes:
        request_index: of the request in the plan.
        position: of the first row in the request's tokens; set for prompt rows only.
        first_row: of the range in its logits batch.
    """

    request_index: int
    num_rows: int
    is_prompt: bool = False
    position: int = 0
    first_row: int = 0


def split_logits_batches(plan: StepPlan, capacity: int) -> list[list[LogitsRange]]:
    """Split the rows with logits into batches of at most `capacity` rows, in order; verification rows stay together.

    Returns:
        At least one batch; it is empty if no row needs logits.
    """
    ranges = _logits_ranges(plan)
    if sum([rows.num_rows for rows in ranges]) <= capacity:
        return [ranges]
    return list(_split(ranges, capacity))


def _split(ranges: list[LogitsRange], capacity: int) -> Iterator[list[LogitsRange]]:
    batch: list[LogitsRange] = []
    room = capacity
    for rows in ranges:
        if rows.num_rows > room and not rows.is_prompt:
            yield batch
            batch, room = [], capacity
        while rows.num_rows > room:
            yield [*batch, replace(rows, num_rows=room)] if room else batch
            rows = replace(rows, position=rows.position + room, num_rows=rows.num_rows - room)
            batch, room = [], capacity
        batch.append(rows)
        room -= rows.num_rows
    yield batch


def _logits_ranges(plan: StepPlan) -> list[LogitsRange]:
    """Return the ranges of each request, in order: its prompt rows with logits, then its verification rows."""
    ranges = []
    for index, s in enumerate(plan.requests):
        if s.num_prompt_logprob_rows:
            end = s.num_computed_tokens + s.num_scheduled_tokens - s.num_verify_rows
            first = end - s.num_prompt_logprob_rows
            ranges.append(LogitsRange(index, s.num_prompt_logprob_rows, is_prompt=True, position=first))
        if s.num_verify_rows:
            ranges.append(LogitsRange(index, s.num_verify_rows))
    return ranges
