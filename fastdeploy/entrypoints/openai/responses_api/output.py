# SPDX-License-Identifier: Apache-2.0
"""The answer of POST /v1/responses and the events of its stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fastdeploy.entrypoints.openai.responses import PerRequestMetrics, ResponseBody, SpeculationNote

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]


class TopTokenLogprob(ResponseBody, kw_only=True):
    """A token that could have been chosen at a position."""

    token: str
    bytes: list[int]
    logprob: float


class OutputTokenLogprob(TopTokenLogprob, kw_only=True):
    """The token at a position and the alternatives."""

    top_logprobs: list[TopTokenLogprob]


class OutputText(ResponseBody, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message.

    Attributes:
        logprobs: of the tokens of the text, if the request includes them; they begin after the reasoning
    """

    text: str = ""
    annotations: list[None] = msgspec.field(default_factory=list)
    logprobs: list[OutputTokenLogprob] = msgspec.field(default_factory=list)


class ReasoningText(ResponseBody, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of the reasoning."""

    text: str = ""


class OutputMessage(ResponseBody, kw_only=True, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(ResponseBody, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning; there is no summary of it."""

    id: str
    status: ItemStatus
    summary: list[None] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


class FunctionCallItem(ResponseBody, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function.

    Attributes:
        namespace: of the function, if it has one
        call_id: name of the call, which its output repeats
        arguments: JSON text, as the model wrote it
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem
OutputPart = OutputText | ReasoningText


class ResponseInputTokens(ResponseBody, kw_only=True):
    """Details of `input_tokens`.

    Attributes:
        cached_tokens: found in the prefix cache
        cache_write_tokens: written to the prefix cache
    """

    cached_tokens: int
    cache_write_tokens: int


class ResponseOutputTokens(ResponseBody, kw_only=True):
    """Details of `output_tokens`.

    Attributes:
        reasoning_tokens: tokens of the reasoning, its markers included
    """

    reasoning_tokens: int


class ResponseUsage(ResponseBody, kw_only=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: ResponseInputTokens
    output_tokens: int
    output_tokens_details: ResponseOutputTokens
    total_tokens: int


class ResponseError(ResponseBody, kw_only=True):
    """Why a response failed.

    Attributes:
        code: one of the codes of the protocol
        type, param: as in the error of a request that is refused
    """

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    type: str
    param: str | None


class IncompleteDetails(ResponseBody, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ReasoningSettings(ResponseBody, kw_only=True):
    """Settings of the reasoning."""

    effort: str | None
    summary: None = None


class TextSettings(ResponseBody, kw_only=True):
    """Settings of the text."""

    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ResponseObject(ResponseBody, kw_only=True):
    """Body of POST /v1/responses.

    Attributes:
        id: `resp_` and the request's id
        model: the served name
        status: `cancelled` if the request was aborted
        output: the reasoning, messages and calls, in the order in which they were written
        seed: the same request with this seed gives the same tokens
        system_fingerprint: the numerics; equal fingerprints give equal texts
        speculation: present if the text may differ from plain decoding
        metrics: with the server's flags for them, once the response has ended
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningSettings
    temperature: float | None
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    seed: int | UnsetType = UNSET
    background: Literal[False] = False
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    system_fingerprint: str
    speculation: SpeculationNote | UnsetType = UNSET
    metrics: PerRequestMetrics | UnsetType = UNSET


class ResponseEvent(ResponseBody, kw_only=True, tag_field="type"):
    """Base class of the events.

    Attributes:
        sequence_number: 0 for the first event, and one more for each further one
    """

    sequence_number: int = 0


class ResponseCreated(ResponseEvent, kw_only=True, tag="response.created"):
    """The first event."""

    response: ResponseObject


class ResponseInProgress(ResponseEvent, kw_only=True, tag="response.in_progress"):
    """The output begins."""

    response: ResponseObject


class ResponseCompleted(ResponseEvent, kw_only=True, tag="response.completed"):
    """The last event of a response that ended by itself."""

    response: ResponseObject


class ResponseIncomplete(ResponseEvent, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut or aborted."""

    response: ResponseObject


class ResponseFailed(ResponseEvent, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""

    response: ResponseObject


class OutputItemAdded(ResponseEvent, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class OutputItemDone(ResponseEvent, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: OutputItem


class ItemEvent(ResponseEvent, kw_only=True):
    """Base class of the events inside an item."""

    item_id: str
    output_index: int


class PartEvent(ItemEvent, kw_only=True):
    """Base class of the events of a part of an item."""

    content_index: int = 0


class ContentPartAdded(PartEvent, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputPart


class ContentPartDone(PartEvent, kw_only=True, tag="response.content_part.done"):
    """A part is complete."""

    part: OutputPart


class OutputTextDelta(PartEvent, kw_only=True, tag="response.output_text.delta"):
    """A piece of a text."""

    delta: str
    logprobs: list[OutputTokenLogprob]


class OutputTextDone(PartEvent, kw_only=True, tag="response.output_text.done"):
    """A whole text."""

    text: str
    logprobs: list[OutputTokenLogprob]


class ReasoningTextDelta(PartEvent, kw_only=True, tag="response.reasoning_text.delta"):
    """A piece of the reasoning."""

    delta: str


class ReasoningTextDone(PartEvent, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(ItemEvent, kw_only=True, tag="response.function_call_arguments.delta"):
    """A piece of the arguments of a call."""

    delta: str


class ArgumentsDone(ItemEvent, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    arguments: str


AnyEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
)


def encode_event(event: ResponseEvent) -> bytes:
    """Return an event as it is sent."""
    name = str(type(event).__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
