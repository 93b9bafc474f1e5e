# SPDX-License-Identifier: Apache-2.0
"""Measures the times of decoding steps and of draft passes at start-up, before anything is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

TIME_LIMIT_S = 0.7  # of all measurements of a kind; each is made at least twice
CONTEXT_TOKENS = 512  # of each request, where the cache holds twice as many


class DraftRunner(Protocol):
    """A runner of a drafting model, as `spec_decode.drafting` has them."""

    config: RunnerConfig

    def draft(self, requests: Sequence[Request], counts: Sequence[int]) -> list[list[int]]: ...


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int) -> StepTimes:
    """Measure steps of about a dozen row counts from 1 to `max_rows`, fewer where steps are slow.

    The processor time of the calling thread is taken, the least of several measurements. The KV cache must be unused;
    requests have blocks of their own as far as it goes, because a step mostly waits for their keys and values.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 2), num_cache_tokens - max_drafts)
    per_request, max_seqs = 1 + max_drafts, runner.config.max_seqs
    max_rows = min(max_rows, max_seqs * per_request)
    num_plain = min(max_seqs, max_rows, 16)
    counts = [num_plain, 1, per_request, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))]
    shapes = {"plain": [1] * num_plain} | {str(n): _split(n, per_request) for n in counts if n <= max_rows}
    steps = {name: _step(runner, rows, num_tokens, max_drafts) for name, rows in shapes.items()}
    seconds = _least_seconds(steps)
    num_packed = len(shapes[str(num_plain)])
    added_s = (seconds.pop("plain") - seconds[str(num_plain)]) / max(1, num_plain - num_packed)
    request_s = min(max(0.0, added_s), min(seconds.values()) / 2)
    rows_s = {int(name): taken - request_s * len(shapes[name]) for name, taken in seconds.items()}
    return StepTimes(rows_s, request_s, num_tokens)


def time_draft_passes(source: str, max_passes: int, drafter: DraftRunner, num_cache_tokens: int) -> DraftPasses:
    """Measure draft passes of one request and of several, with the first blocks of the unused KV cache."""
    num_tokens = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 4))
    num_blocks = -(-num_tokens // drafter.config.block_size)
    num_passes = min(2, drafter.config.max_drafts)
    sizes = 1, min(drafter.config.max_seqs, 16)
    batches = {str(n): [_request(num_tokens, num_passes, range(num_blocks)) for _ in range(n)] for n in sizes}

    def draft(requests: list[Request]) -> Callable[[], object]:
        return lambda: drafter.draft(requests, [num_passes] * len(requests))

    seconds = _least_seconds({name: draft(requests) for name, requests in batches.items()})
    one_s, many_s = (seconds[str(n)] / num_passes for n in sizes)
    request_s = min(max(0.0, many_s - one_s) / max(1, sizes[1] - 1), one_s / 2)
    return DraftPasses(source, max_passes, one_s - request_s, request_s)


def _least_seconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least time of each call, in rounds that go up and down; slow calls at the end are left out."""
    names, seconds, began_s = list(calls), dict[str, float](), time.perf_counter()
    for call_round in range(16):
        for name in names:
            call_s = time.thread_time()
            calls[name]()
            call_s = time.thread_time() - call_s
            seconds[name] = min(seconds.get(name, call_s), call_s)
            if not call_round and len(seconds) >= 4 and time.perf_counter() - began_s > TIME_LIMIT_S / 2:
                break
        if call_round and time.perf_counter() - began_s > TIME_LIMIT_S:
            break
        names = sorted(seconds, key=seconds.__getitem__, reverse=call_round % 2 == 1)
    return seconds


def _step(runner: ModelRunner, rows: list[int], num_tokens: int, max_drafts: int) -> Callable[[], object]:
    num_blocks = -(-(num_tokens + max_drafts) // runner.config.block_size)
    num_apart = max(1, runner.kv_caches[0].key.shape[0] // num_blocks)
    firsts = (i % num_apart * num_blocks for i in range(len(rows)))
    requests = [_request(num_tokens, n - 1, range(first, first + num_blocks)) for n, first in zip(rows, firsts)]
    computed = [num_tokens - 1] * len(rows)
    plan = StepPlan(requests, rows, computed, [n - 1 for n in rows], rows, [0] * len(rows))
    return lambda: runner.run(plan)


def _split(num_rows: int, per_request: int) -> list[int]:
    """Share rows among as few requests as can have them."""
    full, rest = divmod(num_rows, per_request)
    return [per_request] * full + [rest] * (rest > 0)


def _request(num_tokens: int, num_drafts: int, block_ids: Sequence[int]) -> Request:
    source = GenerationRequest("timing", [0] * num_tokens, SamplingParams(temperature=0.0))
    request = Request(source, 0, 0, num_tokens + num_drafts + 1, num_drafts)
    request.set_draft(Draft([0] * num_drafts))
    request.block_ids = list(block_ids)
    return request
