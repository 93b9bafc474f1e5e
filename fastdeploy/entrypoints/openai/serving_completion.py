# SPDX-License-Identifier: Apache-2.0
"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from msgspec import UNSET

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import add_prompt_number
from fastdeploy.core.json_types import with_integers
from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.fill_in import fill_in_prompt
from fastdeploy.detokenize.preprocess import (
    build_prepared_request,
    check_num_logprobs,
    check_prompt_length,
    check_text,
    max_text_length,
    prepare_params,
)
from fastdeploy.detokenize.text_offsets import TextOffsets, prompt_offsets
from fastdeploy.entrypoints.openai.choice_serving import ChoiceServing
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate
from fastdeploy.entrypoints.openai.logprobs import CompletionLogprobsBuilder, prompt_logprobs
from fastdeploy.entrypoints.openai.params import check_budget, completion_logprobs, completion_params
from fastdeploy.entrypoints.openai.prompt import reasoning_format
from fastdeploy.entrypoints.openai.protocol import CompletionRequest
from fastdeploy.entrypoints.openai.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    CompletionStreamChoice,
)
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import make_request_id

MAX_CHOICES = 1024
MAX_IDS = 2**20  # in the parameters of all prompts, each of which is sent with a copy

Prompt = str | list[int]
C = TypeVar("C", bound=CompletionStreamChoice)


class ServingCompletion(ChoiceServing):
    """A request for completions of one or several prompts."""

    body: CompletionRequest
    response_type = CompletionResponse
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, server: ApiServer, body: CompletionRequest) -> None:
        """Check the request.

        Raises:
            InvalidRequestError: naming the field and its range.
        """
        request_id = make_request_id(body.request_id)
        super().__init__(server, body, f"cmpl-{request_id}")
        params = completion_params(body, server.defaults, server.param_limits)
        self._prompts = split_prompts(body)
        check_num_choices(len(self._prompts) * params.n)
        self._adds_special = add_special = body.add_special_tokens is not False
        field = "prompt" if body.prompt_token_ids is None else "prompt_token_ids"
        tokenizer, limits = server.tokenizer, server.limits
        params = prepare_params(tokenizer, limits, params)
        check_num_ids("prompt", params, len(self._prompts))
        self.requests = [
            build_prepared_request(tokenizer, limits, self._id(index), prompt, params, add_special, field)
            for index, prompt in enumerate(self._with_suffix(add_special))
        ]
        for request in self.requests:
            request.cache_salt = body.cache_salt or ""
        self._begin_reasoning(params)
        prompt_field = "prompt_logprobs" if body.prompt_logprobs is not None else "logprobs"
        check_num_logprobs(limits, self.requests, prompt_field, "logprobs", params.n if body.echo else 1)
        self._num_top = completion_logprobs(body)
        self._logprobs = CompletionLogprobsBuilder(tokenizer, self._num_top or 0, self.names_token_ids)
        self._offsets: dict[int, TextOffsets] = {}  # of each choice

    def choice(self, update: ChoiceUpdate) -> CompletionChoice:
        """Return the choice, with the prompt before its text if the request asks for that."""
        return self._make_choice(CompletionChoice, update)

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[CompletionStreamChoice]:
        """Yield one choice, unless it holds nothing new for the client."""
        choice = self._make_choice(CompletionStreamChoice, update)
        is_new = choice.text or choice.finish_reason or choice.logprobs or self.body.return_token_ids
        if is_new or choice.prompt_logprobs is not UNSET:
            yield choice

    def _make_choice(self, kind: type[C], update: ChoiceUpdate) -> C:
        delta = update.delta
        choice = kind(
            index=update.index,
            text=self._echo(update) + update.text,
            logprobs=self._build_logprobs(update),
            finish_reason=delta.finish_reason,
        )
        self.add_optional_fields(choice, update)
        if update.prompt_logprobs is not None and delta.index == 0 and self.body.prompt_logprobs is not None:
            has_texts = self.body.include_logprobs_decode_token
            choice.prompt_logprobs = prompt_logprobs(self.server.tokenizer, update.prompt_logprobs, has_texts)
        return choice

    def _with_suffix(self, add_special: bool) -> list[Prompt]:
        """Return the prompts; with a suffix, in the model's fill-in-the-middle format."""
        suffix = self.body.suffix
        if not suffix:
            return self._prompts
        if self.body.truncate_prompt_tokens is not None:
            raise InvalidRequestError(
                "truncate_prompt_tokens", "cannot be combined with suffix: it could remove markers"
            )
        texts = [prompt for prompt in self._prompts if isinstance(prompt, str)]
        if len(texts) < len(self._prompts):
            raise InvalidRequestError("suffix", "needs prompts of text, not of token ids")
        tokenizer, limits = self.server.tokenizer, self.server.limits
        limit = max_text_length(tokenizer, limits.max_model_len)
        check_text("suffix", suffix, tokenizer, limit, limits)
        prompts: list[Prompt] = []
        for text in texts:
            check_text("prompt", text, tokenizer, limit, limits)
            token_ids = fill_in_prompt(tokenizer, text, suffix, add_special)
            check_prompt_length("prompt", token_ids, limits)
            prompts.append(token_ids)
        return prompts

    def _begin_reasoning(self, params: SamplingParams) -> None:
        """Tell the engine which prompts leave a reasoning open, if its length is limited; the text is sent whole."""
        reasoning = reasoning_format(self.server)
        check_budget(self.body, params, reasoning)
        if params.reasoning_max_tokens is None or reasoning is None:
            return
        for request in self.requests:
            text = self.server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            request.reasoning = reasoning.state_in(text)

    def _id(self, index: int) -> str:
        return self.response_id if len(self._prompts) == 1 else add_prompt_number(self.response_id, index)

    def _echo(self, update: ChoiceUpdate) -> str:
        return self._echoed_text(update.prompt_index) if self.body.echo and update.is_first else ""

    def _echoed_text(self, prompt_index: int) -> str:
        """Return the text of a prompt as an echo has it: a text as the client sent it."""
        prompt = self._prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self.server.tokenizer.decode(prompt, skip_special_tokens=False)

    def _build_logprobs(self, update: ChoiceUpdate) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        delta, prompt = update.delta, self.requests[update.prompt_index].prompt_token_ids
        token_ids, entries = list(delta.token_ids), list[TokenLogprobs | None](delta.logprobs or [])
        offsets = self._output_offsets(update)
        if self.body.echo and update.prompt_logprobs is not None:
            token_ids, entries = [*prompt, *token_ids], [*update.prompt_logprobs, *entries]
            offsets = [*self._prompt_offsets(update.prompt_index), *offsets]
        return self._logprobs.build(token_ids, entries, offsets)

    def _output_offsets(self, update: ChoiceUpdate) -> list[int]:
        """Return where the new tokens of a choice begin in its text, which an echoed prompt may precede."""
        if update.index not in self._offsets:
            request, echo = self.requests[update.prompt_index], self._echo(update)
            self._offsets[update.index] = TextOffsets(
                self.server.tokenizer, request.prompt_token_ids, request.params, len(echo)
            )
        return self._offsets[update.index].push(update.delta.token_ids)

    def _prompt_offsets(self, index: int) -> list[int]:
        """Return where the tokens of a prompt begin in its echoed text, of which they may be the end only."""
        prompt, request, text = self._prompts[index], self.requests[index], self._echoed_text(index)
        tokenizer, token_ids = self.server.tokenizer, request.prompt_token_ids
        added = tokenizer.encode("", self._adds_special) if isinstance(prompt, str) else []
        if request.params.truncate_prompt_tokens is not None:  # never together with a suffix
            token_ids = tokenizer.encode(prompt, self._adds_special) if isinstance(prompt, str) else prompt
        offsets = prompt_offsets(tokenizer, token_ids, text, added)
        num_kept = len(request.prompt_token_ids)
        return offsets[:num_kept] if request.params.truncation_side == "right" else offsets[-num_kept:]


