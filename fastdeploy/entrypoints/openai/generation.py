# SPDX-License-Identifier: Apache-2.0
"""Runs the prompts of one HTTP request on the engine and detokenizes their outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from fastdeploy.core.faults import fault_point
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.detokenize.text_output import TextAssembler
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.errors import GenerationFailed
from fastdeploy.entrypoints.openai.limiter import TokenBucket
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningCounter
from fastdeploy.entrypoints.openai.responses import CompletionTokensDetails, PromptTokensDetails, UsageInfo
from fastdeploy.ipc.merge import merge_deltas
from fastdeploy.metrics.request_record import RequestRecorder, make_record
from fastdeploy.scheduler.base import RequestScheduler


@dataclass
class ChoiceUpdate:
    """New output of one choice.

    Attributes:
        prompt_index: which prompt of the request.
        index: which choice of the response: prompt_index * n + the choice's index in its prompt.
        text: new text; may be empty although there are new tokens.
        delta: the new tokens, and the end of the output.
        is_first: this is the first update of the choice.
        prompt_logprobs: those of the prompt, in the first update of each choice, if requested.
    """

    prompt_index: int
    index: int
    text: str
    delta: TokenDelta
    is_first: bool
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None


@dataclass
class Usage:
    """Token counts of a request, updated while it runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning: Sequence[ReasoningCounter] = ()  # one per choice, if the server separates the reasoning

    def report(self) -> UsageInfo:
        """Return the counts so far."""
        num_reasoning = sum(counter.num_tokens for counter in self.reasoning)
        return UsageInfo(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            completion_tokens_details=(
                CompletionTokensDetails(reasoning_tokens=num_reasoning) if self.reasoning else UNSET
            ),
        )


class Generation:
    """One prompt with its n choices."""

    def __init__(
        self,
        scheduler: RequestScheduler,
        tokenizer: Tokenizer,
        recorder: RequestRecorder,
        request: GenerationRequest,
        prompt_index: int,
    ) -> None:
        """Prepare to run `request`, one of the prompts of an HTTP request."""
        self.request = request
        self._scheduler = scheduler
        self._recorder = recorder
        self._prompt_index = prompt_index
        prompt, n = request.prompt_token_ids, request.params.n
        self._assemblers = [TextAssembler(tokenizer, prompt, request.params) for _ in range(n)]
        self._num_tokens = [0] * n
        self._started = [False] * n
        self._prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    async def updates(self) -> AsyncGenerator[list[ChoiceUpdate], None]:
        """Yield new output until every choice has ended; text before an error is yielded before the error is raised.

        Raises:
            GenerationFailed: the engine could not finish a choice.
            InvalidRequestError, QueueFullError, EngineDeadError: see `RequestScheduler.generate`.
        """
        self._recorder.started(self.request.params.max_tokens)
        async with contextlib.aclosing(self._scheduler.generate(self.request)) as stream:
            async for deltas in stream:
                updates = [update for delta in deltas if (update := self._update(delta)) is not None]
                if updates:
                    yield updates
                for delta in deltas:
                    if delta.error is not None:
                        raise GenerationFailed(delta.error)

    def _update(self, delta: TokenDelta) -> ChoiceUpdate | None:
        index, choice_index = delta.index, self._prompt_index * self.request.params.n + delta.index
        fault_point("detokenise", delta.request_id)
        text = self._assemblers[index].push(delta)
        self._num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._record(choice_index, delta, delta.finish_reason)
        if delta.error is not None:
            if not text and not delta.token_ids:
                return None
            delta = replace(delta, finish_reason=None)  # the request ends with the error
        is_first = not self._started[index]
        self._started[index] = True
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        update = ChoiceUpdate(self._prompt_index, choice_index, text, delta, is_first)
        if is_first:
            update.prompt_logprobs = self._prompt_logprobs
        return update

    def _record(self, choice_index: int, delta: TokenDelta, finish_reason: str) -> None:
        if delta.metrics is not None:
            self._recorder.record(
                make_record(
                    self.request,
                    choice_index,
                    self._num_tokens[delta.index],
                    finish_reason,
                    delta.metrics,
                    delta.speculate_metrics,
                )
            )


