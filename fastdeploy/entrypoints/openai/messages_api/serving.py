# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages: Anthropic's protocol for the next message of a conversation."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from fastdeploy.entrypoints.openai.chat_turn import ChatTurn
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.messages_api.blocks import BlockWriter, content_blocks
from fastdeploy.entrypoints.openai.messages_api.errors import REQUEST_ID_HEADER
from fastdeploy.entrypoints.openai.messages_api.input import chat_input
from fastdeploy.entrypoints.openai.messages_api.protocol import MessagesRequest
from fastdeploy.entrypoints.openai.messages_api.responses import (
    MessageDelta,
    MessageEnd,
    MessageResponse,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    StopReason,
)
from fastdeploy.entrypoints.openai.prompt import reasoning_format
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import Serving, make_request_id


def _event(event: msgspec.Struct) -> bytes:
    """Return an event as bytes, named by its type."""
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


class ServingMessages(Serving):
    """A request for the next message of a conversation, whose answer consists of content blocks."""

    body: MessagesRequest
    last_event = b""
    keep_alive_event = _event(Ping())
    id_headers = (*Serving.id_headers, REQUEST_ID_HEADER.encode())

    def __init__(self, server: ApiServer, body: MessagesRequest) -> None:
        """Check the request and render the conversation.

        Raises:
            InvalidRequestError: naming the field and its range.
            ApiError: 400, naming a field that is unknown or refused.
        """
        super().__init__(server, body, f"msg_{make_request_id(body.request_id)}")
        self._chat = chat = chat_input(body, reasoning_format(server) is not None, server.config.ignore_unknown_fields)
        with renamed_errors(chat.client_field):
            self._turn = ChatTurn(server, chat.request, self.response_id, accepts_prefill_only=True)
        self.requests = [self._turn.request]

    def group(self) -> GenerationGroup:
        """Return the generation of the message, whose reasoning is counted."""
        group = super().group()
        group.usage.reasoning = self._turn.reasoning_counters()
        return group

    async def run_to_completion(self) -> bytes:
        """Run until the message has ended; return it."""
        with renamed_errors(self._chat.client_field):
            [update] = await self.group().run_to_completion()
        content = content_blocks(self._turn.parts(update), self._chat.hides_thinking)
        end = self._end(update)
        return msgspec.json.encode(self._message(content, end, self._usage()))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the message."""
        writer = BlockWriter(self._chat.hides_thinking)
        with renamed_errors(self._chat.client_field):
            async with contextlib.aclosing(self.group().updates()) as stream:
                async for updates in stream:
                    yield b"".join(_event(event) for update in updates for event in self._update_events(update, writer))

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that tells of an error after a stream has begun."""
        return b"event: error\ndata: " + error.encode_for_messages(self.response_id) + b"\n\n"

    def _update_events(self, update: ChoiceUpdate, writer: BlockWriter) -> Iterable[Any]:
        if update.is_first:
            not_ended = MessageEnd(stop_reason=None, stop_sequence=None)
            yield MessageStart(message=self._message([], not_ended, self._usage(has_ended=False)))
        for part in self._turn.parts(update):
            yield from writer.push(part)
        if update.delta.finish_reason is not None:
            yield from writer.finish()
            yield MessageDelta(delta=self._end(update), usage=self._usage())
            yield MessageStop()

    def _message(self, content: list[Any], end: MessageEnd, usage: MessageUsage) -> MessageResponse:
        note = self.server.speculation_note()
        return MessageResponse(
            id=self.response_id,
            model=self.server.response_model(self.body.model),
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=usage,
            speculation=UNSET if note is None else note,
        )

    def _end(self, update: ChoiceUpdate) -> MessageEnd:
        """Return why a message has ended; an abort has no name in this protocol."""
        delta = update.delta
        stop_reason: StopReason | None = None
        if delta.finish_reason == "length":
            is_cut = self.usage.completion_tokens >= (self.body.max_tokens or 0)
            stop_reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        elif isinstance(delta.stop_reason, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=delta.stop_reason)
        elif delta.finish_reason == "stop":
            stop_reason = "tool_use" if self._turn.num_calls(update.index) else "end_turn"
        return MessageEnd(stop_reason=stop_reason, stop_sequence=None)

    def _usage(self, has_ended: bool = True) -> MessageUsage:
        """Return the token counts so far; which of them concern the cache is known at the end."""
        usage = self.usage
        num_read = usage.cached_tokens
        num_written = self.server.num_cache_writes(usage.prompt_tokens, num_read) if has_ended else 0
        details = OutputTokensDetails(thinking_tokens=sum(counter.num_tokens for counter in usage.reasoning))
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_read - num_written,
            cache_creation_input_tokens=num_written,
            cache_read_input_tokens=num_read,
            output_tokens=usage.completion_tokens,
            output_tokens_details=details if usage.reasoning else UNSET,
        )
