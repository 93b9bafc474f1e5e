# SPDX-License-Identifier: Apache-2.0
"""Results of the offline `LLM`: built from the token deltas of the engine, with log-probabilities by token id."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy.core.outputs import CompletionOutput, Logprob, RequestOutput, TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.text_output import TextAssembler
from fastdeploy.detokenize.tokenizer import Tokenizer

TextOf = Callable[[int], str | None]


class RequestState:
    """A request in flight; `output` is its result so far."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest, prompt: str | None) -> None:
        """Begin the result of a request.

        Args:
            prompt: its text; None decodes the token ids.
        """
        params, ids = request.params, request.prompt_token_ids
        choices = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for choice in choices:
                choice.logprobs, choice.cumulative_logprob = [], 0.0
        if prompt is None:
            prompt = tokenizer.decode(ids, skip_special_tokens=False)
        self.output = RequestOutput(request.request_id, prompt, ids, choices)
        self._num_running = params.n
        self._assemblers = [TextAssembler(tokenizer, ids, params) for _ in choices] if params.detokenize else None
        self._text_of: TextOf = tokenizer.token_text if params.detokenize else lambda token_id: None

    def apply(self, delta: TokenDelta) -> None:
        """Add a delta to the result."""
        choice = self.output.outputs[delta.index]
        choice.token_ids.extend(delta.token_ids)
        if self._assemblers is not None:
            choice.text += self._assemblers[delta.index].push(delta)
        choice.seed = delta.seed
        if choice.logprobs is not None and choice.cumulative_logprob is not None and delta.logprobs:
            choice.logprobs += [by_token_id(entry, self._text_of) for entry in delta.logprobs]
            choice.cumulative_logprob += sum(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [
                None if entry is None else by_token_id(entry, self._text_of) for entry in delta.prompt_logprobs
            ]
        if delta.finish_reason is not None:
            self._finish(choice, delta)

    def _finish(self, choice: CompletionOutput, delta: TokenDelta) -> None:
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        choice.speculate_metrics = delta.speculate_metrics
        choice.error = delta.error
        self.output.metrics = delta.metrics
        self._num_running -= 1
        self.output.finished = self._num_running == 0


class CallResults:
    """The results of all requests of a call, in order.

    Attributes:
        num_tokens: output tokens of all of them so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, requests: Sequence[GenerationRequest], prompts: Sequence[str | None]
    ) -> None:
        """Begin the results of requests, whose prompts have these texts; None decodes the token ids."""
        self._states = {
            request.request_id: RequestState(tokenizer, request, prompt) for request, prompt in zip(requests, prompts)
        }
        self.num_tokens = 0

    def apply(self, deltas: Sequence[TokenDelta]) -> list[RequestOutput]:
        """Add deltas to the results; return those that have changed."""
        changed = dict.fromkeys(delta.request_id for delta in deltas)
        for delta in deltas:
            self._states[delta.request_id].apply(delta)
            self.num_tokens += len(delta.token_ids)
        return [self._states[request_id].output for request_id in changed]

    def outputs(self) -> list[RequestOutput]:
        """Return all results."""
        return [state.output for state in self._states.values()]


def by_token_id(entry: TokenLogprobs, text_of: TextOf) -> dict[int, Logprob]:
    """Return token id -> `Logprob`: the token at the position, the most probable ones in order, the requested ones."""
    result = {entry.token_id: Logprob(entry.logprob, entry.rank, text_of(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        if token_id != entry.token_id:
            result[token_id] = Logprob(logprob, rank, text_of(token_id))
    for token_id, logprob, rank in entry.requested:
        if token_id not in result:
            result[token_id] = Logprob(logprob, rank, text_of(token_id))
    return result