@dataclass
class GenerationGroup:
    """All prompts of an HTTP request, run concurrently.

    Attributes:
        usage: counts so far; complete when `updates` has ended.
        bucket: from which output tokens are taken; None if the client has no limit of tokens per minute.
    """

    generations: Sequence[Generation]
    usage: Usage = field(default_factory=Usage)
    bucket: TokenBucket | None = None

    def __post_init__(self) -> None:
        self.usage.prompt_tokens = sum(len(generation.request.prompt_token_ids) for generation in self.generations)

    async def updates(self) -> AsyncGenerator[list[ChoiceUpdate], None]:
        """Yield new output of any choice until all have ended; closing the generator aborts the running ones."""
        source = self.generations[0].updates() if len(self.generations) == 1 else self._interleaved()
        async with contextlib.aclosing(source) as stream:
            async for updates in stream:
                num_before = self.usage.completion_tokens
                for update in updates:
                    self._count(update)
                if self.bucket is not None:
                    self.bucket.charge(self.usage.completion_tokens - num_before)
                yield updates

    async def run_to_completion(self) -> list[ChoiceUpdate]:
        """Run until all choices have ended; return one update per choice, in the order of the response."""
        choices: dict[int, ChoiceUpdate] = {}
        async with contextlib.aclosing(self.updates()) as stream:
            async for updates in stream:
                for update in updates:
                    if update.index in choices:
                        choices[update.index].text += update.text
                        merge_deltas([choices[update.index].delta], update.delta)
                    else:
                        choices[update.index] = update
        return [choices[index] for index in sorted(choices)]

    def _count(self, update: ChoiceUpdate) -> None:
        self.usage.completion_tokens += len(update.delta.token_ids)
        if self.usage.reasoning:
            delta = update.delta
            self.usage.reasoning[update.index].push(delta.token_ids, update.text, delta.finish_reason is not None)
        if update.delta.metrics is not None and update.delta.index == 0:
            self.usage.cached_tokens += update.delta.metrics.num_cached_tokens

    async def _interleaved(self) -> AsyncGenerator[list[ChoiceUpdate], None]:
        queue: asyncio.Queue[list[ChoiceUpdate] | BaseException | None] = asyncio.Queue(len(self.generations))

        async def run(generation: Generation) -> None:
            try:
                async with contextlib.aclosing(generation.updates()) as stream:
                    async for updates in stream:
                        await queue.put(updates)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(run(generation)) for generation in self.generations]
        try:
            num_running = len(tasks)
            while num_running:
                item = await queue.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class ChunkAggregator:
    """Collects the updates of each choice until they have enough tokens for a chunk, or the choice has ended."""

    def __init__(self, num_tokens: int) -> None:
        """Collect at least `num_tokens` tokens per chunk; a step that emits several may exceed that."""
        self._num_tokens = num_tokens
        self._pending: dict[int, ChoiceUpdate] = {}

    def push(self, updates: Iterable[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """Return the updates that are ready to be sent, each joined with those collected before it."""
        if self._num_tokens == 1:
            return list(updates)
        return [joined for update in updates if self._is_ready(joined := self._join(update))]

    def flush(self) -> list[ChoiceUpdate]:
        """Return what is still collected, because no further update comes."""
        pending, self._pending = list(self._pending.values()), {}
        return pending

    def _join(self, update: ChoiceUpdate) -> ChoiceUpdate:
        pending = self._pending.setdefault(update.index, update)
        if pending is not update:
            pending.text += update.text
            merge_deltas([pending.delta], update.delta)
        return pending

    def _is_ready(self, pending: ChoiceUpdate) -> bool:
        if pending.delta.finish_reason is None and len(pending.delta.token_ids) < self._num_tokens:
            return False
        del self._pending[pending.index]
        return True
