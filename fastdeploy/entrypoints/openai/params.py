# SPDX-License-Identifier: Apache-2.0
"""From the fields of a request to `SamplingParams`."""

from __future__ import annotations

import math
from typing import Any

from fastdeploy.config.model_config import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
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
)
SPECULATIVE_KEYS = ("method", "num_speculative_tokens")


def completion_params(asked: CompletionRequest, defaults: GenerationDefaults, max_logprobs: int) -> SamplingParams:
    """Return the parameters of a completion.

    Raises:
        InvalidRequestError: a value outside its range.
    """
    values = _common(asked, defaults)
    values["logprobs"] = asked.logprobs
    if asked.echo and asked.logprobs is not None and asked.prompt_logprobs is None:
        values["prompt_logprobs"] = asked.logprobs
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise InvalidRequestError("best_of", f"expected n, which is {asked.n or 1}, or nothing; got {asked.best_of}")
    return _checked(values, max_logprobs, {})


def chat_params(asked: ChatCompletionRequest, defaults: GenerationDefaults, max_logprobs: int) -> SamplingParams:
    """Return the parameters of a chat completion.

    Raises:
        InvalidRequestError: a value outside its range.
    """
    values = _common(asked, defaults)
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


def _common(asked: GenerationFields, defaults: GenerationDefaults) -> dict[str, Any]:
    values = defaults.sampling_values()
    if (asked.min_tokens or 0) > values.get("max_tokens", math.inf):
        del values["max_tokens"]  # the folder's proposal gives way to what the client asks
    values.update({name: value for name in SAME_NAME if (value := getattr(asked, name)) is not None})
    values["logit_bias"] = _logit_bias(asked.logit_bias or {})
    values["bad_words_token_ids"] = _sequences(asked.bad_words_token_ids or [])
    values["speculative"] = _speculative(asked.speculative)
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


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit():
            raise InvalidRequestError("logit_bias", f"expected token ids as keys, got {key!r}")
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
