# SPDX-License-Identifier: Apache-2.0
"""Reasoning formats: the markers that models write around the reasoning before their answer.

Where a reasoning ends is defined by `ReasoningFormat.ends` alone: for the parser, for the constraint of the output, and
for the counter of reasoning tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

MAX_HEAD_LENGTH = 1000  # characters from which a prompt's marker is taken for the beginning of a call or not


class ReasoningState(StrEnum):
    """Whether an output is in its reasoning.

    CLOSED: in the answer. OPEN: in the reasoning, until its end marker. UNDECIDED: nothing is emitted yet; the start
    marker opens the reasoning, anything else begins the answer.
    """

    CLOSED = "closed"
    OPEN = "open"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of one family of models.

    Attributes:
        start, end: markers around the reasoning.
        is_implied: an output without a start marker begins in the reasoning, too.
        answer_start, answer_end: markers around the answer; empty if the models write none.
        tool_call_start: marker with which a tool call begins, if models call tools without ending their reasoning; ""
            otherwise.
    """

    start: str
    end: str
    is_implied: bool = False
    answer_start: str = ""
    answer_end: str = ""
    tool_call_start: str = ""

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the markers of which the first one ends the reasoning.

        `tool_call_start` does so only where it begins a call, of which it is a part.
        """
        return tuple(filter(None, (self.tool_call_start, self.end)))

    @property
    def markers(self) -> tuple[str, ...]:
        """Return all markers; they are not part of the message."""
        return tuple(filter(None, (self.start, self.end, self.answer_start, self.answer_end)))

    def for_tools(self, markers: Collection[str]) -> ReasoningFormat:
        """Return the format of an output that may contain tool calls with these markers; none if it may not."""
        return self if self.tool_call_start in markers else replace(self, tool_call_start="")

    def state_after(
        self, prompt: str, is_continued: bool = False, may_begin_call: Callable[[str], bool] = lambda text: True
    ) -> ReasoningState:
        """Return the state in which an output begins after this prompt.

        Args:
            is_continued: the prompt ends within the message that the output continues; its last marker decides.
            may_begin_call: whether a text that begins with `tool_call_start` begins a call, or may be continued to one.
        """
        if is_continued:
            return ReasoningState.OPEN if self._is_open(prompt, may_begin_call) else ReasoningState.CLOSED
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return ReasoningState.OPEN
        if tail.endswith(self.end):
            return ReasoningState.CLOSED
        return ReasoningState.OPEN if self.is_implied else ReasoningState.UNDECIDED

    def state_in(self, text: str) -> ReasoningState:
        """Return the state in which an output without calls continues a text that no template has rendered."""
        begin = text.rfind(self.start)
        if begin >= 0 and text.find(self.end, begin) < 0:
            return ReasoningState.OPEN
        return ReasoningState.CLOSED if text.rstrip().endswith(self.end) else ReasoningState.UNDECIDED

    def _is_open(self, prompt: str, may_begin_call: Callable[[str], bool]) -> bool:
        """Return whether the last marker of a prompt is the start of a reasoning."""
        begin = prompt.rfind(self.start)
        if begin < 0 or prompt.find(self.end, begin) >= 0:
            return False
        end = len(prompt)
        while self.tool_call_start and (end := prompt.rfind(self.tool_call_start, begin, end)) >= 0:
            if may_begin_call(prompt[end : end + MAX_HEAD_LENGTH]):
                return False
        return True


_EXPLICIT = ReasoningFormat("<think>", "</think>")
_QWEN3 = ReasoningFormat("<think>", "</think>", tool_call_start="<tool_call>")
_IMPLIED = ReasoningFormat("<think>", "</think>", is_implied=True)
_ERNIE_X1 = ReasoningFormat("<think>", "</think>", is_implied=True, answer_start="<response>", answer_end="</response>")

REASONING_FORMATS = {
    "qwen3": _QWEN3,
    "deepseek_r1": _IMPLIED,
    "deepseek-r1": _IMPLIED,
    "deepseek": _EXPLICIT,
    "deepseek_v3": _EXPLICIT,
    "ernie-x1": _ERNIE_X1,
    "ernie_x1": _ERNIE_X1,
    "ernie45": _ERNIE_X1,
    "ernie-45-vl": _EXPLICIT,
    "ernie-45-vl-thinking": _IMPLIED,
    "glm45": _EXPLICIT,
}
"""Name of `--reasoning-parser` -> format; includes the spellings of FastDeploy and vLLM."""
