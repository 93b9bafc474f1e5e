# SPDX-License-Identifier: Apache-2.0
"""Bodies of responses. A field whose default is UNSET is left out of responses that it does not apply to."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

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


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


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


class SpeculativeDecodingMetrics(ResponseBody, kw_only=True):
    """Acceptance of drafts in a request with one choice, as vLLM reports it.

    Attributes:
        mean_acceptance_length: tokens that a step with drafts emits on average, the one after the drafts included
        draft_acceptance_rate: accepted / drafted tokens
        acceptance_histogram: [n] number of steps that accepted n drafts
        num_spec_steps: steps with drafts
        num_spec_tokens: maximum number of drafts in a step
        per_step_accepted, per_step_drafted: counts of each step are not recorded
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: None = None
    per_step_drafted: None = None


class PerRequestMetrics(ResponseBody, kw_only=True):
    """Times of a request with one choice, as vLLM reports them; null without `--enable-per-request-metrics`.

    Attributes:
        time_to_first_token_ms: from the arrival to the first token, the time in the queue included
        generation_time_ms: from the first token to the last one
        queue_time_ms: from the arrival to the first step
        mean_itl_ms: mean time between tokens after the first one; null for a single token
        tokens_per_second: output tokens per second from the first step to the end
        speculative_decoding: with `--per-request-spec-decode-metrics summary`, if there were drafts
    """

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    speculative_decoding: SpeculativeDecodingMetrics | None = None


class ChoiceFields(ResponseBody, kw_only=True):
    """Fields that the choices of both endpoints have.

    Attributes:
        finish_reason: why the output ended; null while it continues
        stop_reason: the stop string or token id that ended the output
        seed: the same request with this seed gives the same tokens
        token_ids, completion_token_ids: the output, with `return_token_ids`, under vLLM's name and FastDeploy's
        prompt_token_ids: the prompt, with `return_token_ids`
        prompt_tokens, completion_tokens: texts of prompt and output, with `return_token_ids`
        tokens: where each token came from, with `return_token_ids` and `collect_metrics`
        prompt_logprobs: token id to its log-probability, for each position of the prompt
        speculate_metrics, metrics: acceptance and times of the choice, with `collect_metrics`
    """

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    prompt_tokens: str | UnsetType = UNSET
    completion_token_ids: list[int] | UnsetType = UNSET
    completion_tokens: str | UnsetType = UNSET
    tokens: list[OutputToken] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    speculate_metrics: SpeculateMetrics | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET


class CompletionLogprobs(ResponseBody, kw_only=True):
    """Log-probabilities of the tokens of a completion.

    Attributes:
        token_logprobs, top_logprobs: null for the first token of an echoed prompt
        text_offset: where each token begins in the choice's text, in characters; a token that the text leaves out has
            the place of the next one
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionStreamChoice(ChoiceFields, kw_only=True):
    """What a chunk adds to one completion."""

    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(CompletionStreamChoice, kw_only=True):
    """One completion.

    Attributes:
        token_ids, prompt_token_ids, prompt_logprobs: null if the request does not ask for them
    """

    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ResponseHead, kw_only=True):
    """Body of POST /v1/completions."""

    choices: list[CompletionChoice]
    usage: UsageInfo
    metrics: PerRequestMetrics | None = None


class CompletionStreamResponse(ResponseHead, kw_only=True):
    """One chunk of a streamed completion.

    Attributes:
        metrics: in the chunk with the usage
    """

    choices: list[CompletionStreamChoice]
    usage: UsageInfo | UnsetType = UNSET
    metrics: PerRequestMetrics | UnsetType = UNSET


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
        reasoning, reasoning_content: the reasoning under both of its names; null if there is none, or if the server
            does not separate it
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatCompletionChoice(ChoiceFields, kw_only=True):
    """One message.

    Attributes:
        token_ids: null if the request does not ask for them
    """

    message: ChatMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(ResponseHead, kw_only=True):
    """Body of POST /v1/chat/completions.

    Attributes:
        prompt_token_ids, prompt_logprobs: those of the first choice, where vLLM has them; null if the request does not
            ask for them
    """

    choices: list[ChatCompletionChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    metrics: PerRequestMetrics | None = None


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
    """One chunk of a streamed chat completion.

    Attributes:
        prompt_token_ids: in the first chunk, with `return_token_ids`
        metrics: in the chunk with the usage
    """

    choices: list[ChatCompletionStreamChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: UsageInfo | UnsetType = UNSET
    metrics: PerRequestMetrics | UnsetType = UNSET
