# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses, without storage: every request brings its whole conversation."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

import msgspec
from msgspec import UNSET

from fastdeploy.core.outputs import TokenLogprobs
from fastdeploy.entrypoints.openai.chat_turn import ChatTurn
from fastdeploy.entrypoints.openai.errors import ApiError
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import chat_logprobs
from fastdeploy.entrypoints.openai.renaming import renamed_errors
from fastdeploy.entrypoints.openai.responses_api.input import translate
from fastdeploy.entrypoints.openai.responses_api.output import (
    IncompleteDetails,
    OutputTokenLogprob,
    ReasoningSettings,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseInputTokens,
    ResponseObject,
    ResponseOutputTokens,
    ResponseUsage,
    Status,
    TextSettings,
    TopTokenLogprob,
)
from fastdeploy.entrypoints.openai.responses_api.protocol import ResponsesRequest
from fastdeploy.entrypoints.openai.responses_api.stream import OutputBuilder
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.entrypoints.openai.serving_base import Serving, make_request_id

STATUSES: dict[str, Status] = {"length": "incomplete", "abort": "cancelled"}
"""Reason of the end -> status; other reasons are a completion."""
ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Status of an error -> code in a failed response; other errors are the server's."""

logger = logging.getLogger("fastdeploy.server")


class ServingResponses(Serving):
    """A request for the next items of a conversation."""

    body: ResponsesRequest
    last_event = b""
    keep_alive_event = b": keep-alive\n\n"

    def __init__(self, server: ApiServer, body: ResponsesRequest) -> None:
        """Check the request and render the conversation.

        Raises:
            InvalidRequestError: naming the field and its range.
            ApiError: 400, a field is unknown, or refused by name.
        """
        super().__init__(server, body, f"resp_{make_request_id(body.request_id)}")
        self._translation = translate(body, server.config.ignore_unknown_fields)
        with renamed_errors(self._translation.rename):
            self._turn = ChatTurn(server, self._translation.chat, self.response_id)
        self.requests = [self._turn.request]
        self._builder = OutputBuilder(body.stream, self._translation.tools.split_name)
        self._pending: list[TokenLogprobs] = []  # of the tokens whose text no part has had yet
        self._num_tokens = 0
        self._seed: int | None = None
        if body.store is not False:
            _note_not_stored()

    def group(self) -> GenerationGroup:
        """Return the generation of the output, whose reasoning is counted."""
        group = super().group()
        group.usage.reasoning = self._turn.reasoning_counters()
        return group

    async def run_to_completion(self) -> bytes:
        """Run until the output has ended; return the response."""
        with renamed_errors(self._translation.rename):
            (update,) = await self.group().run_to_completion()
        return msgspec.json.encode(self._add(update))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response."""
        with renamed_errors(self._translation.rename):
            async with contextlib.aclosing(self.group().updates()) as stream:
                async for updates in stream:
                    self._begin()
                    for update in updates:
                        response = self._add(update)
                        if response is not None:
                            is_whole = response.status == "completed"
                            self._builder.add_event(
                                (ResponseCompleted if is_whole else ResponseIncomplete)(response=response)
                            )
                    if events := self._builder.take_events():
                        yield events

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of a failed response."""
        self._begin()
        code = ERROR_CODES.get(error.status, "server_error")
        details = ResponseError(code=code, message=error.message, type=error.type, param=error.param)  # type: ignore[arg-type]
        response = self._response("failed", output=self._builder.snapshot(), error=details)
        self._builder.add_event(ResponseFailed(response=response))
        return self._builder.take_events()

    def _begin(self) -> None:
        """Add the first events, once."""
        if not self._builder.has_begun:
            response = self._response("in_progress", output=[])
            self._builder.add_event(ResponseCreated(response=response))
            self._builder.add_event(ResponseInProgress(response=response))

    def _add(self, update: ChoiceUpdate) -> ResponseObject | None:
        """Add an update to the output; return the response if it has ended."""
        parts = self._turn.parts(update)
        self._num_tokens += len(update.delta.token_ids)
        if self._translation.has_logprobs:
            self._pending += update.delta.logprobs or []
        has_text = any(part.kind == "content" for part in parts)
        self._builder.add(parts, self._take_logprobs() if has_text else ())
        self._seed = update.delta.seed
        reason = update.delta.finish_reason
        if reason is None:
            return None
        status = STATUSES.get(reason, "completed")
        self._builder.finish("completed" if status == "completed" else "incomplete", self._take_logprobs())
        return self._response(
            status,
            output=self._builder.items,
            usage=self._usage(),
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if reason == "length" else None,
            metrics=self.metrics(update.delta) or UNSET,
        )

    def _take_logprobs(self) -> list[OutputTokenLogprob]:
        """Return the log-probabilities of the pending tokens that do not belong to the reasoning."""
        if not self._pending:
            return []
        counters = self.usage.reasoning
        num_reasoning = counters[0].num_tokens if counters else 0
        num_taken = self._num_tokens - len(self._pending)
        entries, self._pending = self._pending[max(0, num_reasoning - num_taken) :], []
        server, num_top = self.server, self.body.top_logprobs or 0
        as_ids = server.config.return_tokens_as_token_ids
        chosen = chat_logprobs(server.tokenizer, entries, num_top, as_ids).content
        return [
            OutputTokenLogprob(
                token=one.token,
                bytes=one.bytes,
                logprob=one.logprob,
                top_logprobs=[
                    TopTokenLogprob(token=top.token, bytes=top.bytes, logprob=top.logprob) for top in one.top_logprobs
                ],
            )
            for one in chosen
        ]

    def _usage(self) -> ResponseUsage:
        report = self.usage.report()
        cached, details = report.prompt_tokens_details.cached_tokens, report.completion_tokens_details
        return ResponseUsage(
            input_tokens=report.prompt_tokens,
            input_tokens_details=ResponseInputTokens(
                cached_tokens=cached, cache_write_tokens=self.server.num_cache_writes(report.prompt_tokens, cached)
            ),
            output_tokens=report.completion_tokens,
            output_tokens_details=ResponseOutputTokens(
                reasoning_tokens=0 if details is UNSET else details.reasoning_tokens
            ),
            total_tokens=report.total_tokens,
        )

    def _response(self, status: Status, **fields: Any) -> ResponseObject:
        """Return the response with what the request said."""
        body, params, translation = self.body, self.requests[0].params, self._translation
        note = self.server.speculation_note()
        return ResponseObject(
            id=self.response_id,
            created_at=self.created_s,
            status=status,
            model=self.server.response_model(self.body.model),
            instructions=body.instructions,
            max_output_tokens=body.max_tokens if body.max_output_tokens is None else body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=ReasoningSettings(effort=translation.effort),
            temperature=params.temperature,
            text=TextSettings(format=translation.text_format),
            tool_choice=translation.tool_choice,
            tools=translation.tools.repeated,
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            seed=UNSET if self._seed is None else self._seed,
            system_fingerprint=self.server.system_fingerprint,
            speculation=UNSET if note is None else note,
            **fields,
        )


@cache
def _note_not_stored() -> None:
    """Log once per process that responses are not stored, though storing them is the protocol's default."""
    logger.info("/v1/responses stores no response: answers say `store: false`; requests bring their whole input")
