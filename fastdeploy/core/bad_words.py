# SPDX-License-Identifier: Apache-2.0
"""Finds the token ids that would complete a bad word, with work that does not grow with the number of bad words."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

ROOT = 0
_NONE = -1
_STATE_SHIFT = 32  # an id has fewer bits


class BadWordAutomaton:
    """An Aho-Corasick automaton over token ids.

    Its states are the proper prefixes of bad words, the empty one being ROOT. The state of a context is its longest
    suffix that is such a prefix. A state is an int, so a verification row can advance a copy over the drafts before it.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        """Build the automaton of these bad words, each of at least one id; time and memory are linear in all ids."""
        self._children: dict[int, int] = {}  # state << _STATE_SHIFT | id -> the state that is one id longer
        self._banned_ids: dict[int, array[int]] = {}  # state -> ids that complete a bad word which begins with it
        child_ids: list[list[int]] = [[]]  # of each state
        for sequence in dict.fromkeys(map(tuple, sequences)):
            state = self._add_prefix(sequence[:-1], child_ids)
            self._banned_ids.setdefault(state, array("i")).append(sequence[-1])
        # Of each state: the suffix in which the search for a child continues, and the longest one with banned ids.
        self._fallbacks = array("i", [_NONE]) * len(child_ids)
        self._banning_suffixes = array("i", [_NONE]) * len(child_ids)
        self._link_suffixes(child_ids)

    def advance(self, state: int, token_ids: Iterable[int]) -> int:
        """Return the state of a context in `state` with `token_ids` appended."""
        for token_id in token_ids:
            state = self._next_state(state, token_id)
        return state

    def states(self, state: int, token_ids: Iterable[int]) -> Iterator[int]:
        """Yield `state`, then the state after each of `token_ids`."""
        yield state
        for token_id in token_ids:
            state = self._next_state(state, token_id)
            yield state

    def banned_ids(self, state: int) -> array[int]:
        """Return the ids, int32, that would complete a bad word after a context in this state; some may be repeated."""
        banned = array("i")
        if state not in self._banned_ids:
            state = self._banning_suffixes[state]
        while state != _NONE:
            banned += self._banned_ids[state]
            state = self._banning_suffixes[state]
        return banned

    def _next_state(self, state: int, token_id: int) -> int:
        while state != _NONE:
            child = self._children.get(state << _STATE_SHIFT | token_id)
            if child is not None:
                return child
            state = self._fallbacks[state]
        return ROOT

    def _add_prefix(self, token_ids: Sequence[int], child_ids: list[list[int]]) -> int:
        """Return the state of a prefix, after adding it and the shorter ones where they are missing."""
        state = ROOT
        for token_id in token_ids:
            key = state << _STATE_SHIFT | token_id
            if key not in self._children:
                self._children[key] = len(child_ids)
                child_ids[state].append(token_id)
                child_ids.append([])
            state = self._children[key]
        return state

    def _link_suffixes(self, child_ids: list[list[int]]) -> None:
        """Set the links of all states, those of shorter ones first."""
        suffixes = array("i", [ROOT]) * len(child_ids)  # of each state: its longest proper suffix that is a state
        queue = [ROOT]
        for state in queue:
            for token_id in child_ids[state]:
                child = self._children[state << _STATE_SHIFT | token_id]
                suffix = ROOT if state == ROOT else self._next_state(suffixes[state], token_id)
                suffixes[child] = suffix
                self._banning_suffixes[child] = suffix if suffix in self._banned_ids else self._banning_suffixes[suffix]
                # A suffix that has no other child ids than this state cannot have the one that this state lacks.
                is_covered = _is_subset(child_ids[suffix], child_ids[child])
                self._fallbacks[child] = self._fallbacks[suffix] if is_covered else suffix
                queue.append(child)


def _is_subset(ids: list[int], of: list[int]) -> bool:
    return len(ids) <= len(of) and set(ids) <= set(of)
