# SPDX-License-Identifier: Apache-2.0
"""Request bodies: every field is honoured, without effect, or refused by name (table: docs/guide/request-fields.md)."""

from __future__ import annotations

import difflib
import json
from functools import cache
from typing import Any, TypeVar

import msgspec

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.errors import ApiError


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer.

    Attributes:
        include_usage: a last chunk without choices carries the usage.
        continuous_usage_stats: every chunk carries the usage so far.
        include_obfuscation: accepted without effect; chunks are never padded.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have; None means not given. Ranges are checked by `SamplingParams`.

    Attributes:
        model: the served name, the model's path, its last part, or `default`; anything else is 404
        stream: answer with server-sent events
        stream_options: `include_usage`, `continuous_usage_stats`; needs `stream`
        n: choices per prompt, 1 to 128
        temperature: at least 0; 0 is greedy
        top_p: 0 to 1
        top_k: number of ids kept; 0 and -1 keep all
        min_p: 0 to 1, relative to the most probable id
        presence_penalty, frequency_penalty: -2 to 2, over the output
        repetition_penalty: above 0, over prompt and output
        seed: integer; the same request with the same seed gives the same tokens
        max_tokens: most tokens of the output; the end of the context is a limit of its own
        min_tokens: no end before so many tokens
        stop: a string or up to 16 at which the text ends
        stop_token_ids: up to 4096 token ids at which it ends
        bad_words, bad_words_token_ids: texts and token sequences that are never written, up to 4096 each
        ignore_eos: go on after the model's end tokens
        logit_bias: token id to a number from -100 to 100, added to its logit
        prompt_logprobs: 0 to 20 alternatives per prompt token, in streams with the first chunk
        include_logprobs_decode_token: false leaves the texts of tokens out of `prompt_logprobs`
        skip_special_tokens: leave special tokens out of the text (default: true)
        include_stop_str_in_output: keep the stop string in the text
        speculative: `{"method": "off"}` or `{"num_speculative_tokens": K}` for this request
        logits_processors_args: `logit_bias`, and in chats `thinking_budget`, spelt as FastDeploy's processors want them
        response_format: `text`, `json_object`, `json_schema` or `structural_tag`
        guided_json, guided_regex, guided_choice, guided_grammar: the form that the output must have; one of them
        structural_tag: parts of the output whose content follows a schema
        add_special_tokens: encode text with the tokenizer's opening tokens (default: true; chats: false)
        cache_salt: requests share cached prefixes with those of the same salt only
        collect_metrics: choices end with `speculate_metrics` and `metrics`
        request_id: names the request, in the answer's `id` too
        return_token_ids: choices carry `prompt_token_ids`, `completion_token_ids`, and the texts that these decode to,
            `prompt_tokens` and `completion_tokens`
        truncate_prompt_tokens: keep the last so many tokens of the prompt; -1 leaves room for `max_tokens`
        priority: lower ones start earlier (default: 0)
        max_streaming_response_tokens: a chunk waits for so many tokens of its choice, or its end (default: 1)
    """

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
    include_logprobs_decode_token: bool = True
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
    """Body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either
        prompt_token_ids: token ids or a list of such lists, in place of `prompt`
        suffix: the text that follows what is asked for; needs a model with tokens for it
        best_of: `n` or nothing
        echo: put the prompt before the text
        logprobs: 0 to 20 alternatives per token; true is 1, false none
    """

    prompt: str | list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | bool | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation; contents are text or lists of text parts
        prompt_token_ids: the prompt as token ids, in place of `messages`
        max_completion_tokens: wins over `max_tokens`
        logprobs: report the probability of each token
        top_logprobs: 0 to 20 alternatives per token; needs `logprobs`
        add_generation_prompt: end the prompt with the opening of the assistant's turn (default: true unless
            the last message is continued)
        chat_template: a template for this request, or the name of one that the tokenizer brings
        chat_template_kwargs: further names that the template reads, such as `enable_thinking`
        disable_chat_template: the prompt is the first message's content as it stands
        continue_final_message: the last message is the beginning of the answer
        reasoning_max_tokens: most tokens of reasoning; then its end is forced
        response_max_tokens: most tokens after the reasoning
        reasoning_effort: handed to the template; `none` also sets `enable_thinking` false
        tools: functions that the model may call
        tool_choice: `none`, `auto`, `required`, one function, or `allowed_tools`
        parallel_tool_calls: false allows at most one call
    """

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
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


_SERVICE = "names or files the request for a hosted service"
WITHOUT_EFFECT: dict[str, str] = {
    "user": _SERVICE,
    "metadata": f"{_SERVICE}; its values are texts",
    "store": _SERVICE,
    "safety_identifier": _SERVICE,
    "prompt_cache_key": "equal prefixes are found without it; `cache_salt` keeps them apart",
    "prompt_cache_retention": "cached prefixes stay as long as there is room",
    "trace_context": "this server sends no traces",
}
"""Field -> why nothing here depends on it."""

