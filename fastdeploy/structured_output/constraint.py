# SPDX-License-Identifier: Apache-2.0
"""The automaton that constrains one output: first its reasoning and the reasoning's budget, then the grammar.

States are immutable: `advance` returns a new one. A draft is therefore checked without any rollback. Each state caches
its bitmask and its last successor, so that verification reuses what the check of the draft has computed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy.core.constraint import TokenArray, TokenConstraint
from fastdeploy.core.reasoning import ReasoningState
from fastdeploy.structured_output.grammar import GrammarState


@dataclass(frozen=True)
class ConstraintParams:
    """The part of a constraint that does not change while the request runs.

    Attributes:
        eos_token_ids: tokens that end the request; empty if it ignores them.
        reasoning_start_id, reasoning_end_id: tokens around the reasoning; -1 if the prompt has already closed it.
        tool_call_start_id: token that ends the reasoning as well, and begins the response; -1 if there is none.
        not_in_reasoning: tokens that the reasoning must not contain: they would end the output before a response, or
            begin a response, against its grammar.
        reasoning_max_tokens, response_max_tokens: budgets; None means no limit.
        num_words: 32-bit words of a bitmask.
        allowed: bitmask of the ids that the request allows at all; None allows all.
    """

    eos_token_ids: tuple[int, ...]
    reasoning_start_id: int
    reasoning_end_id: int
    reasoning_max_tokens: int | None
    response_max_tokens: int | None
    num_words: int
    tool_call_start_id: int = -1
    not_in_reasoning: tuple[int, ...] = ()
    allowed: TokenArray | None = None

    def bitmask_of(self, token_ids: Collection[int]) -> TokenArray:
        """Return the bitmask that allows these ids only."""
        bitmask = np.zeros(self.num_words, np.int32)
        set_bits(bitmask, token_ids)
        return bitmask


def set_bits(bitmask: TokenArray, token_ids: Collection[int]) -> None:
    """Allow these ids."""
    view = bitmask.view(np.uint32)
    for token_id in token_ids:
        view[token_id // 32] |= np.uint32(1 << (token_id % 32))


def has_bit(bitmask: TokenArray, token_id: int) -> bool:
    """Return whether the bitmask allows this id; ids beyond its end are not allowed."""
    return token_id // 32 < len(bitmask) and bool((int(bitmask[token_id // 32]) >> (token_id % 32)) & 1)


@dataclass(frozen=True)
class ConstraintState:
    """The state of the automaton after some tokens.

    Attributes:
        grammar: state of the grammar; None if the response may have any form.
        num_reasoning_tokens, num_response_tokens: emitted so far.
        finish_reason: set if no token may follow.
    """

    params: ConstraintParams
    reasoning: ReasoningState
    grammar: GrammarState | None
    num_reasoning_tokens: int = 0
    num_response_tokens: int = 0
    finish_reason: str | None = None

    def advance(self, token_id: int) -> ConstraintState:
        """Return the state after one more token."""
        if self.finish_reason is not None:
            return self
        if self.reasoning is ReasoningState.OPEN:
            if token_id == self.params.reasoning_end_id:
                return replace(self, reasoning=ReasoningState.CLOSED)
            if token_id == self.params.tool_call_start_id:
                return self._advance_response(token_id)
            return replace(self, num_reasoning_tokens=self.num_reasoning_tokens + 1)
        if self.reasoning is ReasoningState.UNDECIDED and token_id == self.params.reasoning_start_id:
            return replace(self, reasoning=ReasoningState.OPEN)
        return self._advance_response(token_id)

    def bitmask(self) -> TokenArray | None:
        """Return the bitmask of the allowed ids; None allows all."""
        if self.finish_reason is not None:
            return None  # a row after the end, whose token is discarded
        if self.must_end_reasoning:
            return self.params.bitmask_of([self.params.reasoning_end_id])  # whatever the request allows
        allowed, bitmask = self.params.allowed, self._form_bitmask()
        if bitmask is None or allowed is None:
            return allowed if bitmask is None else bitmask
        return bitmask & allowed

    def _form_bitmask(self) -> TokenArray | None:
        """Return the bitmask of the ids that the form allows; None if it allows all."""
        params = self.params
        if self.reasoning is ReasoningState.OPEN:
            return self._reasoning_bitmask()
        if self.grammar is None:
            return None
        bitmask = np.empty(params.num_words, np.int32)
        self.grammar.fill_bitmask(bitmask)
        if self.grammar.is_accepting:
            set_bits(bitmask, params.eos_token_ids)
        if self.reasoning is ReasoningState.UNDECIDED:
            set_bits(bitmask, [params.reasoning_start_id])
        return bitmask

    @property
    def must_end_reasoning(self) -> bool:
        """Return whether the reasoning has used up its budget."""
        budget = self.params.reasoning_max_tokens
        return self.reasoning is ReasoningState.OPEN and budget is not None and self.num_reasoning_tokens >= budget

    def _reasoning_bitmask(self) -> TokenArray | None:
        """Forbid what would end the reasoning with something that the response must not begin with."""
        forbidden = self.params.not_in_reasoning
        return ~self.params.bitmask_of(forbidden) if forbidden else None

    def _advance_response(self, token_id: int) -> ConstraintState:
        grammar, count = self.grammar, self.num_response_tokens + 1
        finish_reason = "length" if self.params.response_max_tokens == count else None
        if grammar is not None:
            if grammar.is_accepting and token_id in self.params.eos_token_ids:
                finish_reason = "stop"
            else:
                grammar = grammar.advance(token_id)
                finish_reason = "stop" if grammar.is_terminated else finish_reason
        return replace(
            self,
            reasoning=ReasoningState.CLOSED,
            grammar=grammar,
            num_response_tokens=count,
            finish_reason=finish_reason,
        )


class _CachedState:
    """A state with its bitmask and its last successor, once they are computed."""

    def __init__(self, state: ConstraintState) -> None:
        self.state = state
        self._bitmask: tuple[TokenArray | None] | None = None
        self._next: tuple[int, _CachedState] | None = None

    def bitmask(self) -> TokenArray | None:
        if self._bitmask is None:
            self._bitmask = (self.state.bitmask(),)
        return self._bitmask[0]

    def advance(self, token_id: int) -> _CachedState:
        if self._next is None or self._next[0] != token_id:
            self._next = (token_id, _CachedState(self.state.advance(token_id)))
        return self._next[1]

    def allows(self, token_id: int) -> bool:
        if self.state.finish_reason is not None:
            return False
        bitmask = self.bitmask()
        return bitmask is None or has_bit(bitmask, token_id)


class OutputConstraint(TokenConstraint):
    """The constraint of one choice: see core.constraint.TokenConstraint."""

    def __init__(self, state: ConstraintState) -> None:
        self._current = _CachedState(state)
        self.error = ""

    def num_valid_tokens(self, draft: Sequence[int]) -> int:
        """Return the length of the longest prefix of the draft that is allowed."""
        current = self._current
        for count, token_id in enumerate(draft):
            if not current.allows(token_id):
                return count
            current = current.advance(token_id)
        return len(draft)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return the tokens that the grammar forces, or the end of a reasoning that has used up its budget."""
        state = self._current.state
        if state.must_end_reasoning:
            return [state.params.reasoning_end_id][:limit]
        if state.grammar is None or state.reasoning is not ReasoningState.CLOSED or state.finish_reason is not None:
            return []
        forced = state.grammar.forced_tokens()[:limit].tolist()
        return forced[: self.num_valid_tokens(forced)]

    def fill_bitmasks(self, draft: Sequence[int], bitmasks: TokenArray) -> list[bool]:
        """Write the bitmask of each row; return which rows are constrained."""
        current, constrained = self._current, []
        for row, token_id in enumerate([*draft, None]):
            bitmask = current.bitmask()
            constrained.append(bitmask is not None)
            if bitmask is not None:
                bitmasks[row] = bitmask[: bitmasks.shape[1]]
            if current.state.grammar is not None:
                self.error = self.error or current.state.grammar.error
            if token_id is not None:
                current = current.advance(token_id)
        return constrained

    def accept_token(self, token_id: int) -> str | None:
        """Advance by an emitted token; return the finish reason if no token may follow it."""
        self._current = self._current.advance(token_id)
        return self._current.state.finish_reason
