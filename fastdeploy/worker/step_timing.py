# SPDX-License-Identifier: Apache-2.0
"""Measures the times of decoding steps and of draft passes at start-up, before requests are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fastdeploy.core.length_policy import Clock
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.spec_decode.adaptive.step_times import StepTimes
from fastdeploy.worker.full_step import make_request
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

TIME_LIMIT_S = 0.7  # for all steps, and for all draft passes; each one is measured at least twice
CONTEXT_TOKENS = 512  # of each request, if the cache holds at least twice as many


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int, clock: Clock) -> StepTimes:
    """Measure steps of about a dozen row counts from 1 to `max_rows`, fewer if steps are slow.

    The KV cache must be unused. As far as it suffices, requests have separate blocks, because the time that a request
    adds to a step is mostly spent reading its keys and values.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 2), num_cache_tokens - max_drafts)
    per_request, max_seqs = 1 + max_drafts, runner.config.max_seqs
    max_rows = min(max_rows, max_seqs * per_request)
    num_plain = min(max_seqs, max_rows, 16)
    counts = [num_plain, 1, per_request, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))]
    packed = {n: [per_request] * (n // per_request) + [n % per_request] * (n % per_request > 0) for n in counts}
    shapes = {0: [1] * num_plain} | {n: rows for n, rows in packed.items() if n <= max_rows}  # 0: without drafts
    plans = {key: _make_plan(runner, rows, num_tokens, max_drafts) for key, rows in shapes.items()}
    seconds = _min_seconds({key: partial(runner.run, plan) for key, plan in plans.items()}, clock)
    added_s = (seconds.pop(0) - seconds[num_plain]) / max(1, num_plain - len(packed[num_plain]))
    request_s = min(max(0.0, added_s), min(seconds.values()) / 2)
    return StepTimes({n: step_s - request_s * len(packed[n]) for n, step_s in seconds.items()}, request_s, num_tokens)


def time_draft_passes(
    draft: Callable[..., object], config: RunnerConfig, num_cache_tokens: int, clock: Clock
) -> tuple[float, float]:
    """Return the seconds of a draft pass without its requests' share, and of each request; all use the same blocks."""
    num_tokens, num_passes = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 4)), min(2, config.max_drafts)
    num_seqs, blocks = min(config.max_seqs, 16), range(-(-num_tokens // config.block_size))
    batches = {n: [make_request(num_tokens, num_passes, blocks) for _ in range(n)] for n in (1, num_seqs)}
    calls = {n: partial(draft, requests, [num_passes] * n) for n, requests in batches.items()}
    seconds = {n: call_s / num_passes for n, call_s in _min_seconds(calls, clock).items()}
    request_s = min(max(0.0, seconds[num_seqs] - seconds[1]) / max(1, num_seqs - 1), seconds[1] / 2)
    return seconds[1] - request_s, request_s


def _min_seconds(calls: Mapping[int, Callable[[], object]], clock: Clock) -> dict[int, float]:
    """Return the minimum time of each call over rounds in alternating order; calls that are too slow are left out."""
    seconds: dict[int, float] = {}
    order, total_s = list(calls), 0.0
    for call_round in range(16):
        for key in order:
            if not call_round and len(seconds) >= 4 and total_s > TIME_LIMIT_S / 2:
                break
            start_s = clock()
            calls[key]()
            call_s = clock() - start_s
            total_s += call_s
            seconds[key] = min(seconds.get(key, call_s), call_s)
        if call_round and total_s > TIME_LIMIT_S:
            break
        order = sorted(seconds, key=seconds.__getitem__, reverse=call_round % 2 == 1)
    return seconds


def _make_plan(runner: ModelRunner, rows: list[int], num_tokens: int, max_drafts: int) -> StepPlan:
    num_blocks = -(-(num_tokens + max_drafts) // runner.config.block_size)
    num_separate = max(1, runner.kv_caches[0].key.shape[0] // num_blocks)
    firsts = (i % num_separate * num_blocks for i in range(len(rows)))
    requests = [make_request(num_tokens, n - 1, range(first, first + num_blocks)) for n, first in zip(rows, firsts)]
    return StepPlan([ScheduledRequest(r, n, num_tokens - 1, r.draft, n) for r, n in zip(requests, rows)])
