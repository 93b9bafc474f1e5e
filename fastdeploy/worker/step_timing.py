# SPDX-License-Identifier: Apache-2.0
"""Times decoding steps of a runner, and calls of a drafting model, before they serve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.step_cost import CallCost, StepCost
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

NUM_COMPUTED = 512  # tokens in the cache of each request that is timed, where the cache holds twice as many
MIN_SIZES = 4  # timed however long they take: many requests with and without drafts, one row, all drafts of a request
TIME_LIMIT_S = 0.7  # no size is timed, and none more than twice, that would go beyond it
REPEATS = 6  # at least, of sizes that can be done without
MOST_TURNS = 12  # of everything
CALL_DRAFTS = 2  # of each request, where that many are made
CALL_FILLS = 3  # requests whose caches are filled, where the cache is as large
CALL_CROWD = 16  # requests of a call of several


class DraftRunner(Protocol):
    """A runner of a drafting model, as `spec_decode.drafting` has them."""

    config: RunnerConfig

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]: ...


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int) -> StepCost:
    """Time about a dozen row counts from 1 to `max_rows`, fewer where steps are slow, and what a request adds.

    The calling thread's own time is taken, the least of several, as whatever else the machine does makes a step only
    longer; the sizes take turns. Too short a time corrects itself: drafts are then verified, and their steps measured.

    The cache must be unused. Requests have blocks of their own as far as it goes: what a request adds to a step is
    mostly reading its keys and values, which lie in a near cache if they are another one's too.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(NUM_COMPUTED, max(1, num_cache_tokens // 2), num_cache_tokens - max_drafts)
    max_rows = min(max_rows, runner.config.max_seqs * (1 + max_drafts))
    timer = _Timer(runner, num_tokens, max_drafts)
    sizes = _row_counts(max_rows, 1 + max_drafts)
    lone = min(runner.config.max_seqs, max_rows, 16)  # requests without drafts
    timer.add("lone", [1] * lone)
    for num_rows in (lone, *(size for size in sizes if size != lone)):
        if timer.has_time():
            timer.add(num_rows, _split(num_rows, 1 + max_drafts))
    timer.repeat()
    num_packed = len(_split(lone, 1 + max_drafts))
    added_s = (timer.seconds["lone"] - timer.seconds[lone]) / max(1, lone - num_packed)
    request_s = min(max(0.0, added_s), min(timer.seconds.values()) / 2)
    timed = ((rows, seconds) for rows, seconds in timer.seconds.items() if isinstance(rows, int))
    lines = {rows: seconds - request_s * len(_split(rows, 1 + max_drafts)) for rows, seconds in timed}
    return StepCost(lines, request_s, num_tokens)


