# SPDX-License-Identifier: Apache-2.0
"""Separates the reasoning of a model from its answer, and counts the tokens of the reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.entrypoints.openai.parsers.stream_parser import (
    StreamParser,
    find_first,
    length_before,
    partial_match_length,
)


class ReasoningParser(StreamParser):
    """Splits a text into parts of kind reasoning and content, without the markers and the white space around them."""

    def __init__(self, reasoning_format: ReasoningFormat, state: ReasoningState) -> None:
        """Create a parser; `state` says whether the prompt ends within the reasoning."""
        self._format = reasoning_format
        self._ends = reasoning_format.ends
        states = {
            ReasoningState.UNDECIDED: self._parse_first_marker,
            ReasoningState.OPEN: self._skip_start_marker,
            ReasoningState.CLOSED: self._skip_answer_start,
        }
        super().__init__(states[state])

    def _parse_first_marker(self) -> bool:
        marker = self._consume(self._format.start)
        if marker is None:
            return False
        self._state = self._begin_reasoning if marker else self._skip_answer_start
        return True

    def _skip_start_marker(self) -> bool:
        """Skip a start marker, which some models repeat after a prompt that ends with one."""
        if self._consume(self._format.start) is None:
            return False
        self._state = self._begin_reasoning
        return True

    def _begin_reasoning(self) -> bool:
        return self._skip_space(self._parse_reasoning)

    def _parse_reasoning(self) -> bool:
        ends = self._ends
        if self._is_finished and find_first(self._buffer, ends) is None:
            self._emit_buffer("reasoning", len(self._buffer))
            return False
        self._emit_buffer("reasoning", length_before(self._buffer, ends))
        marker = self._consume(*ends)
        if not marker:
            return False
        if marker != self._format.end:  # it is part of the answer
            self._buffer = marker + self._buffer
        self._state = self._after_reasoning
        return True

    def _after_reasoning(self) -> bool:
        return self._skip_space(self._skip_answer_start)

    def _skip_answer_start(self) -> bool:
        marker = self._consume(self._format.answer_start) if self._format.answer_start else ""
        if marker is None:
            return False
        self._state = self._begin_wrapped_answer if marker else self._parse_answer
        return True

    def _begin_wrapped_answer(self) -> bool:
        return self._skip_space(self._parse_wrapped_answer)

    def _parse_wrapped_answer(self) -> bool:
        end = self._format.answer_end
        if self._is_finished and end not in self._buffer:
            return self._parse_answer()
        self._emit_buffer("content", length_before(self._buffer, (end,)))
        if not self._consume(end):
            return False
        self._state = self._after_answer
        return True

    def _after_answer(self) -> bool:
        return self._skip_space(self._parse_answer)

    def _parse_answer(self) -> bool:
        self._emit_buffer("content", len(self._buffer))
        return False

    def _skip_space(self, next_state: Callable[[], bool]) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = next_state
        return True


class ReasoningCounter:
    """Counts the tokens of the reasoning, including its markers."""

    def __init__(self, tokenizer: Tokenizer, reasoning_format: ReasoningFormat, state: ReasoningState) -> None:
        """Create a counter; `state` says whether the prompt ends within the reasoning."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._ends = reasoning_format.ends
        self._format = reasoning_format
        self._state = state
        self._num_counted = 0
        self._text = ""  # of the following tokens, which may be a part of a marker
        self._starts: list[int] = []  # where the text of each of them begins

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far."""
        return self._num_counted + (len(self._starts) if self._state is ReasoningState.OPEN else 0)

    def push(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for token_id in token_ids:
            if self._state is ReasoningState.CLOSED:
                return
            self._push_token(token_id)

    def _push_token(self, token_id: int) -> None:
        self._starts.append(len(self._text))
        self._text += self._detokenizer.push([token_id])
        if self._state is ReasoningState.UNDECIDED:
            self._decide()
        if self._state is ReasoningState.OPEN:
            self._find_end()

    def _decide(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._format.start):
            self._state = ReasoningState.OPEN
        elif not self._format.start.startswith(text):
            self._state = ReasoningState.CLOSED

    def _find_end(self) -> None:
        first = find_first(self._text, self._ends)
        if first is None:
            self._count_before(len(self._text) - partial_match_length(self._text, self._ends))
            return
        index, marker = first
        self._count_before(len(self._text) if marker == self._format.end else index)
        self._state = ReasoningState.CLOSED

    def _count_before(self, end: int) -> None:
        """Count the tokens that begin before this character, and drop the text before it."""
        num_tokens = bisect_left(self._starts, end) if end < len(self._text) else len(self._starts)
        self._num_counted += num_tokens
        self._starts = [start - end for start in self._starts[num_tokens:]]
        self._text = self._text[end:]
