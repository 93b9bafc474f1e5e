# SPDX-License-Identifier: Apache-2.0
"""Times decoding steps of a runner before it serves."""

from __future__ import annotations

import time

import numpy as np

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.worker.model_runner import ModelRunner

NUM_COMPUTED = 64  # tokens in the cache of each request that is timed, where the cache holds so many
MIN_SIZES = 3  # timed however long they take: one row, two, and three
TIME_LIMIT_S = 0.7  # no size is timed that would go beyond it
REPEATS = 6


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int) -> dict[int, float]:
    """Return rows: seconds for about a dozen row counts from 1 to `max_rows`, fewer where the steps are slow.

    The least of several times is taken, as whatever disturbs a step makes it longer; the sizes take turns.

    Requests have as many drafts as they may. They all write to the first blocks of the cache, which must be unused.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(NUM_COMPUTED, num_cache_tokens - max_drafts)
    max_rows = min(max_rows, runner.config.max_seqs * (1 + max_drafts))
    runner.verify(runner.forward(plan := _make_plan(runner, 1, 0, num_tokens)), plan)  # what only the first step does
    begin = time.perf_counter()
    timings: dict[int, float] = {}
    plans: dict[int, StepPlan] = {}
    for num_rows in _row_counts(max_rows):
        elapsed_s = time.perf_counter() - begin
        if len(timings) >= MIN_SIZES and REPEATS * (elapsed_s + 2 * max(timings.values())) > TIME_LIMIT_S:
            break
        plans[num_rows] = _make_plan(runner, num_rows, max_drafts, num_tokens)
        timings[num_rows] = _time_step(runner, plans[num_rows])
    for _ in range(REPEATS - 1):
        for num_rows, plan in plans.items():
            timings[num_rows] = min(timings[num_rows], _time_step(runner, plan))
    return timings


def _row_counts(max_rows: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ... and `max_rows`."""
    counts = sorted({1, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))})
    return [*(n for n in counts if n < max_rows), max_rows]


def _time_step(runner: ModelRunner, plan: StepPlan) -> float:
    begin = time.perf_counter()
    runner.verify(runner.forward(plan), plan)
    return time.perf_counter() - begin


def _make_plan(runner: ModelRunner, num_rows: int, max_drafts: int, num_tokens: int) -> StepPlan:
    full, rest = divmod(num_rows, 1 + max_drafts)
    scheduled = np.array([1 + max_drafts] * full + [rest] * (rest > 0), np.int32)
    num_blocks = -(-(num_tokens + max_drafts) // runner.config.block_size)
    requests = tuple(_make_request(num_tokens, int(n) - 1, num_blocks) for n in scheduled)
    computed = np.full(len(scheduled), num_tokens - 1, np.int32)
    return StepPlan(requests, scheduled, computed, scheduled - 1, scheduled, np.zeros(len(scheduled), np.int32))


def _make_request(num_tokens: int, num_drafts: int, num_blocks: int) -> Request:
    source = GenerationRequest("timing", [0] * num_tokens, SamplingParams(temperature=0.0))
    request = Request(source, 0, 0, num_tokens + num_drafts + 1, num_drafts)
    request.set_draft(Draft(np.zeros(num_drafts, np.int32)))
    request.block_ids = list(range(num_blocks))
    return request