def check_num_choices(num_choices: int) -> None:
    """Raise InvalidRequestError if the prompts of a request have too many choices in all."""
    if num_choices > MAX_CHOICES:
        raise InvalidRequestError("n", f"expected at most {MAX_CHOICES} choices for all prompts, got {num_choices}")


def check_num_ids(field: str, params: SamplingParams, num_prompts: int) -> None:
    """Check the token ids in the parameters of a request, of which each prompt gets a copy.

    Args:
        field: that has the prompts.

    Raises:
        InvalidRequestError: there are too many in all.
    """
    num_ids = sum(map(len, params.bad_words_token_ids)) + len(params.logit_bias) + len(params.stop_token_ids)
    num_ids += len(params.allowed_token_ids or ())
    if num_ids * num_prompts > MAX_IDS:
        raise InvalidRequestError(
            field,
            f"at most {MAX_IDS} token ids of bad words, logit_bias, stop_token_ids and allowed_token_ids times "
            f"prompts, got {num_ids} times {num_prompts}",
        )


def split_prompts(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts of a request: text, token ids, or a list of either.

    Raises:
        InvalidRequestError: there is no prompt, both fields are given, or a list mixes texts and token ids.
    """
    if body.prompt_token_ids is not None:
        if body.prompt:
            raise InvalidRequestError("prompt_token_ids", "cannot be combined with prompt")
        return _split("prompt_token_ids", body.prompt_token_ids)
    if body.prompt is None:
        raise InvalidRequestError("prompt", "is missing")
    return [body.prompt] if isinstance(body.prompt, str) else _split("prompt", body.prompt)


def _split(field: str, items: list[Any]) -> list[Prompt]:
    given = with_integers(items)
    if given and all(_is_token_id(item) for item in given):
        return [given]
    if given and all(isinstance(item, str) for item in given) and field == "prompt":
        return list(given)
    if given and all(isinstance(item, list) and all(map(_is_token_id, item)) for item in given):
        return list(given)
    kinds = "text, a list of texts, token ids" if field == "prompt" else "token ids"
    raise InvalidRequestError(field, f"expected {kinds}, or a list of lists of token ids, not empty and not mixed")


def _is_token_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
