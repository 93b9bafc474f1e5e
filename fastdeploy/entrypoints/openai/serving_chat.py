# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastdeploy.core.reasoning import ReasoningState
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import build_request, max_text_length
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import chat_logprobs, check_num_prompt_logprobs, prompt_logprobs
from fastdeploy.entrypoints.openai.params import chat_params
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningCounter, ReasoningParser
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.prompt import reasoning_format, reasoning_state, render_prompt
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
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
from fastdeploy.entrypoints.openai.serving_base import ServingBase, make_request_id
from fastdeploy.entrypoints.openai.tool_choice import tool_use


class ServingChat(ServingBase):
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
        self._reasoning = reasoning_format(server)
        self._tools = tool_use(body, server.config.tool_call_parser)
        params = chat_params(body, server.defaults, server.param_limits)
        is_truncated = body.truncate_prompt_tokens is not None
        max_length = max_text_length(server.tokenizer, server.limits.max_model_len, is_truncated)
        prompt = render_prompt(server, body, max_length)
        state = reasoning_state(server, body, prompt)
        self._add_constraint(params)
        add_special = body.add_special_tokens is True or (  # templates write the special tokens themselves
            body.disable_chat_template and body.add_special_tokens is None
        )
        field = "messages" if body.prompt_token_ids is None else "prompt_token_ids"
        request = build_request(server.tokenizer, server.limits, self.response_id, prompt, params, add_special, field)
        request.cache_salt = body.cache_salt or ""
        request.reasoning = state
        self.requests = [request]
        check_num_prompt_logprobs("prompt_logprobs", self.requests, 1)
        is_plain = self._reasoning is None and self._tools is None
        self._parsers = None if is_plain else [self._make_parser(state) for _ in range(params.n)]

    def choice(self, update: ChoiceUpdate) -> ChatCompletionChoice:
        """Return the choice with its message."""
        message = ChatMessage(content=update.text)
        if self._parsers is not None:
            parsed = Message()
            parsed.add(self._parsers[update.index].push(update.text, True))
            message = self._message(parsed)
        choice = ChatCompletionChoice(index=update.index, message=message, **self._common_fields(update))
        self._add_optional_fields(choice, update)
        return choice

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[ChatCompletionStreamChoice]:
        """Yield the choice that opens the message, then one choice for each new part of the message."""
        if update.is_first:
            yield _plain_choice(update, DeltaMessage(role="assistant", content=""))
        deltas = self._deltas(update)
        for delta in deltas[:-1]:
            yield _plain_choice(update, delta)
        common = self._common_fields(update)
        is_new = deltas or common["finish_reason"] or common["logprobs"] or self.body.return_token_ids
        if is_new or update.prompt_logprobs is not None:
            last = deltas[-1] if deltas else DeltaMessage()
            choice = ChatCompletionStreamChoice(index=update.index, delta=last, **common)
            self._add_optional_fields(choice, update)
            yield choice

    def _add_constraint(self, params: SamplingParams) -> None:
        """Constrain the output to what the tools require, and keep the markers of the parsers in its text."""
        markers = self._reasoning.markers if self._reasoning is not None else ()
        if self._tools is not None:
            params.guided_decoding = self._tools.constraint(self.server.tokenizer, params.guided_decoding)
            markers += self._tools.markers
        params.visible_token_ids = list(self.server.tokenizer.find_special_ids(markers).values())

    def _make_parser(self, state: ReasoningState) -> MessageParser:
        reasoning = ReasoningParser(self._reasoning, state) if self._reasoning is not None else None
        if self._tools is None:
            return MessageParser(reasoning, None)
        return MessageParser(reasoning, self._tools.make_parser(), self._tools.max_calls)

    def _group(self) -> GenerationGroup:
        group = super()._group()
        if self._reasoning is not None:
            request = self.requests[0]
            group.usage.reasoning = [
                ReasoningCounter(self.server.tokenizer, self._reasoning, request.reasoning)
                for _ in range(request.params.n)
            ]
        return group

    def _message(self, parsed: Message) -> ChatMessage:
        """Return the message of the response; beside calls, empty content is null."""
        message = ChatMessage(content=parsed.content)
        if self._reasoning is not None:
            message.reasoning_content = parsed.reasoning or None
        if parsed.calls:
            message.content = parsed.content or None
            message.tool_calls = [
                ToolCall(id=_call_id(), function=FunctionCall(name=call.name, arguments=call.arguments))
                for call in parsed.calls
            ]
        return message

    def _deltas(self, update: ChoiceUpdate) -> list[DeltaMessage]:
        if self._parsers is None:
            return [DeltaMessage(content=update.text)] if update.text else []
        parts = self._parsers[update.index].push(update.text, update.delta.finish_reason is not None)
        return [_delta(part) for part in parts]

    def _common_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Return `finish_reason` and `logprobs` of a choice."""
        delta = update.delta
        finish_reason, logprobs = delta.finish_reason, None
        if self._parsers is not None and finish_reason == "stop" and self._parsers[update.index].num_calls:
            finish_reason = "tool_calls"
        if self.body.logprobs:
            logprobs = chat_logprobs(self.server.tokenizer, delta.logprobs or [], self.body.top_logprobs or 0)
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
            return DeltaMessage(reasoning_content=part.text)
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