def time_calls(drafter: DraftRunner, num_cache_tokens: int) -> CallCost:
    """Time calls of a drafting model as `time_steps` does steps: of one request, of several, and with a cache to fill.

    All requests have the first blocks of the cache, which must be unused.
    """
    size, drafts = drafter.config.block_size, min(CALL_DRAFTS, drafter.config.max_drafts)
    num_tokens = min(NUM_COMPUTED, max(1, num_cache_tokens // 4))
    num_blocks = -(-num_tokens // size)
    groups = max(1, min(CALL_FILLS, num_cache_tokens // size // num_blocks))

    def make_requests(first_block: int, count: int) -> list[Request]:
        requests = [_make_request(num_tokens, drafts, num_blocks) for _ in range(count)]
        for request in requests:
            request.block_ids = [first_block + block for block in request.block_ids]
        return requests

    def seconds(requests: Sequence[Request]) -> float:
        began_s = time.thread_time()
        drafter.draft(requests, [drafts] * len(requests))
        return (time.thread_time() - began_s) / drafts

    filling_s = min(seconds(make_requests(group * num_blocks, 1)) for group in range(groups)) * drafts
    lone, crowd = make_requests(0, 1), make_requests(0, min(drafter.config.max_seqs, CALL_CROWD))
    one_s = min(seconds(lone) for _ in range(REPEATS))
    many_s = min(seconds(crowd) for _ in range(REPEATS))
    request_s = min(max(0.0, many_s - one_s) / max(1, len(crowd) - 1), one_s / 2)
    row_s = max(0.0, filling_s - drafts * one_s) / max(1, num_tokens - 1)
    return CallCost(one_s - request_s, request_s, row_s)


class _Timer:
    """The least time of each plan."""

    def __init__(self, runner: ModelRunner, num_tokens: int, max_drafts: int) -> None:
        self.seconds: dict[int | str, float] = {}
        self._runner, self._num_tokens, self._max_drafts = runner, num_tokens, max_drafts
        self._plans: dict[int | str, StepPlan] = {}
        self._time(self._make_plan([1]))  # what only the first step does
        self._began_s = time.perf_counter()
        self._longest_s = 0.0

    def add(self, name: int | str, num_rows: list[int]) -> None:
        """Time a step of requests with so many rows each."""
        began_s = time.perf_counter()
        self._plans[name] = self._make_plan(num_rows)
        self.seconds[name] = self._time(self._plans[name])
        self._longest_s = max(self._longest_s, time.perf_counter() - began_s)

    def has_time(self) -> bool:
        """True while repeats of what was timed so far, and of something twice as long, end in time."""
        elapsed_s = time.perf_counter() - self._began_s
        return len(self.seconds) < MIN_SIZES or REPEATS * (elapsed_s + 2 * self._longest_s) < TIME_LIMIT_S

    def repeat(self) -> None:
        """Time everything again, in turns from few rows to many and back; slow steps only once.

        A step finds the caches as one of about as many rows has left them: so steps follow each other in a server.
        """
        turn = sorted(self._plans.items(), key=lambda named: sum(named[1].num_scheduled))
        for _ in range(MOST_TURNS):
            for name, plan in turn:
                self.seconds[name] = min(self.seconds[name], self._time(plan))
            if time.perf_counter() - self._began_s > TIME_LIMIT_S:
                return
            turn.reverse()

    def _time(self, plan: StepPlan) -> float:
        began_s = time.thread_time()
        self._runner.run(plan)
        return time.thread_time() - began_s

    def _make_plan(self, num_rows: list[int]) -> StepPlan:
        num_blocks = -(-(self._num_tokens + self._max_drafts) // self._runner.config.block_size)
        requests = [_make_request(self._num_tokens, n - 1, num_blocks) for n in num_rows]
        num_apart = max(1, self._runner.kv_caches[0].key.shape[0] // num_blocks)
        for i, request in enumerate(requests):
            request.block_ids = [i % num_apart * num_blocks + block for block in request.block_ids]
        computed = [self._num_tokens - 1] * len(num_rows)
        return StepPlan(requests, num_rows, computed, [n - 1 for n in num_rows], num_rows, [0] * len(num_rows))


def _row_counts(max_rows: int, most: int) -> list[int]:
    """Return 1, the `most` rows of a request, 2, 4, 8, ... , then 3, 6, 12, ... between them, up to `max_rows`."""
    counts = [1, most, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))]
    return [n for n in dict.fromkeys(counts) if n <= max_rows]


def _split(num_rows: int, most: int) -> list[int]:
    """Share rows among as few requests as can have them."""
    full, rest = divmod(num_rows, most)
    return [most] * full + [rest] * (rest > 0)


def _make_request(num_tokens: int, num_drafts: int, num_blocks: int) -> Request:
    source = GenerationRequest("timing", [0] * num_tokens, SamplingParams(temperature=0.0))
    request = Request(source, 0, 0, num_tokens + num_drafts + 1, num_drafts)
    request.set_draft(Draft([0] * num_drafts))
    request.block_ids = list(range(num_blocks))
    return request
