# SPDX-License-Identifier: Apache-2.0
"""Converts the fields of a request to `SamplingParams`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.generation_request import check_cache_salt
from fastdeploy.core.guided_decoding import StructuredOutputsParams
from fastdeploy.core.json_types import json_type, shorten, to_integer, with_integers
from fastdeploy.core.reasoning import ReasoningFormat
from fastdeploy.core.sampling_params import OUTPUT_LENGTHS, SamplingParams, SpeculativeParams
from fastdeploy.detokenize.preprocess import check_num_alternatives
from fastdeploy.entrypoints.openai.protocol import (
    FIELD_RANGES,
    JSON_SCHEMA_KEYS,
    PROCESSOR_KEYS,
    SPECULATIVE_KEYS,
    TAG_KEYS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    RequestFields,
)

COMMON_FIELDS = (
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
    "allowed_token_ids",
    "ignore_eos",
    "prompt_logprobs",
    "logprob_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "truncation_side",
)
BUDGET_FIELDS = ("reasoning_max_tokens", "thinking_token_budget")
NO_BUDGET = -1  # of thinking_token_budget: the reasoning has no limit
PROCESSORS = "logits_processors_args"
MAX_ID_DIGITS = 18
KINDS_BY_FIELD = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True)
class ParamLimits:
    """What the server's flags allow; `max_logprobs` -1 and `max_output_tokens` None are no limits."""

    max_logprobs: int
    max_output_tokens: int | None = None


def completion_params(body: CompletionRequest, defaults: GenerationDefaults, limits: ParamLimits) -> SamplingParams:
    """Return the parameters of a completion.

    Raises:
        InvalidRequestError: a value is outside its range; names the field.
    """
    values = _common_values(body, defaults)
    given = {"max_tokens": body.max_tokens}
    _limit_output(values, given, limits.max_output_tokens)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        expected = f"expected {OUTPUT_LENGTHS}, or 0 with echo or prompt_logprobs"
        raise InvalidRequestError("max_tokens", f"{expected}; got 0")
    _check_output_lengths(given, accepts_zero=True)
    values["reasoning_max_tokens"] = reasoning_budget(body)[1]
    values["logprobs"] = num_top = completion_logprobs(body)
    if body.echo and num_top is not None and body.prompt_logprobs is None:
        values["prompt_logprobs"] = num_top
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequestError("best_of", f"expected n, which is {body.n or 1}, or nothing; got {body.best_of}")
    return _make_params(values, limits, {})


def chat_params(
    body: ChatCompletionRequest, defaults: GenerationDefaults, limits: ParamLimits, accepts_prefill_only: bool = False
) -> SamplingParams:
    """Return the parameters of a chat completion.

    Args:
        accepts_prefill_only: the protocol has requests that compute the prompt only, with a maximum of 0 tokens.

    Raises:
        InvalidRequestError: a value is outside its range; names the field.
    """
    values = _common_values(body, defaults)
    values["reasoning_max_tokens"] = reasoning_budget(body)[1]
    values["response_max_tokens"] = body.response_max_tokens
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    given = {"max_completion_tokens": body.max_completion_tokens, "max_tokens": body.max_tokens}
    _limit_output(values, given, limits.max_output_tokens)
    _check_output_lengths(given, accepts_prefill_only)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs: true")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return _make_params(values, limits, names)


def completion_logprobs(body: CompletionRequest) -> int | None:
    """Return the number of alternatives per token that a completion reports: true is 1, false None."""
    if isinstance(body.logprobs, bool):
        return 1 if body.logprobs else None
    return body.logprobs


def check_request_fields(body: RequestFields) -> None:
    """Check the ranges and lengths of the fields that are not sampling parameters.

    Raises:
        InvalidRequestError: a value is outside its range; names the field.
    """
    for name in ("priority", "timeout", "max_streaming_response_tokens"):
        if (value := getattr(body, name, None)) is not None:
            FIELD_RANGES[name].check(name, value)
    if body.cache_salt is not None:
        check_cache_salt("cache_salt", body.cache_salt)


