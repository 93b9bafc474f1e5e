# SPDX-License-Identifier: Apache-2.0
"""How models mark the reasoning that precedes their answer, and where a prompt leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReasoningState(StrEnum):
    """Where an output stands.

    CLOSED: in the answer. OPEN: in the reasoning, until its end marker. UNDECIDED: nothing emitted yet; the start
    marker opens the reasoning, anything else is the answer.
    """

    CLOSED = "closed"
    OPEN = "open"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers of one family of models.

    Attributes:
        start, end: texts around the reasoning.
        is_implied: an output without start marker begins in the reasoning all the same.
        answer_start, answer_end: texts around the answer; empty if the models write none.
    """

    start: str
    end: str
    is_implied: bool = False
    answer_start: str = ""
    answer_end: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that mark something and are no part of the message."""
        return tuple(filter(None, (self.start, self.end, self.answer_start, self.answer_end)))

    def state_after(self, prompt: str, is_continued: bool = False) -> ReasoningState:
        """Return the state in which an output begins, from the end of the prompt's text.

        Args:
            is_continued: the prompt ends within the message that the output goes on with; its last marker decides.
        """
        if is_continued:
            is_open = prompt.rfind(self.start) > prompt.rfind(self.end)
            return ReasoningState.OPEN if is_open else ReasoningState.CLOSED
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return ReasoningState.OPEN
        if tail.endswith(self.end):
            return ReasoningState.CLOSED
        return ReasoningState.OPEN if self.is_implied else ReasoningState.UNDECIDED


_EXPLICIT = ReasoningFormat("<think>", "</think>")
_IMPLIED = ReasoningFormat("<think>", "</think>", is_implied=True)
_ERNIE_X1 = ReasoningFormat("<think>", "</think>", is_implied=True, answer_start="<response>", answer_end="</response>")

REASONING_FORMATS = {
    "qwen3": _EXPLICIT,
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
"""By the names of `--reasoning-parser`; the spellings that users of FastDeploy and vLLM know."""
