# SPDX-License-Identifier: Apache-2.0
"""The automaton bans the ids that a search of the context for every bad word bans, with little work per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.bad_words import ROOT, BadWordAutomaton
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.request import Request
from fastdeploy.core.sampling_params import MAX_BAD_WORD_IDS, SamplingParams
from tests.core.bad_word_search import search_banned_ids

SMALL_IDS = st.integers(0, 2)
BAD_WORDS = st.lists(st.lists(SMALL_IDS, min_size=1, max_size=6), min_size=1, max_size=10)
CONTEXTS = st.lists(SMALL_IDS, max_size=40)


@given(BAD_WORDS, CONTEXTS)
def test_banned_ids_are_those_that_a_search_finds(bad_words: list[list[int]], context: list[int]) -> None:
    automaton = BadWordAutomaton(bad_words)
    for position, state in enumerate(automaton.states(ROOT, context)):
        assert set(automaton.banned_ids(state)) == search_banned_ids(bad_words, context[:position])


@given(BAD_WORDS, CONTEXTS, CONTEXTS)
def test_a_context_in_parts_ends_in_the_same_state(
    bad_words: list[list[int]], first: list[int], rest: list[int]
) -> None:
    automaton = BadWordAutomaton(bad_words)
    assert automaton.advance(automaton.advance(ROOT, first), rest) == automaton.advance(ROOT, first + rest)


@pytest.mark.parametrize(
    ("bad_words", "context", "banned"),
    [
        ([[7]], [], [7]),
        ([[7]], [7, 7], [7]),  # in the prompt
        ([[1, 2, 3]], [1, 2], [3]),
        ([[1, 2, 3]], [1, 1, 2], [3]),
        ([[1, 2, 3], [1, 2, 3]], [1, 2], [3]),  # given twice
        ([[1, 2], [1, 2, 3]], [1, 2], [3]),  # one is a prefix of the other
        ([[1, 2, 3], [2, 3], [3]], [1, 2], [3, 3, 3]),  # suffixes of each other
        ([[1, 2, 3, 4], [2, 3, 5], [6]], [1, 2, 3], [4, 5, 6]),
        ([[1, 1, 1, 2], [1, 1, 3]], [1, 1, 1, 1], [2, 3]),
        ([[2**31 - 1, 0]], [2**31 - 1], [0]),
    ],
)
def test_bad_words_that_overlap_ban_all_their_last_ids(
    bad_words: list[list[int]], context: list[int], banned: list[int]
) -> None:
    automaton = BadWordAutomaton(bad_words)
    assert sorted(automaton.banned_ids(automaton.advance(ROOT, context))) == banned


class CountingDict(dict[int, Any]):
    """A dictionary that counts its lookups."""

    num_lookups = 0

    def get(self, key: int, default: Any = None) -> Any:
        self.num_lookups += 1
        return super().get(key, default)

    def __getitem__(self, key: int) -> Any:
        self.num_lookups += 1
        return super().__getitem__(key)


def most_lookups_of_a_row(bad_words: Sequence[Sequence[int]], context: Sequence[int]) -> tuple[int, int]:
    """Return the most states and the most groups of banned ids that a row of the context looks up."""
    automaton = BadWordAutomaton(bad_words)
    children = automaton._children = CountingDict(automaton._children)
    groups = automaton._banned_ids = CountingDict(automaton._banned_ids)
    state, most_states, most_groups = ROOT, 0, 0
    for token_id in context:
        children.num_lookups = groups.num_lookups = 0
        state = automaton.advance(state, [token_id])
        automaton.banned_ids(state)
        most_states, most_groups = max(most_states, children.num_lookups), max(most_groups, groups.num_lookups)
    return most_states, most_groups


@pytest.mark.parametrize(
    ("bad_words", "context", "lookups"),
    [
        ([[1] * MAX_BAD_WORD_IDS], [*[1] * 16383, 2], (2, 1)),
        ([[1, 2] * (MAX_BAD_WORD_IDS // 2)], [*([1, 2] * 8192)[:-1], 3], (3, 1)),
        ([[id_] for id_ in range(MAX_BAD_WORD_IDS)], [1, 2, 3], (1, 1)),
        ([[1, id_] for id_ in range(MAX_BAD_WORD_IDS // 2)], [1, 1, 2], (2, 1)),
        ([[1] * length for length in range(1, 181)], [*[1] * 179, 2], (2, 180)),
        ([[*[1] * length, 10 + length, 2] for length in range(178)], [*[1] * 177, 3], (178, 0)),
    ],
    ids=["one", "alternating", "single", "pairs", "powers", "fallbacks"],
)
def test_rows_of_the_largest_requests_need_few_lookups(
    bad_words: list[list[int]], context: list[int], lookups: tuple[int, int]
) -> None:
    assert sum(map(len, bad_words)) <= MAX_BAD_WORD_IDS
    assert most_lookups_of_a_row(bad_words, context) == lookups


@given(
    unit=st.lists(SMALL_IDS, min_size=1, max_size=8),
    ends=st.lists(st.tuples(st.integers(1, 200), SMALL_IDS, SMALL_IDS), min_size=1, max_size=12),
    suffix=CONTEXTS,
)
def test_rows_of_random_repetitive_bad_words_need_few_lookups(
    unit: list[int], ends: list[tuple[int, int, int]], suffix: list[int]
) -> None:
    words = [[*(unit * length)[:length], *last_ids] for length, *last_ids in ends]
    context = [*max(words, key=len), *suffix]
    assert max(most_lookups_of_a_row(words, context)) <= 2 * len(words) + 4


def make_choices(count: int, **params: Any) -> list[Request]:
    source = GenerationRequest("a", [1, 2, 3], SamplingParams(n=count, **params))
    return [Request(source, index, seed=index, max_total_tokens=50, max_drafts=8) for index in range(count)]


def test_choices_share_the_automaton_and_have_states_of_their_own() -> None:
    first, second = make_choices(2, bad_words_token_ids=[[2, 3, 4], [3, 5, 6]])
    automaton = first.bad_words
    assert automaton is not None and automaton is second.bad_words
    first.append([5])
    assert automaton.banned_ids(first.bad_words_state).tolist() == [6]
    assert automaton.banned_ids(second.bad_words_state).tolist() == [4]


def test_preemption_leaves_the_state_of_the_emitted_tokens() -> None:
    (request,) = make_choices(1, bad_words_token_ids=[[3, 5, 6]])
    request.append([5])
    request.reset_computed()
    assert request.bad_words is not None
    assert request.bad_words.banned_ids(request.bad_words_state).tolist() == [6]


def test_a_request_without_bad_words_has_no_automaton() -> None:
    assert make_choices(1)[0].bad_words is None
