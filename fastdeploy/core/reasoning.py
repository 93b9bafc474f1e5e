# SPDX-License-Identifier: Apache-2.0
"""How models mark the reasoning that precedes their answer, and where a prompt leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReasoningState(str, Enum):
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
    """

    start: str
    end: str
    is_implied: bool = False

    def state_after(self, prompt: str) -> ReasoningState:
        """Return the state in which an output begins, from the end of the prompt's text."""
        tail = prompt.rstrip()
        if tail.endswith(self.start):
            return ReasoningState.OPEN
        if tail.endswith(self.end):
            return ReasoningState.CLOSED
        return ReasoningState.OPEN if self.is_implied else ReasoningState.UNDECIDED


REASONING_FORMATS = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "ernie-x1": ReasoningFormat("<think>", "</think>", is_implied=True),
    "ernie-45-vl-thinking": ReasoningFormat("<think>", "</think>", is_implied=True),
    "glm45": ReasoningFormat("<think>", "</think>"),
}
"""By the names of `--reasoning-parser`."""
