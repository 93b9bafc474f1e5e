# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies: honoured, accepted without effect, or refused by name (docs/guide/request-fields.md).

The docstrings describe the fields in the OpenAPI document and in the documentation.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy.config.server_config import MAX_TIMEOUT_S
from fastdeploy.core.sampling_params import RANGES, Range


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed response.

    Attributes:
        include_usage: end with a chunk without choices that carries the usage
        continuous_usage_stats: put the usage so far into every chunk
        include_obfuscation: accepted without effect; chunks are never padded
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have; None means not given. Their ranges are in `FIELD_RANGES`.

    Attributes:
        model: the served name, the model's path, its last part, or `default`; anything else is answered with 404
        stream: answer with server-sent events
        stream_options: `include_usage`, `continuous_usage_stats`; needs `stream`
        n: number of choices per prompt
        temperature: 0 is greedy
        top_p: keep the smallest set of tokens whose probability reaches this value
        top_k: number of most probable tokens to keep; 0 and -1 keep all
        min_p: minimum probability, relative to the most probable token
        presence_penalty, frequency_penalty: penalty over the tokens of the output
        repetition_penalty: penalty over the tokens of prompt and output
        seed: the same request with the same seed gives the same tokens
        max_tokens: maximum number of output tokens; the end of the context is a limit as well
        min_tokens: minimum number of output tokens before the output may end
        stop: a string, or several, at which the text ends
        stop_token_ids: token ids at which the output ends
        bad_words: texts that are never written; at most 65536 characters in all
        bad_words_token_ids: token sequences that are never written; at most 16384 ids in all, with those of `bad_words`
        ignore_eos: continue after the model's end tokens
        logit_bias: token id to a number that is added to its logit
        prompt_logprobs: number of alternatives per prompt token; they come with the first choice of each prompt, in a
            stream with its first chunk; at most 1048576 log-probabilities in one answer
        include_logprobs_decode_token: false leaves the texts of tokens out of `prompt_logprobs`
        skip_special_tokens: leave special tokens out of the text (default: true)
        include_stop_str_in_output: keep the stop string in the text
        speculative: `{"method": "off"}` or `{"num_speculative_tokens": K}` for this request
        logits_processors_args: `logit_bias` and, for chats, `thinking_budget`, as FastDeploy's processors name them
        response_format: `text`, `json_object`, `json_schema` or `structural_tag`
        guided_json: JSON schema that the output must follow; only one constraint per request
        guided_regex: regular expression that the output must match; only one constraint per request
        guided_choice: texts of which the output must be one; only one constraint per request
        guided_grammar: grammar that the output must follow; only one constraint per request
        structural_tag: parts of the output whose content follows a schema
        add_special_tokens: encode text with the tokenizer's special tokens (default: true, for chats false)
        cache_salt: requests share cached prefixes only with requests of the same salt, of at most 256 characters
        collect_metrics: add `speculate_metrics` and `metrics` to finished choices
        request_id: name of the request, which the response's `id` contains
        return_token_ids: add `prompt_token_ids`, `completion_token_ids`, and the texts that these decode to,
            `prompt_tokens` and `completion_tokens`
        truncate_prompt_tokens: keep only this many of the last prompt tokens; -1 leaves room for `max_tokens`
        priority: requests of lower values start before others of the same client (default: 0)
        timeout: seconds from its arrival after which the request is ended; the server may set a shorter time
        max_streaming_response_tokens: minimum number of tokens per chunk, unless its choice ends (default: 1)
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
    # constraint on the output
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    # prompt, identity and answer
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    collect_metrics: bool = False
    request_id: str | None = None
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    timeout: float | None = None
    max_streaming_response_tokens: int | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either
        prompt_token_ids: token ids or a list of such lists, instead of `prompt`
        suffix: text that follows the completion; needs a model with fill-in-the-middle tokens
        best_of: must equal `n` if it is given
        echo: put the prompt before the text
        logprobs: number of alternatives per token; true is 1, false none
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
        messages: the conversation; contents are text or lists of text parts; at most 16384 messages, parts and tool
            calls
        prompt_token_ids: the prompt as token ids, instead of `messages`
        max_completion_tokens: takes precedence over `max_tokens`
        logprobs: report the probability of each token
        top_logprobs: number of alternatives per token; needs `logprobs`
        add_generation_prompt: end the prompt with the opening of the assistant's turn (default: true unless
            the last message is continued)
        chat_template: a template for this request, or the name of one of the tokenizer's templates
        chat_template_kwargs: further variables for the template, such as `enable_thinking`
        disable_chat_template: use the content of the first message as the prompt, without a template
        continue_final_message: the last message is the beginning of the answer
        reasoning_max_tokens: maximum number of reasoning tokens; then the end of the reasoning is forced
        response_max_tokens: maximum number of tokens after the reasoning
        reasoning_effort: passed to the template; `none` also sets `enable_thinking` to false
        tools: functions that the model may call, at most 1024
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


