# SPDX-License-Identifier: Apache-2.0
"""Answers as OpenAI's lists of choices, as one response or as chunks."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, ChunkAggregator, GenerationGroup
from fastdeploy.entrypoints.openai.logprobs import output_tokens
from fastdeploy.entrypoints.openai.protocol import GenerationFields, StreamOptions
from fastdeploy.entrypoints.openai.responses import ChoiceFields, ResponseHead
from fastdeploy.entrypoints.openai.serving_base import Serving, encode_updates


class ChoiceServing(Serving):
    """A request whose response is a list of choices: OpenAI's two endpoints of that form.

    Attributes:
        response_type: struct of the whole response.
        object_name, chunk_object_name: `object` of the whole response and of the chunks of a stream.
    """

    body: GenerationFields
    response_type: type[Any]
    object_name: str
    chunk_object_name: str

    @abstractmethod
    def choice(self, update: ChoiceUpdate) -> ChoiceFields:
        """Return the choice of a whole response."""

    @abstractmethod
    def chunk_choices(self, update: ChoiceUpdate) -> Iterator[ChoiceFields]:
        """Yield what is new for the client, one choice per chunk."""

    async def run_to_completion(self) -> bytes:
        """Run until all choices have ended; return the response with them."""
        group = self.group()
        updates = await group.run_to_completion()

        def encode(updates: Iterable[ChoiceUpdate]) -> bytes:
            choices = [self.choice(update) for update in updates]
            head = self._head(self.object_name)
            return msgspec.json.encode(self.response_type(**head, choices=choices, usage=group.usage.report()))

        return await encode_updates(encode, updates)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield chunks."""
        group = self.group()
        options = self.body.stream_options or StreamOptions()
        aggregator = ChunkAggregator(self.body.max_streaming_response_tokens or 1)
        prefix = self._chunk_prefix()

        def encode(updates: Iterable[ChoiceUpdate]) -> bytes:
            events = []
            for update in updates:
                usage = _usage_suffix(group) if options.continuous_usage_stats else b""
                for choice in self.chunk_choices(update):
                    events.append(prefix + msgspec.json.encode(choice) + b"]" + usage + b"}\n\n")
            return b"".join(events)

        async with contextlib.aclosing(group.updates()) as stream:
            try:
                async for updates in stream:
                    if chunks := await encode_updates(encode, aggregator.push(updates)):
                        yield chunks
            except Exception:
                if chunks := encode(aggregator.flush()):
                    yield chunks
                raise
        if options.include_usage:
            yield prefix + b"]" + _usage_suffix(group) + b"}\n\n"

    def add_optional_fields(self, choice: ChoiceFields, update: ChoiceUpdate) -> None:
        """Set the fields of a choice that both endpoints have and only some requests ask for."""
        delta, body = update.delta, self.body
        choice.seed = delta.seed
        if body.return_token_ids:
            decode = partial(self.server.tokenizer.decode, skip_special_tokens=False)
            if update.is_first:
                choice.prompt_token_ids = self.requests[update.prompt_index].prompt_token_ids
                choice.prompt_tokens = decode(choice.prompt_token_ids)
            choice.completion_token_ids = delta.token_ids
            choice.completion_tokens = decode(delta.token_ids)
            if body.collect_metrics:
                choice.tokens = output_tokens(self.server.tokenizer, delta)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
            if body.collect_metrics:
                choice.speculate_metrics = delta.speculate_metrics
                choice.metrics = delta.metrics

    def _head(self, object_name: str) -> dict[str, Any]:
        """Return the fields of `ResponseHead`."""
        note = self.server.speculation_note()
        return {
            "id": self.response_id,
            "object": object_name,
            "created": self.created_s,
            "model": self.server.model_name,
            "system_fingerprint": self.server.system_fingerprint,
            "speculation": UNSET if note is None else note,
        }

    def _chunk_prefix(self) -> bytes:
        """Return the beginning of all chunks, up to their choices: it is encoded once, not per token."""
        head = msgspec.json.encode(ResponseHead(**self._head(self.chunk_object_name)))
        return b"data: " + head.removesuffix(b"}") + b',"choices":['


def _usage_suffix(group: GenerationGroup) -> bytes:
    return b',"usage":' + msgspec.json.encode(group.usage.report())
