# SPDX-License-Identifier: Apache-2.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from fastdeploy.core.reasoning import ReasoningState
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import build_request
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from fastdeploy.entrypoints.openai.params import chat_params
from fastdeploy.entrypoints.openai.parsers.message import Message, MessageParser, ToolCall
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningCounter, ReasoningParser
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.prompt import reasoning_format, reasoning_state, render_prompt
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import ServingBase, make_request_id
from fastdeploy.entrypoints.openai.tool_choice import tool_use


class ServingChat(ServingBase):
    """A request for the next message of a conversation."""

    body: ChatCompletionRequest
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
        params = chat_params(body, server.defaults, server.config.max_logprobs)
        prompt = render_prompt(server, body)
        state = reasoning_state(server, body, prompt)
        self._add_form(params)
        add_special = body.add_special_tokens is True or (  # a template writes its own
            body.disable_chat_template and body.add_special_tokens is None
        )
        field = "messages" if body.prompt_token_ids is None else "prompt_token_ids"
        request = build_request(server.tokenizer, server.limits, self.answer_id, prompt, params, add_special, field)
        request.cache_salt = body.cache_salt or ""
        request.reasoning = state
        self.requests = [request]
        is_plain = self._reasoning is None and self._tools is None
        self._parsers = None if is_plain else [self._make_parser(state) for _ in range(params.n)]

    def choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        """Return the choice with its message."""
        message: dict[str, Any] = {"role": "assistant", "content": update.text, "refusal": None}
        if self._parsers is not None:
            read = Message()
            read.add(self._parsers[update.index].push(update.text, True))
            message.update(self._read_fields(read))
        return {"index": update.index, "message": message, **self._rest(update)}

    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[dict[str, Any]]:
        """Yield a choice that opens the message, then what is new: one choice, or one per part of the message."""
        if update.is_first:
            delta = {"role": "assistant", "content": ""}
            yield {"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None}
        *before, last = self._deltas(update) or [{}]
        for delta in before:
            yield {"index": update.index, "delta": delta, "logprobs": None, "finish_reason": None}
        rest = self._rest(update)
        if last or rest["finish_reason"] or rest["logprobs"] or self.body.return_token_ids:
            yield {"index": update.index, "delta": last, **rest}

    def _add_form(self, params: SamplingParams) -> None:
        """Let the output have the form that the tools ask for, and keep the markers in its text."""
        markers = self._reasoning.markers if self._reasoning is not None else ()
        if self._tools is not None:
            params.guided_decoding = self._tools.constraint(self.server.tokenizer, params.guided_decoding)
            markers += self._tools.markers
        params.visible_token_ids = list(self.server.tokenizer.special_ids_of(markers).values())

    def _make_parser(self, state: ReasoningState) -> MessageParser:
        splitter = ReasoningParser(self._reasoning, state) if self._reasoning is not None else None
        if self._tools is None:
            return MessageParser(splitter, None)
        return MessageParser(splitter, self._tools.make_parser(), self._tools.max_calls)

    def _group(self) -> GenerationGroup:
        group = super()._group()
        if self._reasoning is not None:
            request = self.requests[0]
            group.usage.reasoning = [
                ReasoningCounter(self.server.tokenizer, self._reasoning, request.reasoning)
                for _ in range(request.params.n)
            ]
        return group

    def _read_fields(self, read: Message) -> dict[str, Any]:
        """Return the message's fields after reading it: no content is null beside calls."""
        fields: dict[str, Any] = {"content": read.content}
        if self._reasoning is not None:
            fields["reasoning_content"] = read.reasoning or None
        if read.calls:
            fields["content"] = read.content or None
            fields["tool_calls"] = [_tool_call(call) for call in read.calls]
        return fields

    def _deltas(self, update: ChoiceUpdate) -> list[dict[str, Any]]:
        if self._parsers is None:
            return [{"content": update.text}] if update.text else []
        parts = self._parsers[update.index].push(update.text, update.delta.finish_reason is not None)
        return [_delta(part) for part in parts]

    def _rest(self, update: ChoiceUpdate) -> dict[str, Any]:
        delta, tokenizer = update.delta, self.server.tokenizer
        made: dict[str, Any] = {"logprobs": None, "finish_reason": delta.finish_reason}
        if self._parsers is not None and delta.finish_reason == "stop" and self._parsers[update.index].num_calls:
            made["finish_reason"] = "tool_calls"
        if self.body.logprobs:
            made["logprobs"] = chat_logprobs(tokenizer, delta.logprobs or [], self.body.top_logprobs or 0)
        made.update(self.extensions(update, ("prompt_token_ids", "completion_token_ids")))
        if delta.prompt_logprobs is not None:
            has_texts = self.body.include_logprobs_decode_token
            made["prompt_logprobs"] = prompt_logprobs(tokenizer, delta.prompt_logprobs, has_texts)
        return made


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": _call_id(), "type": "function", "function": function}


def _delta(part: Part) -> dict[str, Any]:
    """Return a part as the delta of a chunk: a call's id, type and name come once, its arguments in pieces."""
    match part.kind:
        case "reasoning":
            return {"reasoning_content": part.text}
        case "content":
            return {"content": part.text}
        case "call":
            function = {"name": part.text, "arguments": ""}
            return {"tool_calls": [{"index": part.index, "id": _call_id(), "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
