# SPDX-License-Identifier: Apache-2.0
"""Parses the text of one choice into a message, complete or in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningParser
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser


@dataclass
class ToolCall:
    """A function call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass
class Message:
    """The sum of the parts of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts."""
        for part in parts:
            match part.kind:
                case "reasoning":
                    self.reasoning += part.text
                case "content":
                    self.content += part.text
                case "call":
                    self.calls.append(ToolCall(part.text))
                case _:
                    self.calls[part.index].arguments += part.text


class MessageParser:
    """Separates the reasoning from the answer, and the answer into content and calls.

    Attributes:
        num_calls: calls of the message so far.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None = None
    ) -> None:
        """Create a parser of one choice, which drops calls beyond `max_calls`."""
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self.num_calls = 0

    def push(self, text: str, is_last: bool) -> list[Part]:
        """Append `text`; return the parts that no later text can change."""
        parts = [Part("content", text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text) + (self._reasoning.finish() if is_last else [])
        if self._tools is not None:
            parts = self._parse_answer(parts, self._tools, is_last)
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts

    def _parse_answer(self, parts: list[Part], tools: ToolParser, is_last: bool) -> list[Part]:
        parsed: list[Part] = []
        for part in parts:
            parsed += tools.push(part.text) if part.kind == "content" else [part]
        parsed += tools.finish() if is_last else []
        if self._max_calls is None:
            return parsed
        return [part for part in parsed if part.kind not in ("call", "arguments") or part.index < self._max_calls]
