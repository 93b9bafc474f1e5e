# SPDX-License-Identifier: Apache-2.0
"""Request bodies: every field is honoured, without effect, or refused by name."""

from __future__ import annotations

import difflib
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.errors import ApiError

NOT_YET = "is not available yet"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have; None means not given. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # sampling
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    speculative: dict[str, Any] | None = None
    logits_processors_args: dict[str, Any] | None = None
    # form of the output
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    # the rest
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    collect_metrics: bool = False
    request_id: str | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    max_streaming_response_tokens: int | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    disable_chat_template: bool = False
    continue_final_message: bool = False
    reasoning_max_tokens: int | None = None
    response_max_tokens: int | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Fields that name or file the request for a hosted service; nothing here depends on them."""

_OFF: tuple[Any, ...] = (False, [], {}, "", 0)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "suffix": (NOT_YET, ("",)),
    "functions": ("tool calling " + NOT_YET, ([],)),
    "function_call": ("tool calling " + NOT_YET, ("none", "auto")),
    "service_tier": ("there is one tier", ("auto", "default")),
    "modalities": ("this server makes text only", (["text"],)),
    "audio": ("this server makes text only", ()),
    "prediction": ("predicted outputs are not available; speculation finds repeated text by itself", ()),
    "verbosity": (NOT_YET, ("medium",)),
    "web_search_options": ("this server searches nothing", ()),
    "use_beam_search": ("beam search is not available", (False,)),
    "length_penalty": ("beam search is not available", (1, 1.0)),
    "early_stopping": ("beam search is not available", (False,)),
    "mm_hashes": ("this server reads text only", _OFF),
    "include_draft_logprobs": (NOT_YET, (False,)),
    "temp_scaled_logprobs": (NOT_YET + "; see --logprobs-mode", (False,)),
    "top_p_normalized_logprobs": (NOT_YET + "; see --logprobs-mode", (False,)),
}
"""Field -> (why it is refused, values that ask for nothing)."""

T = TypeVar("T", bound=GenerationFields)


def parse_body(body: bytes, model: type[T]) -> T:
    """Parse a JSON body into `model`.

    Raises:
        ApiError: 400, naming the field: no JSON object, an unknown field (and the nearest known one), a field of the
            wrong type, or one that this version refuses.
    """
    given = _decode(body)
    known = _known_fields(model)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            if value is not None:
                values[name] = _convert(name, value, known[name])
        elif name in REFUSED:
            _check_refused(name, value)
        elif name not in WITHOUT_EFFECT:
            raise _unknown(name, [*known, *REFUSED, *WITHOUT_EFFECT])
    request = model(**values)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options", "needs stream: true")
    return request


@lru_cache(maxsize=None)
def _known_fields(model: type[GenerationFields]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(model)}  # resolving annotations takes 2 ms


def _decode(body: bytes) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_json_type(given)}", code="invalid_json")
    return given


def _convert(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "").replace(" | null", "").replace("$", name)
        raise InvalidRequestError(name, text[:1].lower() + text[1:]) from None


def _check_refused(name: str, value: Any) -> None:
    reason, neutral = REFUSED[name]
    if value is not None and value not in neutral:
        raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")


def _unknown(name: str, known: list[str]) -> ApiError:
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return ApiError(400, f"{name}: unknown field{hint}", param=name, code="unknown_parameter")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