def _common_values(body: GenerationFields, defaults: GenerationDefaults) -> dict[str, Any]:
    values = defaults.sampling_values()
    if (body.min_tokens or 0) > values.get("max_tokens", math.inf):
        del values["max_tokens"]  # the model's default must not contradict the request
    values.update({name: value for name in COMMON_FIELDS if (value := getattr(body, name)) is not None})
    values["logit_bias"] = _merge_logit_bias(body)
    values["bad_words_token_ids"] = _sequences(body.bad_words_token_ids or [])
    values["speculative"] = _speculative(body.speculative)
    values["structured_outputs"] = structured_outputs(body)
    return {name: value for name, value in values.items() if value is not None}


def _limit_output(values: dict[str, Any], given: Mapping[str, int | None], limit: int | None) -> None:
    """Refuse a request for more output tokens than the server's limit; without a request, the limit is the maximum.

    Args:
        given: the fields of the request that name a maximum.
    """
    if limit is None:
        return
    for name, value in {**given, "min_tokens": values.get("min_tokens")}.items():
        if value is not None and value > limit:
            raise InvalidRequestError(name, f"expected at most {limit} (--max-output-tokens), got {value}")
    values["max_tokens"] = min(values.get("max_tokens", limit), limit)


def _check_output_lengths(given: Mapping[str, int | None], accepts_zero: bool) -> None:
    for name, value in given.items():
        if value is not None and not (value == 0 and accepts_zero):
            OUTPUT_LENGTHS.check(name, value)


def _make_params(values: dict[str, Any], limits: ParamLimits, names: dict[str, str]) -> SamplingParams:
    """Return the parameters; errors name the client's field (`names`: parameter -> field, where they differ)."""
    if values.get("logprob_token_ids") and values.get("logprobs") is None:
        raise InvalidRequestError("logprob_token_ids", "needs logprobs")
    for name in ("logprobs", "prompt_logprobs"):
        check_num_alternatives(names.get(name, name), values.get(name), limits.max_logprobs)
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        raise InvalidRequestError(names.get(error.field, error.field), error.message) from None


def _merge_logit_bias(body: GenerationFields) -> dict[int, float]:
    """Return the biases of `logit_bias` and of FastDeploy's `logits_processors_args`.

    Raises:
        InvalidRequestError: the two differ for a token id, or `logits_processors_args` has an unknown key.
    """
    args = body.logits_processors_args or {}
    for key in args:
        if key not in PROCESSOR_KEYS:
            raise InvalidRequestError(
                PROCESSORS, f"unknown key {shorten(key)}; known keys: {', '.join(PROCESSOR_KEYS)}"
            )
    biases = _logit_bias("logit_bias", body.logit_bias or {})
    for token_id, bias in _logit_bias(PROCESSORS, args.get("logit_bias") or {}).items():
        if biases.setdefault(token_id, bias) != bias:
            raise InvalidRequestError(PROCESSORS, f"logit_bias has another value for token id {token_id}")
    return biases


def check_budget(body: GenerationFields, params: SamplingParams, reasoning: ReasoningFormat | None) -> None:
    """Raise InvalidRequestError if a request limits a reasoning that the server does not know."""
    if params.reasoning_max_tokens is not None and reasoning is None:
        raise InvalidRequestError(reasoning_budget(body)[0], "requires a server with --reasoning-parser")