_OFF: tuple[Any, ...] = (False, [], {}, "", 0)
_TEXT_ONLY = "this server reads and writes text only"
_ONE_WAY = "beam search is not there: outputs are sampled"
_BY_SERVER = "log-probabilities have one form per server; see --logprobs-mode"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": ("is OpenAI's older spelling; use tools", ([],)),
    "function_call": ("is OpenAI's older spelling; use tool_choice", ("none", "auto")),
    "service_tier": ("there is one tier", ("auto", "default")),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "mm_hashes": (_TEXT_ONLY, _OFF),
    "mm_processor_kwargs": (_TEXT_ONLY, _OFF),
    "prediction": ("speculation finds repeated text by itself", ()),
    "verbosity": ("say in the prompt how long the answer should be", ("medium",)),
    "web_search_options": ("this server searches nothing", ()),
    "use_beam_search": (_ONE_WAY, (False,)),
    "length_penalty": (_ONE_WAY, (1, 1.0)),
    "early_stopping": (_ONE_WAY, (False,)),
    "include_draft_logprobs": ("the answer is the target's; drafts have no probabilities of their own", (False,)),
    "temp_scaled_logprobs": (_BY_SERVER, (False,)),
    "top_p_normalized_logprobs": (_BY_SERVER, (False,)),
    "completion_token_ids": ("put the tokens to go on from at the end of prompt_token_ids", ([],)),
    "disaggregate_info": ("the nodes of a deployment agree among themselves on who prefills", ({},)),
    "kv_transfer_params": ("the nodes of a deployment agree among themselves on who prefills", ({},)),
    "guided_whitespace_pattern": ("whitespace follows the grammar", ()),
    "guided_decoding_backend": ("one backend per server; see --guided-decoding-backend", ("auto",)),
    "spaces_between_special_tokens": ("texts are decoded as the tokenizer writes them", (True,)),
    "return_tokens_as_token_ids": ("see return_token_ids", (False,)),
    "structured_outputs": ("use response_format or the guided_ fields", ({},)),
    "logits_processors": ("see logits_processors_args", ([],)),
    "vllm_xargs": ("there are no plug-ins that read it", ({},)),
    "documents": ("put them into chat_template_kwargs", ([],)),
    "enable_thinking": ("put it into chat_template_kwargs", ()),
    "thinking_token_budget": ("use reasoning_max_tokens", ()),
    "include_reasoning": ("reasoning stands apart, in reasoning_content", (True,)),
    "allowed_token_ids": ("see guided_choice and guided_regex", ([],)),
}
"""Field -> (why it is refused, values that ask for nothing)."""

T = TypeVar("T", bound=msgspec.Struct)


def parse_body(body: bytes, model: type[T]) -> T:
    """Parse a JSON body into `model`.

    Raises:
        ApiError: 400, naming the field: no JSON object, a field given twice, an unknown field (and the nearest known
            one), a field of the wrong type, or one that is refused.
    """
    given = _decode(body)
    known = _known_fields(model)
    is_generation = issubclass(model, GenerationFields)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in known:
            if value is not None:
                values[name] = _convert(name, value, known[name])
        elif is_generation and name in REFUSED:
            _check_refused(name, value)
        elif is_generation and name == "metadata":
            _check_metadata(value)
        elif not is_generation or name not in WITHOUT_EFFECT:
            raise _unknown(name, model)
    request = model(**values)
    if isinstance(request, GenerationFields) and request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options", "needs stream: true")
    return request


@cache
def _known_fields(model: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(model)}  # resolving annotations takes 2 ms


def _decode(body: bytes) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(body)
        json.loads(body, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(400, f"the body must be a JSON object, got {_json_type(given)}", code="invalid_json")
    return given


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a key that stands twice in an object: parsers differ in which of the values counts."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise ApiError(400, f"{name}: given twice in one object", param=name, code="invalid_json")
        seen.add(name)


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


def _check_metadata(value: Any) -> None:
    """Refuse what is no tag: older clients of FastDeploy put settings here, which would be lost."""
    if value is not None and (not isinstance(value, dict) or not all(isinstance(tag, str) for tag in value.values())):
        raise InvalidRequestError("metadata", "expected a mapping to texts; settings are fields of their own")


def _unknown(name: str, model: type[msgspec.Struct]) -> ApiError:
    if model is CompletionRequest and name in _known_fields(ChatCompletionRequest):
        hint = "it belongs to /v1/chat/completions"
    elif model is ChatCompletionRequest and name in _known_fields(CompletionRequest):
        hint = "it belongs to /v1/completions"
    else:
        known = [*_known_fields(model), *([*REFUSED, *WITHOUT_EFFECT] if issubclass(model, GenerationFields) else [])]
        nearest = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else ""
    message = f"{name[:64]}: unknown field" + (f"; {hint}" if hint else "")
    return ApiError(400, message, param=name[:64], code="unknown_parameter")


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
