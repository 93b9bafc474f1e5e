# SPDX-License-Identifier: Apache-2.0
"""Separates the reasoning of a model from its answer, and counts the tokens of the reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastdeploy.core.reasoning import ReasoningFormat, ReasoningState
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.entrypoints.openai.parsers.stream_parser import Part, StreamParser, find_first, length_before
from fastdeploy.entrypoints.openai.parsers.tool_parser import ToolParser

PIECE_LENGTH = 1000  # characters of a text that a parser of calls examines at once, because few show what follows


@dataclass(frozen=True)
class CallsInReasoning:
    """How an output calls tools without ending its reasoning: with `ReasoningFormat.tool_call_start`.

    Attributes:
        make_parser: returns a parser of calls, which decides whether such a marker begins one.
        is_forced: a grammar allows nothing but a call behind the marker, so that one begins even if the output ends
            within its head.
    """

    make_parser: Callable[[], ToolParser]
    is_forced: bool = False

    def may_begin_call(self, text: str) -> bool:
        """Return whether a text that begins with such a marker begins a call, or may be continued to one."""
        return self.make_parser().begins_with_call(text, is_last=False) is not False


class ReasoningParser(StreamParser):
    """Splits a text into parts of kind reasoning and content, without the markers and the white space around them.

    Attributes:
        state: whether the text so far is in its reasoning.
        length: characters at the beginning of the text that are the reasoning with its markers; 0 until it has ended.
    """

    def __init__(
        self, reasoning_format: ReasoningFormat, state: ReasoningState, calls: CallsInReasoning | None = None
    ) -> None:
        """Create a parser.

        Args:
            state: whether the prompt ends within the reasoning.
            calls: None if no tool may be called.
        """
        self._format = reasoning_format
        self._calls = calls
        self._ends = reasoning_format.ends if calls is not None else (reasoning_format.end,)
        self._num_pushed = 0
        self._num_examined = 0  # characters of the buffer that the parser of a call has
        self.state = state
        self.length = 0
        states = {
            ReasoningState.UNDECIDED: self._parse_first_marker,
            ReasoningState.OPEN: self._skip_start_marker,
            ReasoningState.CLOSED: self._skip_answer_start,
        }
        super().__init__(states[state])

    def push(self, text: str) -> list[Part]:
        """Append `text`; return the parts that no later text can change."""
        self._num_pushed += len(text)
        return super().push(text)

    def _parse_first_marker(self) -> bool:
        marker = self._consume(self._format.start)
        if marker is None:
            return False
        self.state = ReasoningState.OPEN if marker else ReasoningState.CLOSED
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
        if self._is_finished and find_first(self._buffer, self._ends) is None:
            self._emit_buffer("reasoning", len(self._buffer))
            return False
        self._emit_buffer("reasoning", length_before(self._buffer, self._ends))
        first = find_first(self._buffer, self._ends)
        if first is None:
            return False
        index, marker = first
        if marker == self._format.end or self._calls is None:
            return self._end_reasoning(index + len(marker))
        self._num_examined = index
        self._state = partial(self._parse_call_head, self._calls.make_parser(), index, index + len(marker))
        return True

    def _parse_call_head(self, call: ToolParser, begin: int, end: int) -> bool:
        """End the reasoning at the marker in `buffer[begin:end]` if it begins a call."""
        text = self._buffer[self._num_examined : self._num_examined + PIECE_LENGTH]
        self._num_examined += len(text)
        begins_call = call.begins_with_call(text, is_last=False)
        if begins_call is None and (text or not self._is_finished):
            return text != ""
        if begins_call is None and self._calls is not None:
            begins_call = self._calls.is_forced or call.begins_with_call("", is_last=True)
        if begins_call:
            return self._end_reasoning(begin)
        self._emit_buffer("reasoning", end)
        self._state = self._parse_reasoning
        return True

    def _end_reasoning(self, end: int) -> bool:
        """Drop the first `end` characters of the buffer, of which nothing belongs to the answer."""
        self._buffer = self._buffer[end:]
        self.state, self.length = ReasoningState.CLOSED, self._num_pushed - len(self._buffer)
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
    """Counts the tokens of the reasoning, including its markers, where a parser finds them in the text."""

    def __init__(self, parser: ReasoningParser, detokenizer: IncrementalDetokenizer) -> None:
        """Create a counter.

        Args:
            parser: for the same text as the message's; nothing else uses it.
            detokenizer: returns the text of the tokens, except that stop strings do not end it.
        """
        self._parser = parser
        self._detokenizer = detokenizer
        self._length = 0  # of the text
        self._starts: list[int] = []  # where the text of each token begins, until the answer has begun

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far."""
        match self._parser.state:
            case ReasoningState.OPEN:
                return len(self._starts)
            case ReasoningState.CLOSED:
                return bisect_left(self._starts, self._parser.length)
        return 0

    def push(self, token_ids: Sequence[int], text: str, is_last: bool) -> None:
        """Append tokens, and the text that is complete with them."""
        if self._parser.state is ReasoningState.CLOSED:
            return
        for token_id in token_ids:
            self._starts.append(self._length)
            self._length += len(self._detokenizer.push([token_id]))
        self._parser.push(text)
        if is_last:
            self._parser.finish()
