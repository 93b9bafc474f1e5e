# SPDX-License-Identifier: Apache-2.0
"""Content blocks of an answer, complete or as events, from the parts of a message."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from fastdeploy.entrypoints.openai.messages_api.responses import (
    BlockDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part

SIGNATURE = "unsigned"  # not empty, because clients leave out blocks without a signature
INVALID_INPUT = "INVALID_JSON"  # key of an input that is no JSON object, as Anthropic's documentation names it
BlockEvent = ContentBlockStart | ContentBlockDelta | ContentBlockStop


def content_blocks(parts: Iterable[Part], hides_thinking: bool) -> list[ContentBlock]:
    """Return the blocks of a whole message."""
    blocks: list[ContentBlock] = []
    kind, texts = "", list[str]()

    def end_block() -> None:
        if kind in ("call", "arguments"):
            blocks[-1].input = _input("".join(texts))  # type: ignore[union-attr]
        elif kind:
            blocks.append(_block(kind, "".join(texts), hides_thinking))

    for part in parts:
        if _begins_block(kind, part):
            end_block()
            texts = []
            if part.kind == "call":
                blocks.append(_block("call", part.text, hides_thinking))
        if part.kind != "call":
            texts.append(part.text)
        kind = part.kind
    end_block()
    return blocks


class BlockWriter:
    """Turns the parts of a streamed message into the events of its blocks."""

    def __init__(self, hides_thinking: bool) -> None:
        """Start before the first block."""
        self._hides_thinking = hides_thinking
        self._index = -1
        self._kind = ""

    def push(self, part: Part) -> Iterator[BlockEvent]:
        """Yield the events of a part."""
        if _begins_block(self._kind, part):
            yield from self.finish()
            self._index += 1
            text = part.text if part.kind == "call" else ""
            yield ContentBlockStart(index=self._index, content_block=_block(part.kind, text, False, signature=""))
        self._kind = part.kind
        if part.kind != "call" and not (part.kind == "reasoning" and self._hides_thinking):
            yield ContentBlockDelta(index=self._index, delta=_delta(part))

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the events that end the last block."""
        if self._kind == "reasoning":
            yield ContentBlockDelta(index=self._index, delta=SignatureDelta(signature=SIGNATURE))
        if self._kind:
            yield ContentBlockStop(index=self._index)
        self._kind = ""


def _begins_block(kind: str, part: Part) -> bool:
    """Return whether a part begins a block behind one of `kind`; the arguments of a call belong to its block."""
    if part.kind == "arguments":
        return kind not in ("call", "arguments")
    return part.kind == "call" or part.kind != kind


def _block(kind: str, text: str, hides_thinking: bool, signature: str = SIGNATURE) -> ContentBlock:
    if kind == "reasoning":
        return ThinkingBlock(thinking="" if hides_thinking else text, signature=signature)
    if kind == "call":
        return ToolUseBlock(id=f"toolu_{uuid.uuid4().hex[:24]}", name=text, input={})
    return TextBlock(text=text)


def _delta(part: Part) -> BlockDelta:
    if part.kind == "reasoning":
        return ThinkingDelta(thinking=part.text)
    return InputJsonDelta(partial_json=part.text) if part.kind == "arguments" else TextDelta(text=part.text)


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_INPUT: text}
