# SPDX-License-Identifier: Apache-2.0
"""Measures the times of decoding steps and of draft passes at start-up, before requests are served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import cycle, repeat

from fastdeploy.core.length_policy import Clock
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.ops.experts import ExpertLoad
from fastdeploy.spec_decode.adaptive.distinct_experts import DistinctExperts
from fastdeploy.spec_decode.adaptive.step_times import StepTimes
from fastdeploy.worker.full_step import make_request, spread_tokens
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

TIME_LIMIT_S = 0.7  # for all steps, and for all drafts of one length; each one is measured at least twice
CONTEXT_TOKENS = 512  # of each request, if the cache holds at least twice as many
LONG_CONTEXT_TOKENS = 8 * CONTEXT_TOKENS  # of single requests, if the cache holds as many
WITHOUT_DRAFTS, EQUAL_ROWS = 0, 1 << 30  # keys of special steps; that of n rows is n, or -n with a long context


def time_steps(runner: ModelRunner, max_rows: int, max_drafts: int, num_cache_tokens: int, clock: Clock) -> StepTimes:
    """Measure steps of about a dozen row counts from 1 to `max_rows`, fewer if steps are slow.

    The KV cache must be unused. As far as it suffices, requests have separate blocks, because the time that a request
    adds to a step is mostly spent reading its keys and values. Steps of one request with a long context tell what the
    context adds to each of its rows. If the model has experts, rows of random tokens read many of them, and a step of
    as many equal rows tells how long reading one takes.
    """
    max_drafts = min(max_drafts, num_cache_tokens - 1)
    num_tokens = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 2), num_cache_tokens - max_drafts)
    per_request, max_seqs = 1 + max_drafts, runner.config.max_seqs
    max_rows = min(max_rows, max_seqs * per_request)
    num_plain = min(max_seqs, max_rows, 16)
    counts = [num_plain, 1, per_request, *(2**i for i in range(1, 16)), *(3 * 2**i for i in range(15))]
    packed = {n: [per_request] * (n // per_request) + [n % per_request] * (n % per_request > 0) for n in counts}
    shapes = {WITHOUT_DRAFTS: [1] * num_plain} | {n: rows for n, rows in packed.items() if n <= max_rows}
    tokens = spread_tokens(runner.config)
    plans = {key: make_plan(runner, rows, num_tokens, max_drafts, tokens) for key, rows in shapes.items()}
    most, num_long = min(per_request, max_rows), min(LONG_CONTEXT_TOKENS, num_cache_tokens - max_drafts)
    plans = {-n: make_plan(runner, [n], num_long, max_drafts, tokens) for n in (1, most)} | plans
    experts, load = None, runner.model.expert_load
    if load is None:
        seconds = _min_seconds({key: partial(runner.run, plan) for key, plan in plans.items()}, clock)
    else:
        num_equal = max(num_plain, per_request)
        equal = make_plan(runner, packed[num_equal], num_tokens, max_drafts, repeat(0))
        seconds, expert_s = _without_experts(runner, load, {EQUAL_ROWS: equal} | plans, num_equal, clock)
        experts = DistinctExperts(load.array, load.num_experts, load.num_chosen, expert_s)
    added_s = [seconds[-n] - seconds[n] for n in (1, most)]  # by the longer context of one request with n rows
    context_s = max(0.0, added_s[1] - added_s[0]) / max(1, (most - 1) * (num_long - num_tokens)) * num_tokens
    separate_s = (seconds[WITHOUT_DRAFTS] - seconds[num_plain]) / max(1, num_plain - len(packed[num_plain]))
    seconds = {n: step_s for n, step_s in seconds.items() if n > 0}
    request_s = min(max(0.0, separate_s), min(seconds.values()) / 2)
    context_s = min(context_s, *(step_s / (2 * n) for n, step_s in seconds.items()))
    rows_s = {n: step_s - request_s * len(packed[n]) - context_s * n for n, step_s in seconds.items()}
    return StepTimes(rows_s, request_s, num_tokens, experts, context_s / num_tokens)


def time_draft_passes(
    draft: Callable[..., object], config: RunnerConfig, num_cache_tokens: int, clock: Clock
) -> tuple[StepTimes, StepTimes]:
    """Measure the first and further draft passes of 1 to 64 requests, which all use the same blocks."""
    num_tokens, num_passes = min(CONTEXT_TOKENS, max(1, num_cache_tokens // 4)), min(2, config.max_drafts)
    blocks, tokens = range(-(-num_tokens // config.block_size)), spread_tokens(config)
    sizes = dict.fromkeys(min(config.max_seqs, n) for n in (1, 16, 4, 64))
    batches = {n: [make_request(num_tokens, num_passes, blocks, tokens) for _ in range(n)] for n in sizes}
    calls = [{n: partial(draft, batches[n], [k] * n) for n in sizes} for k in (1, num_passes)]
    first, all_s = (_min_seconds(each, clock) for each in calls)
    return StepTimes(first), StepTimes({n: max(0.0, all_s[n] - first[n]) for n in all_s.keys() & first.keys()})


def _without_experts(
    runner: ModelRunner, load: ExpertLoad, plans: Mapping[int, StepPlan], num_equal: int, clock: Clock
) -> tuple[dict[int, float], float]:
    """Measure steps; return their seconds without reading experts, and the seconds of reading one.

    The latter is the difference between `num_equal` rows that are equal and as many that differ.
    """
    num_experts = dict[int, int]()

    def run(key: int) -> None:
        runner.run(plans[key])
        num_experts[key] = int(load.array[:, 0].sum())

    seconds = _min_seconds({key: partial(run, key) for key in plans}, clock)
    added_s, num_added = seconds[num_equal] - seconds[EQUAL_ROWS], num_experts[num_equal] - num_experts[EQUAL_ROWS]
    expert_s = max(0.0, added_s) / max(1, num_added)
    expert_s = min(expert_s, *(step_s / num_experts[key] for key, step_s in seconds.items()))
    return {key: seconds[key] - expert_s * num_experts[key] for key in seconds if key != EQUAL_ROWS}, expert_s


def _min_seconds(calls: Mapping[int, Callable[[], object]], clock: Clock) -> dict[int, float]:
    """Return the minimum time of each call over rounds in alternating order; calls that are too slow are left out."""
    seconds: dict[int, float] = {}
    order, total_s = list(calls), 0.0
    for call_round in range(16):
        for key in order:
            if not call_round and len(seconds) >= 6 + (EQUAL_ROWS in calls) and total_s > TIME_LIMIT_S / 2:
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


def make_plan(
    runner: ModelRunner, rows: list[int], num_tokens: int, max_drafts: int, token_ids: Iterable[int]
) -> StepPlan:
    """Return a step of requests with `num_tokens` tokens and rows[i] - 1 drafts, in blocks of their own if they fit."""
    num_blocks = -(-(num_tokens + max_drafts) // runner.config.block_size)
    num_separate = max(1, runner.kv_caches[0].num_blocks // num_blocks)
    blocks = [range(first, first + num_blocks) for first in range(0, num_separate * num_blocks, num_blocks)]
    requests = [make_request(num_tokens, n - 1, ids, token_ids) for n, ids in zip(rows, cycle(blocks))]
    return StepPlan([ScheduledRequest(r, n, num_tokens - 1, r.draft, n) for r, n in zip(requests, rows)])
