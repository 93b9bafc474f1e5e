# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from fastdeploy.entrypoints.openai.chat_turn import ChatTurn
from fastdeploy.entrypoints.openai.choice_serving import ChoiceServing
from fastdeploy.entrypoints.openai.custom_tools import without_custom_tools
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from fastdeploy.entrypoints.openai.parsers.message import Message
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningCounter
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.responses import (
    ChatCompletionChoice,
    ChatCompletionResponse,
    ChatCompletionStreamChoice,
    ChatMessage,
    ChoiceFields,
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import make_request_id


class ServingChat(ChoiceServing):
    """A request for the next message of a conversation."""

    body: ChatCompletionRequest
    response_type = ChatCompletionResponse
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, server: ApiServer, body: ChatCompletionRequest) -> None:
        """Check the request and render the conversation.

        Raises:
            InvalidRequestError: naming the field and its range.
        """
        request_id = make_request_id(body.request_id)
        super().__init__(server, body, f"chatcmpl-{request_id}")
        chat, rename = without_custom_tools(body)
        with renamed_errors(rename):
            self._turn = ChatTurn(server, chat, self.response_id)
        self.requests = [self._turn.request]

    def group(self) -> GenerationGroup:
        """Return the generation of the message, whose reasoning is counted."""
        group = super().group()
        group.usage.reasoning = self.reasoning_counters()
        return group

    def reasoning_counters(self) -> Sequence[ReasoningCounter]:
        """Return a counter of reasoning tokens per choice."""
        return self._turn.reasoning_counters()

    def choice(self, update: ChoiceUpdate) -> ChatCompletionChoice:
        """Return the choice with its message."""
        message = self._message(self._turn.message(update))
        choice = ChatCompletionChoice(index=update.index, message=message, **self._common_fields(update))
        self._add_optional_fields(choice, update)
        return choice

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[ChatCompletionStreamChoice]:
        """Yield the choice that opens the message, then one choice for each new part of the message."""
        if update.is_first:
            yield _plain_choice(update, DeltaMessage(role="assistant", content=""))
        parts = self._turn.parts(update)
        deltas = [_delta(part) for part in parts if part.kind != "reasoning" or self.body.include_reasoning]
        for delta in deltas[:-1]:
            yield _plain_choice(update, delta)
        common = self._common_fields(update)
        is_new = deltas or common["finish_reason"] or common["logprobs"] or self.body.return_token_ids
        if is_new or update.prompt_logprobs is not None:
            last = deltas[-1] if deltas else DeltaMessage()
            choice = ChatCompletionStreamChoice(index=update.index, delta=last, **common)
            self._add_optional_fields(choice, update)
            yield choice

    def prompt_fields(self, choices: Sequence[ChatCompletionChoice]) -> dict[str, Any]:
        """Return the ids and log-probabilities of the prompt."""
        first = choices[0]
        return {
            "prompt_token_ids": first.prompt_token_ids or None,
            "prompt_logprobs": None if first.prompt_logprobs is UNSET else first.prompt_logprobs,
        }

    def first_chunk_fields(self) -> bytes:
        """Return the ids of the prompt, if the request asks for them."""
        if not self.body.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + msgspec.json.encode(self.requests[0].prompt_token_ids)

    def is_opening(self, choice: ChatCompletionStreamChoice) -> bool:
        """Return whether a chunk opens the message."""
        return choice.delta.role is not UNSET

    def _message(self, parsed: Message) -> ChatMessage:
        """Return the message of the response; beside calls, empty content is null."""
        message = ChatMessage(content=parsed.content)
        if self._turn.has_reasoning and self.body.include_reasoning:
            message.reasoning = message.reasoning_content = parsed.reasoning or None
        if parsed.calls:
            message.content = parsed.content or None
            message.tool_calls = [
                ToolCall(id=_call_id(), function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in parsed.calls
            ]
        return message

    def _common_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Return `finish_reason` and `logprobs` of a choice."""
        delta = update.delta
        finish_reason, logprobs = delta.finish_reason, None
        if finish_reason == "stop" and self._turn.num_calls(update.index):
            finish_reason = "tool_calls"
        if self.body.logprobs:
            logprobs = chat_logprobs(
                self.server.tokenizer, delta.logprobs or [], self.body.top_logprobs or 0, self.names_token_ids
            )
        return {"finish_reason": finish_reason, "logprobs": logprobs}

    def _add_optional_fields(self, choice: ChoiceFields, update: ChoiceUpdate) -> None:
        self.add_optional_fields(choice, update)
        if update.prompt_logprobs is not None and update.delta.index == 0:
            has_texts = self.body.include_logprobs_decode_token
            choice.prompt_logprobs = prompt_logprobs(self.server.tokenizer, update.prompt_logprobs, has_texts)


def _plain_choice(update: ChoiceUpdate, delta: DeltaMessage) -> ChatCompletionStreamChoice:
    return ChatCompletionStreamChoice(index=update.index, delta=delta, logprobs=None, finish_reason=None)


def _delta(part: Part) -> DeltaMessage:
    """Return a part as the delta of a chunk; a call's id, type and name come once, its arguments in pieces."""
    match part.kind:
        case "reasoning":
            return DeltaMessage(reasoning=part.text, reasoning_content=part.text)
        case "content":
            return DeltaMessage(content=part.text)
        case "call":
            function = DeltaFunctionCall(name=part.text, arguments="")
            call = DeltaToolCall(index=part.index, id=_call_id(), type="function", function=function)
        case _:
            call = DeltaToolCall(index=part.index, function=DeltaFunctionCall(arguments=part.text))
    return DeltaMessage(tool_calls=[call])


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
