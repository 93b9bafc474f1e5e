# SPDX-License-Identifier: Apache-2.0
"""Reads one choice's text as a message, whole or as it comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fastdeploy.entrypoints.openai.parsers.machine import Part
from fastdeploy.entrypoints.openai.parsers.reasoning import ReasoningSplitter
from fastdeploy.entrypoints.openai.parsers.tool_calls import ToolCallParser


@dataclass
class Call:
    """A call of a function; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass
class Message:
    """What the parts of a message add up to."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts."""
        for part in parts:
            match part.kind:
                case "reasoning":
                    self.reasoning += part.text
                case "content":
                    self.content += part.text
                case "call":
                    self.calls.append(Call(part.text))
                case _:
                    self.calls[part.index].arguments += part.text


class MessageParser:
    """First the reasoning is split off, then calls are looked for in the answer.

    Attributes:
        num_calls: calls of the message so far.
    """

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolCallParser | None, max_calls: int | None = None
    ) -> None:
        """Calls beyond `max_calls` are left out of the message."""
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self.num_calls = 0

    def push(self, text: str, is_last: bool) -> list[Part]:
        """Append `text`; return the parts that are certain now: all of them when it is the last one."""
        parts = [Part("content", text)] if text else []
        if self._reasoning is not None:
            parts = self._reasoning.push(text) + (self._reasoning.finish() if is_last else [])
        if self._tools is not None:
            parts = self._read_answer(parts, self._tools, is_last)
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts

    def _read_answer(self, parts: list[Part], tools: ToolCallParser, is_last: bool) -> list[Part]:
        made: list[Part] = []
        for part in parts:
            made += tools.push(part.text) if part.kind == "content" else [part]
        made += tools.finish() if is_last else []
        is_call = ("call", "arguments")
        return [
            part for part in made if part.kind not in is_call or self._max_calls is None or part.index < self._max_calls
        ]
