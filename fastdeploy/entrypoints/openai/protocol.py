# SPDX-License-Identifier: Apache-2.0
"""Fields of request bodies that are honoured; `field_rules` has the others (docs/guide/request-fields.md).

The docstrings describe the fields in the OpenAPI document and in the documentation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import msgspec

from fastdeploy.config.server_config import MAX_TIMEOUT_S
from fastdeploy.core.guided_decoding import FORM_KEYS
from fastdeploy.core.sampling_params import OUTPUT_LENGTHS, PRIORITIES, RANGES, Range
from fastdeploy.entrypoints.openai.field_rules import EXTENSIONS, NO_RULES, NOTED, REFUSED, WITHOUT_EFFECT, FieldRules

SPECULATIVE_KEYS = ("method", "num_speculative_tokens")
PROCESSOR_KEYS = ("logit_bias", "thinking_budget")
TAG_KEYS = ("structures", "triggers", "format")
JSON_SCHEMA_KEYS = ("name", "schema", "strict", "description")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed response.

    Attributes:
        include_usage: end with a chunk without choices that carries the usage
        continuous_usage_stats: put the usage so far into every chunk; has an effect only with `include_usage`
        include_obfuscation: accepted without effect; chunks are never padded
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields of all endpoints that generate, in every protocol; None means not given.

    Attributes:
        model: the served name, the model's path, its last part, or `default`; anything else is answered with 404
        stream: answer with server-sent events
        temperature: 0 is greedy
        top_p: keep the smallest set of tokens whose probability reaches this value
        top_k: number of most probable tokens to keep; 0 and -1 keep all
        min_p: minimum probability, relative to the most probable token
        seed: the same request with the same seed gives the same tokens
        ignore_eos: continue after the model's end tokens
        speculative: `{"method": "off"}`, `{"method": "match"}` or `{"num_speculative_tokens": K}` for this request
        cache_salt: requests share cached prefixes only with requests of the same salt
        request_id: name of the request, which the response's `id` contains
        priority: requests of lower values start before others of the same client (default: 0)
        timeout: seconds from its arrival after which the request is ended; the server may set a shorter time
    """

    rules: ClassVar[FieldRules] = NO_RULES
    objects: ClassVar[Mapping[str, Collection[str]]] = {"speculative": SPECULATIVE_KEYS}

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    speculative: dict[str, Any] | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int = 0
    timeout: float | None = None


class GenerationFields(RequestFields, kw_only=True):
    """Fields that chats and completions have; None means not given. Their ranges are in `FIELD_RANGES`.

    Attributes:
        stream_options: `include_usage`, `continuous_usage_stats`; needs `stream`
        n: number of choices per prompt
        presence_penalty, frequency_penalty: penalty over the tokens of the output
        repetition_penalty: penalty over the tokens of prompt and output
        max_tokens: maximum number of output tokens; the end of the context is a limit as well. 0 computes the prompt
            only, for completions with `echo` or `prompt_logprobs`
        min_tokens: minimum number of output tokens before the output may end
        stop: a string, or several, at which the text ends
        stop_token_ids: token ids at which the output ends
        bad_words: texts that are never written; at most 65536 characters in all
        bad_words_token_ids: token sequences that are never written; at most 16384 ids in all, with those of `bad_words`
        allowed_token_ids: the only token ids that may be written; without an end token the output ends at its
            maximum length
        logit_bias: token id to a number that is added to its logit
        prompt_logprobs: number of alternatives per prompt token; they come with the first choice of each prompt, in a
            stream with its first chunk; at most 20 unless the server has another `--max-logprobs`; -1 is the whole
            vocabulary
        logprob_token_ids: token ids that are reported for every output token beside the alternatives; needs `logprobs`
        include_logprobs_decode_token: false leaves the texts of tokens out of `prompt_logprobs`
        skip_special_tokens: leave special tokens out of the text (default: true)
        include_stop_str_in_output: keep the stop string in the text
        thinking_token_budget: maximum number of reasoning tokens; then the end of the reasoning is forced; -1 is no
            limit; needs a server with --reasoning-parser
        logits_processors_args: `logit_bias` and `thinking_budget`, as FastDeploy's processors name them
        response_format: `text`, `json_object`, `json_schema` or `structural_tag`
        guided_json: JSON schema that the output must follow; only one constraint per request
        guided_regex: regular expression that the output must match; only one constraint per request
        guided_choice: texts of which the output must be one; only one constraint per request
        guided_grammar: grammar that the output must follow; only one constraint per request
        structural_tag: parts of the output whose content follows a schema; only one constraint per request
        structured_outputs: one of `json`, `regex`, `choice`, `grammar`, `structural_tag` and `json_object`, as in the
            fields above, and for JSON `disable_any_whitespace`, `disable_additional_properties`,
            `whitespace_pattern`; only one constraint per request
        add_special_tokens: encode text with the tokenizer's special tokens (default: true, for chats false)
        collect_metrics: add `speculate_metrics` and `metrics` to finished choices
        return_token_ids: add `token_ids` and `prompt_token_ids`, and for clients of FastDeploy `completion_token_ids`
            and the texts that the ids decode to, `prompt_tokens` and `completion_tokens`
        return_tokens_as_token_ids: name tokens in log-probabilities `token_id:17` (default: the server's flag)
        truncate_prompt_tokens: keep only this many of the last prompt tokens; -1 leaves room for `max_tokens`
        truncation_side: the side of the prompt that `truncate_prompt_tokens` cuts off (default: left)
        max_streaming_response_tokens: minimum number of tokens per chunk, unless its choice ends (default: 1)
    """

    rules: ClassVar[FieldRules] = FieldRules(WITHOUT_EFFECT, REFUSED, noted=NOTED, object_fields=EXTENSIONS)
    objects: ClassVar[Mapping[str, Collection[str]]] = {
        **RequestFields.objects,
        "logits_processors_args": PROCESSOR_KEYS,
        "response_format": ("type", "json_schema", *TAG_KEYS),
        "response_format.json_schema": JSON_SCHEMA_KEYS,
        "structured_outputs": FORM_KEYS,
    }

    stream_options: StreamOptions | None = None
    # sampling
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[Any] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    include_logprobs_decode_token: bool = True
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    thinking_token_budget: int | None = None
    logits_processors_args: dict[str, Any] | None = None
    # constraint on the output
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None
    # prompt, identity and answer
    add_special_tokens: bool | None = None
    collect_metrics: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    max_streaming_response_tokens: int | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """Body of POST /v1/completions.

    Attributes:
        prompt: a text, token ids, or a list of either
        prompt_token_ids: token ids or a list of such lists, instead of `prompt`
        suffix: text that follows the completion; needs a model with fill-in-the-middle tokens
        best_of: must equal `n` if it is given
        echo: put the prompt before the text
        logprobs: number of alternatives per token; true is 1, false none; limits as of `prompt_logprobs`
    """

    prompt: str | list[Any] | None = None
    prompt_token_ids: list[Any] | None = None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: int | bool | None = None


