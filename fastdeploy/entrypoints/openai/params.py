# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

import math
from typing import Any

from fastdeploy.config.model_config import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.entrypoints.openai.guided import guided_decoding
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
)
REASONING = ("reasoning_max_tokens", "response_max_tokens")
SPECULATIVE_KEYS = ("method", "num_speculative_tokens")
PROCESSORS = "logits_processors_args"
PROCESSOR_KEYS = ("logit_bias", "thinking_budget")
MAX_ID_DIGITS = 18
PRIORITIES = (-(2**31), 2**31 - 1)


def completion_params(asked: CompletionRequest, defaults: GenerationDefaults, max_logprobs: int) -> SamplingParams:
    """Return the parameters of a completion.

    Raises:
        InvalidRequestError: a value outside its range.
    """
    values = _common(asked, defaults)
    values["logprobs"] = num_top = completion_logprobs(asked)
    if asked.echo and num_top is not None and asked.prompt_logprobs is None:
        values["prompt_logprobs"] = num_top
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise InvalidRequestError("best_of", f"expected n, which is {asked.n or 1}, or nothing; got {asked.best_of}")
    return _checked(values, max_logprobs, {})


def chat_params(asked: ChatCompletionRequest, defaults: GenerationDefaults, max_logprobs: int) -> SamplingParams:
    """Return the parameters of a chat completion.

    Raises:
        InvalidRequestError: a value outside its range.
    """
    values = _common(asked, defaults)
    values.update({name: value for name in REASONING if (value := getattr(asked, name)) is not None})
    budget = _thinking_budget(asked.logits_processors_args or {}, asked.reasoning_max_tokens)
    if budget is not None:
        values["reasoning_max_tokens"] = budget
    if asked.max_completion_tokens is not None:
        values["max_tokens"] = asked.max_completion_tokens
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs: true")
    if asked.logprobs:
        values["logprobs"] = asked.top_logprobs or 0
    names = {"logprobs": "top_logprobs"}
    if asked.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _checked(values, max_logprobs, names)


def completion_logprobs(asked: CompletionRequest) -> int | None:
    """Return how many alternatives per token a completion asks for; true asks for one, false for no report."""
    if isinstance(asked.logprobs, bool):
        return 1 if asked.logprobs else None
    return asked.logprobs


def check_request_fields(asked: GenerationFields) -> None:
    """Check the ranges of what is no sampling parameter.

    Raises:
        InvalidRequestError: naming the field.
    """
    low, high = PRIORITIES
    if not low <= asked.priority <= high:
        raise InvalidRequestError("priority", f"expected an integer in [{low}, {high}], got {asked.priority}")
    gathered = asked.max_streaming_response_tokens
    if gathered is not None and gathered < 1:
        raise InvalidRequestError("max_streaming_response_tokens", f"expected at least 1, got {gathered}")


def _common(asked: GenerationFields, defaults: GenerationDefaults) -> dict[str, Any]:
    values = defaults.sampling_values()
    if (asked.min_tokens or 0) > values.get("max_tokens", math.inf):
        del values["max_tokens"]  # the folder's proposal gives way to what the client asks
    values.update({name: value for name in SAME_NAME if (value := getattr(asked, name)) is not None})
    values["logit_bias"] = _all_biases(asked)
    values["bad_words_token_ids"] = _sequences(asked.bad_words_token_ids or [])
    values["speculative"] = _speculative(asked.speculative)
    values["guided_decoding"] = guided_decoding(asked)
    return {name: value for name, value in values.items() if value is not None}


def _checked(values: dict[str, Any], max_logprobs: int, names: dict[str, str]) -> SamplingParams:
    """Make the parameters; errors name the field as the client knows it (`names`: ours -> the client's)."""
    try:
        params = SamplingParams(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(names.get(error.field, error.field), error.message) from None
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > max_logprobs:
            raise InvalidRequestError(names.get(name, name), f"expected an integer in [0, {max_logprobs}], got {value}")
    return params


def _all_biases(asked: GenerationFields) -> dict[int, float]:
    """Return the biases of both spellings.

    Raises:
        InvalidRequestError: they differ for a token id, or FastDeploy's spelling holds something unknown.
    """
    args = asked.logits_processors_args or {}
    for key in args:
        if key not in PROCESSOR_KEYS:
            raise InvalidRequestError(PROCESSORS, f"unknown key {key!r}; known keys: {', '.join(PROCESSOR_KEYS)}")
    if "thinking_budget" in args and not isinstance(asked, ChatCompletionRequest):
        raise InvalidRequestError(PROCESSORS, "'thinking_budget' belongs to /v1/chat/completions")
    biases = _logit_bias("logit_bias", asked.logit_bias or {})
    for token_id, bias in _logit_bias(PROCESSORS, args.get("logit_bias") or {}).items():
        if biases.setdefault(token_id, bias) != bias:
            raise InvalidRequestError(PROCESSORS, f"logit_bias has another value for token id {token_id}")
    return biases


def _thinking_budget(args: dict[str, Any], reasoning_max_tokens: int | None) -> int | None:
    budget = args.get("thinking_budget")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise InvalidRequestError(PROCESSORS, f"expected a thinking_budget of at least 0 tokens, got {budget!r}")
    if budget is not None and reasoning_max_tokens not in (None, budget):
        raise InvalidRequestError(
            PROCESSORS, f"thinking_budget differs from reasoning_max_tokens {reasoning_max_tokens}"
        )
    return budget


def _logit_bias(field: str, given: Any) -> dict[int, float]:
    if not isinstance(given, dict):
        raise InvalidRequestError(field, "expected a mapping of token ids to numbers as logit_bias")
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise InvalidRequestError(field, f"expected token ids as keys, got {key[:64]!r}")
        if int(key) in bias:
            raise InvalidRequestError(field, f"token id {int(key)} is given twice")
        bias[int(key)] = value
    return bias


def _sequences(given: list[Any]) -> list[list[int]]:
    """Return a list of sequences; a bare id is a sequence of one."""
    sequences = [[item] if isinstance(item, int) else item for item in given]
    if not all(isinstance(sequence, list) for sequence in sequences):
        raise InvalidRequestError("bad_words_token_ids", "expected lists of token ids")
    return sequences


def _speculative(given: dict[str, Any] | None) -> SpeculativeParams | None:
    if given is None:
        return None
    for key in given:
        if key not in SPECULATIVE_KEYS:
            known = ", ".join(SPECULATIVE_KEYS)
            raise InvalidRequestError(f"speculative.{key}", f"unknown key; known keys: {known}")
    return SpeculativeParams(**given)
