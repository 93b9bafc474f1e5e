# SPDX-License-Identifier: Apache-2.0
"""Responses and events of /v1/messages and /v1/messages/count_tokens, in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from fastdeploy.entrypoints.openai.responses import ResponseBody, SpeculationNote

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class TextBlock(ResponseBody, kw_only=True, tag="text", tag_field="type"):
    """Text of the answer."""

    text: str


class ThinkingBlock(ResponseBody, kw_only=True, tag="thinking", tag_field="type"):
    """Reasoning.

    Attributes:
        thinking: the text; empty with `display: "omitted"`
        signature: means nothing; it is accepted back and not verified
    """

    thinking: str
    signature: str


class ToolUseBlock(ResponseBody, kw_only=True, tag="tool_use", tag_field="type"):
    """A call of a tool.

    Attributes:
        input: the arguments; if what the model wrote is no JSON object, for example because it was cut, an object
            with this text under the key `INVALID_JSON`; in a stream `{}`, and the text comes as it is
    """

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(ResponseBody, kw_only=True):
    """Details of `output_tokens`.

    Attributes:
        thinking_tokens: tokens of the reasoning, its markers included
    """

    thinking_tokens: int


class MessageUsage(ResponseBody, kw_only=True):
    """Token counts of a message; the prompt has as many tokens as the three input counts together.

    Attributes:
        input_tokens: prompt tokens that were neither read from the prefix cache nor written to it
        cache_creation_input_tokens: computed prompt tokens whose blocks other requests can find in the prefix cache
        cache_read_input_tokens: prompt tokens found in the prefix cache
        output_tokens_details: present if the server separates the reasoning
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET


class MessageResponse(ResponseBody, kw_only=True):
    """Body of POST /v1/messages.

    Attributes:
        id: `msg_` and the request's id
        model: the name in the request
        stop_reason: why the output ended; null while it continues, and if /v1/abort_requests ended it
        stop_sequence: the stop sequence that ended the output
        speculation: present if the text may differ from plain decoding
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation: SpeculationNote | UnsetType = UNSET


class TextDelta(ResponseBody, kw_only=True, tag="text_delta", tag_field="type"):
    """What an event adds to a text block."""

    text: str


class ThinkingDelta(ResponseBody, kw_only=True, tag="thinking_delta", tag_field="type"):
    """What an event adds to a thinking block."""

    thinking: str


class SignatureDelta(ResponseBody, kw_only=True, tag="signature_delta", tag_field="type"):
    """The signature of a thinking block, at its end."""

    signature: str


class InputJsonDelta(ResponseBody, kw_only=True, tag="input_json_delta", tag_field="type"):
    """What an event adds to the input of a call, as JSON text."""

    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(ResponseBody, kw_only=True, tag="message_start", tag_field="type"):
    """The first event: the message without content."""

    message: MessageResponse


class ContentBlockStart(ResponseBody, kw_only=True, tag="content_block_start", tag_field="type"):
    """The beginning of a content block."""

    index: int
    content_block: ContentBlock


class ContentBlockDelta(ResponseBody, kw_only=True, tag="content_block_delta", tag_field="type"):
    """What is new in a content block."""

    index: int
    delta: BlockDelta


class ContentBlockStop(ResponseBody, kw_only=True, tag="content_block_stop", tag_field="type"):
    """The end of a content block."""

    index: int


class MessageEnd(ResponseBody, kw_only=True):
    """Why a message ended; see `MessageResponse`."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(ResponseBody, kw_only=True, tag="message_delta", tag_field="type"):
    """The end of the message, with its token counts."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(ResponseBody, kw_only=True, tag="message_stop", tag_field="type"):
    """The last event."""


class Ping(ResponseBody, kw_only=True, tag="ping", tag_field="type"):
    """An event that only shows that the connection is alive."""


MessageEvent = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
)


class CountTokensResponse(ResponseBody, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    input_tokens: int