def reasoning_budget(body: GenerationFields) -> tuple[str, int | None]:
    """Return the field that limits the reasoning, and the maximum number of its tokens, None for no limit.

    Raises:
        InvalidRequestError: a value is outside its range, or two fields differ; names the field.
    """
    given: dict[str, int] = {}
    for name in BUDGET_FIELDS:
        if (value := getattr(body, name, None)) is not None:
            FIELD_RANGES[name].check(name, value)
            given[name] = value
    budget = to_integer((body.logits_processors_args or {}).get("thinking_budget"))
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
        raise InvalidRequestError(PROCESSORS, f"expected a thinking_budget of at least 0 tokens, got {shorten(budget)}")
    if budget is not None:
        given[PROCESSORS] = budget
    if not given:
        return "", None
    first, maximum = next(iter(given.items()))
    for name, value in given.items():
        if value != maximum:
            prefix = "thinking_budget " if name == PROCESSORS else ""
            raise InvalidRequestError(name, f"{prefix}differs from {first} {maximum}")
    return first, None if maximum == NO_BUDGET else maximum


def _logit_bias(field: str, given: Any) -> dict[int, float]:
    if not isinstance(given, dict):
        raise InvalidRequestError(field, "expected a mapping of token ids to numbers as logit_bias")
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > MAX_ID_DIGITS:
            raise InvalidRequestError(field, f"expected token ids as keys, got {shorten(key)}")
        if int(key) in bias:
            raise InvalidRequestError(field, f"token id {int(key)} is given twice")
        bias[int(key)] = value
    return bias


def _sequences(given: list[Any]) -> list[list[int]]:
    """Return a list of sequences; a single id is a sequence of one."""
    sequences = [[item] if isinstance(item, int) else item for item in with_integers(given)]
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


def structured_outputs(body: GenerationFields) -> StructuredOutputsParams | None:
    """Return the constraint on the output, None if there is none.

    Raises:
        InvalidRequestError: there is more than one constraint, or an invalid one; names the field.
    """
    given = {name: value for name in KINDS_BY_FIELD if (value := getattr(body, name)) is not None}
    by_format = _response_format(body.response_format)
    names = [*given]
    names += ["structured_outputs"] if body.structured_outputs is not None else []
    names += ["response_format"] if by_format is not None else []
    if len(names) > 1:
        raise InvalidRequestError(names[-1], f"a request may have one constraint, got {' and '.join(names)}")
    if body.structured_outputs is not None:
        return StructuredOutputsParams.from_fields("structured_outputs", body.structured_outputs)
    for name, value in given.items():
        if value is False:
            raise InvalidRequestError(name, "no value matches the schema false")
        return StructuredOutputsParams(**{KINDS_BY_FIELD[name]: value}, source=name)
    return by_format


def _response_format(given: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    if given is None:
        return None
    kind = given.get("type")
    source = "response_format"
    if kind == "text":
        _check_keys(source, given, ("type",))
        return None
    if kind == "json_object":
        _check_keys(source, given, ("type",))
        return StructuredOutputsParams(json_object=True, source=source)
    if kind == "json_schema":
        _check_keys(source, given, ("type", "json_schema"))
        return _json_schema("response_format.json_schema", given.get("json_schema"))
    if kind == "structural_tag":
        _check_keys(source, given, ("type", *TAG_KEYS))
        return StructuredOutputsParams(structural_tag=dict(given), source=source)
    raise InvalidRequestError(
        "response_format.type", f"expected one of {', '.join(RESPONSE_FORMATS)}, got {shorten(kind)}"
    )


def _json_schema(field: str, given: Any) -> StructuredOutputsParams:
    """Read OpenAI's `json_schema`; the schema is followed exactly, whatever `strict` is."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(field, f"expected an object with name and schema, got {json_type(given)}")
    _check_keys(field, given, JSON_SCHEMA_KEYS)
    for name, kind in (("name", str), ("description", str), ("strict", bool)):
        value, expected = given.get(name), "a string" if kind is str else "true or false"
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{field}.{name}", f"expected {expected}, got {json_type(value)}")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequestError(f"{field}.schema", f"expected an object, got {json_type(schema)}")
    return StructuredOutputsParams(json=dict(schema), source="response_format")


def _check_keys(field: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            raise InvalidRequestError(f"{field}.{key}", f"unknown key; known keys: {', '.join(known)}")
