# SPDX-License-Identifier: Apache-2.0
"""Bodies of responses. A field whose default is UNSET is left out of responses that it does not apply to."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fastdeploy.core.outputs import RequestMetrics, SpeculateMetrics

FinishReason = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", "abort"]})]


class ResponseBody(msgspec.Struct, forbid_unknown_fields=True):
    """Base class of all bodies."""


class ErrorDetail(ResponseBody, kw_only=True):
    """Why a request failed.

    Attributes:
        message: begins with the field at fault, if there is one
        type: kind of the error, one per status
        param: the field of the request at fault
        code: the reason, for programs
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseBody, kw_only=True):
    """Body of every response that is not a success."""

    error: ErrorDetail


class PromptTokensDetails(ResponseBody, kw_only=True):
    """Details of `prompt_tokens`.

    Attributes:
        cached_tokens: prompt tokens found in the prefix cache
    """

    cached_tokens: int


class CompletionTokensDetails(ResponseBody, kw_only=True):
    """Details of `completion_tokens`.

    Attributes:
        reasoning_tokens: tokens of the reasoning, its markers included
    """

    reasoning_tokens: int


class UsageInfo(ResponseBody, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class SpeculationNote(ResponseBody, kw_only=True):
    """Settings of speculation under which the text may differ from plain decoding."""

    method: str | None
    verify_strategy: str | None
    accept_policy: str | None
    lossy: bool | None


class ResponseHead(ResponseBody, kw_only=True):
    """Fields that all responses of a generation begin with.

    Attributes:
        id: `cmpl-` or `chatcmpl-` and the request's id
        created: seconds since the epoch
        model: the served name
        system_fingerprint: the numerics; equal fingerprints give equal texts
        speculation: present if the text may differ from plain decoding
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    speculation: SpeculationNote | UnsetType = UNSET


class PromptLogprob(ResponseBody, kw_only=True):
    """Log-probability of a token at a position of the prompt.

    Attributes:
        rank: 1 for the most probable token
        decoded_token: its text; null with `include_logprobs_decode_token: false`
    """

    logprob: float
    rank: int
    decoded_token: str | None


class OutputToken(ResponseBody, kw_only=True):
    """A token of the output and where it came from.

    Attributes:
        text: its text; `bytes:\\\\xe2\\\\x98` for bytes that are no text
        origin: whether the token was an accepted draft
        source: the proposer of a draft
    """

    id: int
    text: str
    origin: Literal["draft", "target"]
    source: str | UnsetType = UNSET


class ChoiceFields(ResponseBody, kw_only=True):
    """Fields that the choices of both endpoints have.

    Attributes:
        finish_reason: why the output ended; null while it continues
        stop_reason: the stop string or token id that ended the output
        seed: the same request with this seed gives the same tokens
        prompt_token_ids, prompt_tokens: the prompt and its text, with `return_token_ids`
        completion_token_ids, completion_tokens: the output and its text, with `return_token_ids`
        tokens: where each token came from, with `return_token_ids` and `collect_metrics`
        prompt_logprobs: token id to its log-probability, for each position of the prompt
        speculate_metrics, metrics: acceptance and times of the choice, with `collect_metrics`
    """

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_tokens: str | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET
    completion_tokens: str | UnsetType = UNSET
    tokens: list[OutputToken] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    speculate_metrics: SpeculateMetrics | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET


class CompletionLogprobs(ResponseBody, kw_only=True):
    """Log-probabilities of the tokens of a completion.

    Attributes:
        token_logprobs, top_logprobs: null for the first token of an echoed prompt
        text_offset: where each token begins in the text
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceFields, kw_only=True):
    """One completion, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None


class CompletionResponse(ResponseHead, kw_only=True):
    """Body of POST /v1/completions."""

    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionStreamResponse(ResponseHead, kw_only=True):
    """One chunk of a streamed completion."""

    choices: list[CompletionChoice]
    usage: UsageInfo | UnsetType = UNSET


class TopLogprob(ResponseBody, kw_only=True):
    """A token that could have been chosen at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The token at a position and the alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody, kw_only=True):
    """Log-probabilities of the tokens of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(ResponseBody, kw_only=True):
    """A call of a function.

    Attributes:
        arguments: JSON text, as the model wrote it
    """

    name: str
    arguments: str


class ToolCall(ResponseBody, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(ResponseBody, kw_only=True):
    """The message of the assistant.

    Attributes:
        content: the text; null beside tool calls without text
        reasoning, reasoning_content: the reasoning, if the server separates it, under both of its names
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatCompletionChoice(ChoiceFields, kw_only=True):
    """One message."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletionResponse(ResponseHead, kw_only=True):
    """Body of POST /v1/chat/completions."""

    choices: list[ChatCompletionChoice]
    usage: UsageInfo


class DeltaFunctionCall(ResponseBody, kw_only=True):
    """What a chunk adds to a call of a function."""

    name: str | UnsetType = UNSET
    arguments: str


class DeltaToolCall(ResponseBody, kw_only=True):
    """What a chunk adds to a call of a tool; `id`, `type` and the function's name come with the first chunk."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: DeltaFunctionCall


class DeltaMessage(ResponseBody, kw_only=True):
    """What a chunk adds to a message.

    Attributes:
        reasoning, reasoning_content: the same text
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatCompletionStreamChoice(ChoiceFields, kw_only=True):
    """What a chunk adds to one message."""

    delta: DeltaMessage
    logprobs: ChatLogprobs | None


class ChatCompletionStreamResponse(ResponseHead, kw_only=True):
    """One chunk of a streamed chat completion."""

    choices: list[ChatCompletionStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
