# SPDX-License-Identifier: Apache-2.0
"""Splits a text into the reasoning and the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.machine import Machine, num_before


class ReasoningSplitter(Machine):
    """Makes parts of kind reasoning and content; white space around the markers belongs to them."""

    def __init__(self, form: ReasoningFormat, state: ReasoningState) -> None:
        """Start where the prompt left off."""
        self._form = form
        states = {
            ReasoningState.UNDECIDED: self._undecided,
            ReasoningState.OPEN: self._opening,
            ReasoningState.CLOSED: self._answer_opening,
        }
        super().__init__(states[state])

    def _undecided(self) -> bool:
        found = self._expect(self._form.start)
        if found is None:
            return False
        self._state = self._first_line if found else self._answer_opening
        return True

    def _opening(self) -> bool:
        """Some models write the start marker although the prompt has done so."""
        if self._expect(self._form.start) is None:
            return False
        self._state = self._first_line
        return True

    def _first_line(self) -> bool:
        return self._skip_space(self._reasoning)

    def _reasoning(self) -> bool:
        end = self._form.end
        if self._is_over and end not in self._buffer:
            self._give("reasoning", len(self._buffer))
            return False
        self._give("reasoning", num_before(self._buffer, end))
        if not self._expect(end):
            return False
        self._state = self._after_reasoning
        return True

    def _after_reasoning(self) -> bool:
        return self._skip_space(self._answer_opening)

    def _answer_opening(self) -> bool:
        found = self._expect(self._form.answer_start) if self._form.answer_start else ""
        if found is None:
            return False
        self._state = self._first_answer_line if found else self._answer
        return True

    def _first_answer_line(self) -> bool:
        return self._skip_space(self._wrapped_answer)

    def _wrapped_answer(self) -> bool:
        end = self._form.answer_end
        if self._is_over and end not in self._buffer:
            return self._answer()
        self._give("content", num_before(self._buffer, end))
        if not self._expect(end):
            return False
        self._state = self._after_answer
        return True

    def _after_answer(self) -> bool:
        return self._skip_space(self._answer)

    def _answer(self) -> bool:
        self._give("content", len(self._buffer))
        return False

    def _skip_space(self, after: Callable[[], bool]) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = after
        return True


class ReasoningCounter:
    """Counts the tokens of the reasoning, its markers included, whatever the deltas in which they come."""

    def __init__(self, tokenizer: Tokenizer, form: ReasoningFormat, state: ReasoningState) -> None:
        """Start where the prompt left off."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._form = form
        self._state = state
        self._text = ""
        self._num_undecided = 0
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            if self._state is ReasoningState.CLOSED:
                return
            self._push_one(token_id)

    def _push_one(self, token_id: int) -> None:
        self._text += self._detokenizer.push([token_id])
        self._num_undecided += 1
        if self._state is ReasoningState.UNDECIDED:
            self._decide()
        if self._state is ReasoningState.OPEN:
            self.num_tokens += self._num_undecided
            self._num_undecided = 0
            if self._form.end in self._text:
                self._state = ReasoningState.CLOSED
            self._text = self._text[-len(self._form.end) :]

    def _decide(self) -> None:
        begin = self._text.lstrip()
        if begin.startswith(self._form.start):
            self._state = ReasoningState.OPEN
        elif not self._form.start.startswith(begin):
            self._state = ReasoningState.CLOSED
