# SPDX-License-Identifier: Apache-2.0
"""Runs a step of full size, after which a device has in use what steps need beside weights and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice, repeat

from fastdeploy.core.request import NO_DRAFT, Draft, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import ScheduledRequest, StepPlan
from fastdeploy.worker.model_runner import ModelRunner, RunnerConfig

SPREAD = 7919  # distance between neighbouring tokens: a prime

DraftFunction = Callable[[Sequence[Request], Sequence[int]], object]


def num_blocks_of_full_step(config: RunnerConfig) -> int:
    """Return the number of KV blocks that `run_full_step` needs."""
    return sum(_num_blocks(config, size) for size in _sizes(config))


def run_full_step(runner: ModelRunner, draft: DraftFunction | None) -> None:
    """Run a step of `max_rows` rows, of as many requests as possible, and draft for those that decode.

    Args:
        draft: of the drafting model, if there is one.
    """
    scheduled, first, per_request = list[ScheduledRequest](), 0, 1 + runner.config.max_drafts
    for size in _sizes(runner.config):
        blocks = range(first, first + _num_blocks(runner.config, size))
        first = blocks.stop
        if size > per_request:
            request = make_request(size + 1, 0, blocks)
            scheduled.append(ScheduledRequest(request, size, 0, NO_DRAFT, 0))
        else:
            request = make_request(1, size - 1, blocks)
            scheduled.append(ScheduledRequest(request, size, 0, request.draft, size))
    runner.run(StepPlan(scheduled))
    decoding = [entry.request for entry in scheduled if entry.num_verify_rows]
    if draft is not None and decoding:
        draft(decoding, [min(2, runner.config.max_drafts)] * len(decoding))


def make_request(
    num_tokens: int, num_drafts: int, block_ids: Sequence[int], token_ids: Iterable[int] = repeat(0)
) -> Request:
    """Return a request of so many tokens and drafts, with these ids, whose keys and values lie in these blocks."""
    tokens = list(islice(token_ids, num_tokens + num_drafts))
    source = GenerationRequest("timing", tokens[:num_tokens], SamplingParams(temperature=0.0))
    request = Request(source, 0, 0, num_tokens + num_drafts + 1, num_drafts)
    request.set_draft(Draft(tokens[num_tokens:]))
    request.block_ids = list(block_ids)
    return request


def spread_tokens(config: RunnerConfig) -> Iterator[int]:
    """Yield ids that differ from their neighbours, without end, so that rows are routed to different experts."""
    return (i * SPREAD % config.vocab_limit for i in count())


def _sizes(config: RunnerConfig) -> Iterator[int]:
    """Yield the rows of each request: prompts first, which leave the others the rows of a decoding request each."""
    left, context, per_request = config.max_rows, config.max_model_len, 1 + config.max_drafts
    for num_others in reversed(range(config.max_seqs)):
        size = min(left, context - 1, max(per_request, left - num_others * per_request))
        if size > 0:
            yield size
        left -= size


def _num_blocks(config: RunnerConfig, num_rows: int) -> int:
    num_tokens = min(num_rows + 1 + config.max_drafts, config.max_model_len)
    return -(-num_tokens // config.block_size)