FIELD_RANGES: dict[str, Range] = {
    **RANGES,
    "max_completion_tokens": RANGES["max_tokens"],
    "top_logprobs": RANGES["logprobs"],
    "best_of": RANGES["n"],
    "priority": Range(-(2**31), 2**31 - 1),
    "timeout": Range(0.001, MAX_TIMEOUT_S),
    "max_streaming_response_tokens": Range(1, None),
}
"""Field of a body -> its range."""

_SERVICE = "identifies or stores the request in a hosted service"
WITHOUT_EFFECT: dict[str, str] = {
    "user": _SERVICE,
    "metadata": f"{_SERVICE}; its values are texts",
    "store": _SERVICE,
    "safety_identifier": _SERVICE,
    "prompt_cache_key": "equal prefixes are found without it; `cache_salt` separates them",
    "prompt_cache_retention": "cached prefixes stay as long as there is room",
    "trace_context": "this server sends no traces",
}
"""Field -> why it is accepted without effect."""

_OFF: tuple[Any, ...] = (False, [], {}, "", 0)
_TEXT_ONLY = "this server reads and writes text only"
_NO_BEAM_SEARCH = "beam search is not supported"
_BY_SERVER = "the server has one kind of log-probabilities; see --logprobs-mode"
_DISAGGREGATED = "internal to prefill/decode separation; clients do not send it"
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "functions": ("is OpenAI's older spelling; use tools", ([],)),
    "function_call": ("is OpenAI's older spelling; use tool_choice", ("none", "auto")),
    "service_tier": ("there are no service tiers", ("auto", "default")),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "mm_hashes": (_TEXT_ONLY, _OFF),
    "mm_processor_kwargs": (_TEXT_ONLY, _OFF),
    "prediction": ("speculation finds repeated text without it", ()),
    "verbosity": ("describe the length of the answer in the prompt", ("medium",)),
    "web_search_options": ("web search is not supported", ()),
    "use_beam_search": (_NO_BEAM_SEARCH, (False,)),
    "length_penalty": (_NO_BEAM_SEARCH, (1, 1.0)),
    "early_stopping": (_NO_BEAM_SEARCH, (False,)),
    "include_draft_logprobs": ("tokens are sampled from the target; drafts have no probabilities", (False,)),
    "temp_scaled_logprobs": (_BY_SERVER, (False,)),
    "top_p_normalized_logprobs": (_BY_SERVER, (False,)),
    "completion_token_ids": ("append the tokens to continue from to prompt_token_ids", ([],)),
    "disaggregate_info": (_DISAGGREGATED, ({},)),
    "kv_transfer_params": (_DISAGGREGATED, ({},)),
    "guided_whitespace_pattern": ("the grammar defines the whitespace", ()),
    "guided_decoding_backend": ("the server has one backend; see --guided-decoding-backend", ("auto",)),
    "spaces_between_special_tokens": ("texts are decoded as the tokenizer writes them", (True,)),
    "return_tokens_as_token_ids": ("see return_token_ids", (False,)),
    "structured_outputs": ("use response_format or the guided_ fields", ({},)),
    "logits_processors": ("see logits_processors_args", ([],)),
    "vllm_xargs": ("there are no plug-ins that read it", ({},)),
    "documents": ("put them into chat_template_kwargs", ([],)),
    "enable_thinking": ("put it into chat_template_kwargs", ()),
    "thinking_token_budget": ("use reasoning_max_tokens", ()),
    "include_reasoning": ("reasoning is always separate, in reasoning_content", (True,)),
    "allowed_token_ids": ("see guided_choice and guided_regex", ([],)),
}
"""Field -> (why it is refused, values that are accepted because they request nothing)."""
