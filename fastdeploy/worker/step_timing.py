# SPDX-License-Identifier: Apache-2.0
"""Measures the times of decoding steps and of draft passes at start-up, before anything is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fastdeploy.core.length_policy import Clock
from fastdeploy.core.request import Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.spec_decode.adaptive.step_times import StepTimes
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

TIME_LIMIT_S = 0.7  # of all measurements of a kind; each is made at least twice
CONTEXT_TOKENS = 512  # of each request, where the cache holds twice as many


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int, clock: Clock) -> StepTimes:
    """Measure steps of about a dozen row counts from 1 to `max_rows`, fewer where steps are slow.

    The KV cache must be unused. Requests have blocks of their own as far as it goes, because what a request adds to a
    step is mostly the reading of its keys and values.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 2), num_cache_tokens - max_drafts)
    per_request, max_seqs = 1 + max_drafts, runner.config.max_seqs
    max_rows = min(max_rows, max_seqs * per_request)
    num_plain = min(max_seqs, max_rows, 16)
    counts = [num_plain, 1, per_request, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))]
    packed = {n: [per_request] * (n // per_request) + [n % per_request] * (n % per_request > 0) for n in counts}
    shapes = {0: [1] * num_plain} | {n: rows for n, rows in packed.items() if n <= max_rows}  # 0: without drafts
    plans = {name: _plan(runner, rows, num_tokens, max_drafts) for name, rows in shapes.items()}
    seconds = _least_seconds({name: partial(runner.run, plan) for name, plan in plans.items()}, clock)
    added_s = (seconds.pop(0) - seconds[num_plain]) / max(1, num_plain - len(packed[num_plain]))
    request_s = min(max(0.0, added_s), min(seconds.values()) / 2)
    return StepTimes({n: taken - request_s * len(packed[n]) for n, taken in seconds.items()}, request_s, num_tokens)


def time_draft_passes(
    draft: Callable[..., object], config: RunnerConfig, num_cache_tokens: int, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of a draft pass without its requests, and of each request; they share the first blocks."""
    num_tokens, num_passes = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 4)), min(2, config.max_drafts)
    many, blocks = min(config.max_seqs, 16), range(-(-num_tokens // config.block_size))
    batches = {n: [_request(num_tokens, num_passes, blocks) for _ in range(n)] for n in (1, many)}
    calls = {n: partial(draft, requests, [num_passes] * n) for n, requests in batches.items()}
    seconds = {n: taken / num_passes for n, taken in _least_seconds(calls, clock).items()}
    request_s = min(max(0.0, seconds[many] - seconds[1]) / max(1, many - 1), seconds[1] / 2)
    return seconds[1] - request_s, request_s


def _least_seconds(calls: Mapping[int, Callable[[], object]], clock: Clock) -> dict[int, float]:
    """Return the least time of each call, in rounds from fast to slow and back; too slow ones are left out."""
    seconds: dict[int, float] = {}
    order, total_s = list(calls), 0.0
    for call_round in range(16):
        for name in order:
            if not call_round and len(seconds) >= 4 and total_s > TIME_LIMIT_S / 2:
                break
            began_s = clock()
            calls[name]()
            call_s = clock() - began_s
            total_s += call_s
            seconds[name] = min(seconds.get(name, call_s), call_s)
        if call_round and total_s > TIME_LIMIT_S:
            break
        order = sorted(seconds, key=seconds.__getitem__, reverse=call_round % 2 == 1)
    return seconds


def _plan(runner: ModelRunner, rows: list[int], num_tokens: int, max_drafts: int) -> StepPlan:
    num_blocks = -(-(num_tokens + max_drafts) // runner.config.block_size)
    num_apart = max(1, runner.kv_caches[0].key.shape[0] // num_blocks)
    firsts = (i % num_apart * num_blocks for i in range(len(rows)))
    requests = [_request(num_tokens, n - 1, range(first, first + num_blocks)) for n, first in zip(rows, firsts)]
    return StepPlan([ScheduledRequest(r, n, num_tokens - 1, r.draft, n) for r, n in zip(requests, rows)])


def _request(num_tokens: int, num_drafts: int, block_ids: Sequence[int]) -> Request:
    source = GenerationRequest("timing", [0] * num_tokens, SamplingParams(temperature=0.0))
    request = Request(source, 0, 0, num_tokens + num_drafts + 1, num_drafts)
    request.set_draft(Draft([0] * num_drafts))
    request.block_ids = list(block_ids)
    return request
