# SPDX-License-Identifier: Apache-2.0
"""Answers as OpenAI's lists of choices, as one response or as chunks."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, ChunkAggregator, Usage
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

    def prompt_fields(self, choices: Sequence[Any]) -> dict[str, Any]:
        """Return the fields of the prompt beside the choices of a whole response."""
        return {}

    def first_chunk_fields(self) -> bytes:
        """Return what the first chunk of a stream has beside its choices, encoded with a comma before it."""
        return b""

    def is_opening(self, choice: Any) -> bool:
        """Return whether the choice of a chunk comes before the tokens of the update that it was made of."""
        return False

    async def run_to_completion(self) -> bytes:
        """Run until all choices have ended; return the response with them."""
        group = self.group()
        updates = await group.run_to_completion()

        def encode(updates: Sequence[ChoiceUpdate]) -> bytes:
            choices = [self.choice(update) for update in updates]
            response = self.response_type(
                **self._head(self.object_name),
                **self.prompt_fields(choices),
                choices=choices,
                usage=group.usage.report(),
                metrics=self.metrics(updates[0].delta),
            )
            return msgspec.json.encode(response)

        return await encode_updates(encode, updates)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield chunks."""
        group = self.group()
        aggregator = ChunkAggregator(self.body.max_streaming_response_tokens or 1)
        encoder = _ChunkEncoder(self, group.usage)
        async with contextlib.aclosing(group.updates()) as stream:
            try:
                async for updates in stream:
                    if chunks := await encode_updates(encoder.encode, aggregator.push(updates)):
                        yield chunks
            except Exception:
                if chunks := encoder.encode(aggregator.flush()):
                    yield chunks
                raise
        if encoder.has_usage:
            yield encoder.last()

    @property
    def names_token_ids(self) -> bool:
        """Whether log-probabilities name tokens by their ids."""
        given = self.body.return_tokens_as_token_ids
        return self.server.config.return_tokens_as_token_ids if given is None else given

    def add_optional_fields(self, choice: ChoiceFields, update: ChoiceUpdate) -> None:
        """Set the fields of a choice that both endpoints have and only some requests ask for."""
        delta, body = update.delta, self.body
        choice.seed = delta.seed
        if body.return_token_ids:
            decode = partial(self.server.tokenizer.decode, skip_special_tokens=False)
            if update.is_first:
                choice.prompt_token_ids = self.requests[update.prompt_index].prompt_token_ids
                choice.prompt_tokens = decode(choice.prompt_token_ids)
            choice.token_ids = choice.completion_token_ids = delta.token_ids
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
            "model": self.server.response_model(self.body.model),
            "system_fingerprint": self.server.system_fingerprint,
            "speculation": UNSET if note is None else note,
        }

    def chunk_prefix(self) -> bytes:
        """Return the beginning of all chunks, up to their choices: it is encoded once, not per token."""
        head = msgspec.json.encode(ResponseHead(**self._head(self.chunk_object_name)))
        return b"data: " + head.removesuffix(b"}") + b',"choices":['


class _ChunkEncoder:
    """Encodes the chunks of one stream.

    Attributes:
        has_usage: the stream ends with a chunk that carries the usage.
    """

    def __init__(self, serving: ChoiceServing, usage: Usage) -> None:
        options = serving.body.stream_options or StreamOptions()
        self.has_usage = options.include_usage or serving.server.config.enable_force_include_usage
        self._is_continuous = self.has_usage and options.continuous_usage_stats
        self._serving = serving
        self._usage = usage
        self._prefix = serving.chunk_prefix()
        self._first = serving.first_chunk_fields()
        self._sent_usage = self._encoded_usage() if self._is_continuous else b""
        self._last: TokenDelta | None = None

    def encode(self, updates: Sequence[ChoiceUpdate]) -> bytes:
        """Return the chunks of some updates."""
        chunks: list[bytes] = []
        usage = self._encoded_usage() if self._is_continuous and updates else self._sent_usage
        for update in updates:
            self._last = update.delta
            for choice in self._serving.chunk_choices(update):
                counted = self._sent_usage if self._is_continuous and self._serving.is_opening(choice) else usage
                chunks += (self._prefix, msgspec.json.encode(choice), b"]", self._first, counted, b"}\n\n")
                self._first = b""
        self._sent_usage = usage
        return b"".join(chunks)

    def last(self) -> bytes:
        """Return the chunk without choices that carries the usage, and the metrics of the request."""
        metrics = self._serving.metrics(self._last) if self._last is not None else None
        extra = b"" if metrics is None else b',"metrics":' + msgspec.json.encode(metrics)
        return b"".join([self._prefix, b"]", self._encoded_usage(), extra, b"}\n\n"])

    def _encoded_usage(self) -> bytes:
        return b',"usage":' + msgspec.json.encode(self._usage.report())
