# SPDX-License-Identifier: Apache-2.0
"""Builds the output items of a response from the parts of a message, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastdeploy.entrypoints.openai.parsers.stream_parser import Part
from fastdeploy.entrypoints.openai.responses_api.output import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    OutputTokenLogprob,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
    ResponseEvent,
    encode_event,
)

SplitName = Callable[[str], tuple[str | None, str]]
_KINDS = {"reasoning": ReasoningItem, "content": OutputMessage}  # of parts -> their items; calls are items of their own


class OutputBuilder:
    """The items so far, and the events that have not been taken yet.

    An item is open until a part of another one follows. An event's snapshot of an item is encoded at once, because the
    item grows.
    """

    def __init__(self, has_events: bool, split_name: SplitName) -> None:
        """Build items, and with `has_events` their events.

        Args:
            split_name: returns namespace and name of the function that the model calls by a name.
        """
        self._has_events = has_events
        self._split_name = split_name
        self.items: list[OutputItem] = []
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[OutputTokenLogprob] = []
        self._is_open = False
        self._events: list[bytes] = []
        self._num_events = 0

    @property
    def has_begun(self) -> bool:
        """Return whether any event has been added."""
        return self._num_events > 0

    def add_event(self, event: ResponseEvent) -> None:
        """Add an event, which gets the next number."""
        if not self._has_events:
            return
        event.sequence_number = self._num_events
        self._num_events += 1
        self._events.append(encode_event(event))

    def take_events(self) -> bytes:
        """Return the events since the last call."""
        events, self._events = b"".join(self._events), []
        return events

    def add(self, parts: Iterable[Part], logprobs: Sequence[OutputTokenLogprob] = ()) -> None:
        """Add the next parts of the message; the log-probabilities belong to the first one of its text."""
        rest = list(logprobs)
        for part in parts:
            match part.kind:
                case "call":
                    self._open(_new_call(*self._split_name(part.text)))
                case "arguments":
                    self._add_arguments(part.text)
                case kind:
                    self._open_if_other(kind)
                    self._add_text(part.text, rest if kind == "content" else [])
                    rest = [] if kind == "content" else rest

    def finish(self, status: ItemStatus, logprobs: Sequence[OutputTokenLogprob] = ()) -> None:
        """End the open item; an output that ended by itself and has no call has at least an empty message.

        Args:
            status: of the open item; completed if the output ended by itself.
            logprobs: those that no part of the text has had, of tokens without a text.
        """
        if status == "completed" and not any(
            isinstance(item, (OutputMessage, FunctionCallItem)) for item in self.items
        ):
            self._open_if_other("content")
        if logprobs and self._is_open and isinstance(self.items[-1], OutputMessage):
            self._add_text("", list(logprobs))
        self._close(status)

    def snapshot(self) -> list[OutputItem]:
        """Return the items, of which an open one is incomplete."""
        if self._is_open:
            self._fill(self.items[-1], "incomplete")
        return self.items

    def _open_if_other(self, kind: str) -> None:
        if self._is_open and isinstance(self.items[-1], _KINDS[kind]):
            return
        item: OutputItem
        if kind == "reasoning":
            item = ReasoningItem(id=_new_id("rs"), status="in_progress", content=[])
        else:
            item = OutputMessage(id=_new_id("msg"), status="in_progress", content=[])
        self._open(item)
        item.content.append(ReasoningText() if isinstance(item, ReasoningItem) else OutputText())  # type: ignore[arg-type]
        self.add_event(ContentPartAdded(**self._place(), part=item.content[0]))

    def _open(self, item: OutputItem) -> None:
        self._close("completed")
        self.items.append(item)
        self._texts, self._logprobs, self._is_open = [], [], True
        self.add_event(OutputItemAdded(output_index=len(self.items) - 1, item=item))

    def _add_text(self, text: str, logprobs: list[OutputTokenLogprob]) -> None:
        self._texts.append(text)
        if isinstance(self.items[-1], ReasoningItem):
            self.add_event(ReasoningTextDelta(**self._place(), delta=text))
            return
        self._logprobs += logprobs
        self.add_event(OutputTextDelta(**self._place(), delta=text, logprobs=logprobs))

    def _add_arguments(self, text: str) -> None:
        self._texts.append(text)
        self.add_event(ArgumentsDelta(**self._place(), delta=text))

    def _close(self, status: ItemStatus) -> None:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        item = self.items[-1]
        self._fill(item, status)
        self._is_open = False
        place = self._place()
        match item:
            case FunctionCallItem():
                self.add_event(ArgumentsDone(**place, arguments=item.arguments))
            case ReasoningItem():
                self.add_event(ReasoningTextDone(**place, text=item.content[0].text))
                self.add_event(ContentPartDone(**place, part=item.content[0]))
            case OutputMessage():
                part = item.content[0]
                self.add_event(OutputTextDone(**place, text=part.text, logprobs=part.logprobs))
                self.add_event(ContentPartDone(**place, part=part))
        self.add_event(OutputItemDone(output_index=len(self.items) - 1, item=item))

    def _fill(self, item: OutputItem, status: ItemStatus) -> None:
        """Put the text so far into the item."""
        item.status = status
        text = "".join(self._texts)
        match item:
            case FunctionCallItem():
                item.arguments = text
            case ReasoningItem():
                item.content[0].text = text
            case OutputMessage():
                item.content[0].text, item.content[0].logprobs = text, self._logprobs

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _new_call(namespace: str | None, name: str) -> FunctionCallItem:
    item = FunctionCallItem(id=_new_id("fc"), status="in_progress", call_id=_new_id("call"), name=name)
    if namespace is not None:
        item.namespace = namespace
    return item


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"