class ChatFields(GenerationFields, kw_only=True):
    """Fields of chats, whose body has one conversation or several; None means not given.

    Attributes:
        max_completion_tokens: takes precedence over `max_tokens`
        logprobs: report the probability of each token
        top_logprobs: number of alternatives per token; needs `logprobs`; limits as of `prompt_logprobs`
        add_generation_prompt: end the prompt with the opening of the assistant's turn (default: true unless
            the last message is continued)
        chat_template: a template for this request, or the name of one of the tokenizer's templates
        chat_template_kwargs: further variables for the template, such as `enable_thinking`
        disable_chat_template: use the content of the first message as the prompt, without a template
        continue_final_message: the last message is the beginning of the answer
        reasoning_max_tokens: the same as `thinking_token_budget`, at least 0
        include_reasoning: false leaves the reasoning out of the answer; `usage`, log-probabilities and token ids
            include it
        response_max_tokens: maximum number of tokens after the reasoning
        reasoning_effort: passed to the template; `none` also sets `enable_thinking` to false
        tools: functions that the model may call, at most 1024; custom tools are left out
        tool_choice: `none`, `auto`, `required`, one function, or `allowed_tools`
        parallel_tool_calls: false allows at most one call
    """

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    disable_chat_template: bool = False
    continue_final_message: bool = False
    reasoning_max_tokens: int | None = None
    include_reasoning: bool = True
    response_max_tokens: int | None = None
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class ChatCompletionRequest(ChatFields, kw_only=True):
    """Body of POST /v1/chat/completions.

    Attributes:
        messages: the conversation; contents are text or lists of text parts; at most 16384 messages, parts and tool
            calls
        prompt_token_ids: the prompt as token ids, instead of `messages`
    """

    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None


class BatchChatCompletionRequest(ChatFields, kw_only=True):
    """Body of POST /v1/chat/completions/batch.

    Attributes:
        messages: a list of conversations, each as in chats; at most 1024 choices in all
    """

    messages: list[list[dict[str, Any]]] | None = None


FIELD_RANGES: dict[str, Range] = {
    **RANGES,
    "max_completion_tokens": OUTPUT_LENGTHS,
    "thinking_token_budget": Range(-1, RANGES["reasoning_max_tokens"].high),
    "max_output_tokens": OUTPUT_LENGTHS,
    "top_logprobs": RANGES["logprobs"],
    "best_of": RANGES["n"],
    "priority": PRIORITIES,
    "timeout": Range(0.001, MAX_TIMEOUT_S),
    "max_streaming_response_tokens": Range(1, None),
}
"""Field of a body -> its range."""
