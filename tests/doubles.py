# SPDX-License-Identifier: Apache-2.0
"""Test doubles for an engine without weights: a model of a few lines, and a proposer that proposes its outputs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from fastdeploy.config.engine_config import SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.length_policy import LengthPolicy
from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, GenerationRequest, Request
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.step import RequestResult, ScheduledRequest, StepPlan
from fastdeploy.engine.admission import Admission
from fastdeploy.engine.batch_scheduler import BatchScheduler
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.output_processor import OutputProcessor
from fastdeploy.kv_cache.block_pool import BlockMemory
from fastdeploy.kv_cache.manager import KVCacheManager
from fastdeploy.spec_decode.proposers.base import Proposer

EOS = 0
VOCAB = 7


def next_token(context: np.ndarray, seed: int) -> int:
    """Return a token that depends on the last two of the context, so that outputs repeat and n-grams match."""
    return zlib.crc32(context[-2:].tobytes() + (seed % 3).to_bytes(1, "little")) % VOCAB


class SlotModelRunner:
    """A model whose cache holds one token id per slot, from which it reads the context of each row.

    A wrong block, a block that two requests share by mistake or a stale slot gives a context that differs from the
    request's tokens, which fails the test.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.full(num_blocks * block_size, -1, np.int32)
        self.block_size = block_size
        self.steps = 0
        self.prompt_logprob_rows = 0

    def run(self, plan: StepPlan) -> list[RequestResult]:
        self.steps += 1
        for scheduled in plan.requests:
            request, start = scheduled.request, scheduled.num_computed_tokens
            positions = np.arange(start, start + scheduled.num_scheduled_tokens)
            self.slots[self._slots(request, positions)] = request.tokens_with_draft(scheduled.draft)[positions]
        return [self._verify(scheduled) for scheduled in plan.requests]

    def _verify(self, scheduled: ScheduledRequest) -> RequestResult:
        request, num_rows = scheduled.request, scheduled.num_verify_rows
        prompt_logprobs = self._prompt_logprobs(scheduled)
        if num_rows == 0:
            return RequestResult(prompt_logprobs=prompt_logprobs)
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        context = self.slots[self._slots(request, np.arange(end))]
        np.testing.assert_array_equal(context, request.tokens_with_draft(scheduled.draft)[:end])
        drafts = context[end - num_rows + 1 :].tolist()
        tokens: list[int] = []
        for i in range(num_rows):
            tokens.append(next_token(context[: end - num_rows + 1 + i], request.seed))
            if i == len(drafts) or tokens[-1] != drafts[i]:
                break
        return RequestResult(tokens, num_accepted=len(tokens) - 1, prompt_logprobs=prompt_logprobs)

    def _prompt_logprobs(self, scheduled: ScheduledRequest) -> list[TokenLogprobs]:
        """Return the next token of each row, with minus the row's position as its log-probability."""
        self.prompt_logprob_rows += scheduled.num_prompt_logprob_rows
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens - scheduled.num_verify_rows
        tokens = scheduled.request.token_ids
        positions = range(end - scheduled.num_prompt_logprob_rows, end)
        return [TokenLogprobs(int(tokens[position + 1]), -float(position), 1) for position in positions]

    def _slots(self, request: Request, positions: np.ndarray) -> np.ndarray:
        blocks = np.array(request.block_ids, np.int64)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


class OracleProposer(Proposer):
    """Proposes the output of plain decoding; each token is replaced by another with a given probability."""

    name = "oracle"

    def __init__(self, texts: dict[tuple[str, int], list[int]], corruption: float, seed: int = 0) -> None:
        self.texts = texts
        self.corruption = corruption
        self._random = np.random.default_rng(seed)
        self._started: set[tuple[str, int]] = set()

    def start(self, request: Request) -> None:
        self._started.add(request.key)

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        return [self._draft(request, quota.max_drafts) for request, quota in zip(requests, quotas)]

    def finish(self, request: Request) -> None:
        self._started.remove(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        assert self._started == {request.key for request in requests}

    def _draft(self, request: Request, max_drafts: int) -> Draft:
        first = request.num_output_tokens
        tokens = np.array(self.texts[request.key][first : first + max_drafts], np.int32)
        if not len(tokens):
            return NO_DRAFT
        wrong = self._random.random(len(tokens)) < self.corruption
        return Draft(np.where(wrong, np.maximum(tokens - 1, 0), tokens).tolist(), self.name)


class ManualClock:
    """A clock whose time is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    proposer: Proposer,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    num_speculative_tokens: int = 0,
    prefix_caching: bool = True,
    scheduler: SchedulerConfig | None = None,
    clock: ManualClock | None = None,
    length_policy: LengthPolicy | None = None,
    memory: BlockMemory | None = None,
) -> Engine:
    """Build an engine with the slot model."""
    clock = clock or ManualClock()
    method = "ngram" if num_speculative_tokens else "naive"
    kv = KVCacheManager(num_blocks, block_size, prefix_caching, memory=memory)
    admission = Admission(
        max_model_len=max_model_len,
        num_cache_tokens=num_blocks * block_size,
        vocab_size=VOCAB,
        eos_token_ids=[EOS],
        has_tokenizer=False,
        speculative=parse_speculative_config(
            {"method": method, "num_speculative_tokens": num_speculative_tokens, "adaptive": False}
        ),
        server_seed=0,
    )
    outputs = OutputProcessor([EOS], _no_scanner, clock)
    scheduler = scheduler or SchedulerConfig()
    runner = SlotModelRunner(num_blocks, block_size)
    return Engine(admission, BatchScheduler(scheduler, kv, length_policy), runner, proposer, outputs, clock)


def plain_text(prompt: Sequence[int], seed: int, params: SamplingParams, max_model_len: int = 64) -> list[int]:
    """Return the output of plain decoding for one request, from the model's definition."""
    context = list(prompt)
    room = max_model_len - len(prompt)
    max_tokens = room if params.max_tokens is None else min(room, params.max_tokens)
    while len(context) - len(prompt) < max_tokens:
        context.append(next_token(np.array(context, np.int32), seed))
        is_end = context[-1] in params.stop_token_ids or (context[-1] == EOS and not params.ignore_eos)
        if is_end and len(context) - len(prompt) > params.min_tokens:
            break
    return context[len(prompt) :]


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[tuple[str, int], list[int]]:
    """Run requests to completion and return the tokens of each choice."""
    for request in requests:
        engine.add_request(request)
    texts: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            texts.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
    return texts


def _no_scanner(request: Request) -> object:
    raise AssertionError("the slot model has no text")
