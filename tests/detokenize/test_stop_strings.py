# SPDX-License-Identifier: Apache-2.0
"""Stop strings are found as by naive search, and a character costs at most two comparisons per stop string."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import MAX_STOP_LENGTH, SamplingParams
from fastdeploy.detokenize.stop_strings import KmpMatcher, StopMatcher
from fastdeploy.detokenize.text_output import TextAssembler
from tests.detokenize.tokenizers_for_tests import make_tokenizer

Match = tuple[str, int, int]
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=7), min_size=1, max_size=4)
PIECES = st.lists(st.text(alphabet="aab", max_size=6), max_size=12)


def naive_match(text: str, num_before: int, stops: list[str]) -> Match | None:
    """Return the match in `text` that ends first after `num_before` characters, the longest of those that end there."""
    for end in range(num_before + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return stop, end - len(stop) - num_before, end - num_before
    return None


def naive_num_held(text: str, stops: list[str]) -> int:
    """Return the length of the longest proper prefix of a stop string with which `text` ends."""
    prefixes = [stop[:length] for stop in stops for length in range(len(stop))]
    return max(len(prefix) for prefix in prefixes if text.endswith(prefix))


@given(stops=STOPS, pieces=PIECES)
def test_matches_and_held_text_are_those_of_naive_search(stops: list[str], pieces: list[str]) -> None:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        match = matcher.push(piece)
        text += piece
        assert match == naive_match(text, len(text) - len(piece), stops)
        assert matcher.num_held == naive_num_held(text, stops)


@given(stops=STOPS, pieces=PIECES, min_tokens=st.integers(0, 5), keep=st.booleans())
def test_stream_holds_back_only_what_may_become_a_stop_string(
    stops: list[str], pieces: list[str], min_tokens: int, keep: bool
) -> None:
    tokenizer = make_tokenizer("byte_level")
    token_ids = [token_id for piece in pieces for token_id in tokenizer.encode(piece)]
    params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=keep)
    assembler, text, streamed = TextAssembler(tokenizer, [], params), "", ""
    for num_tokens, token_id in enumerate(token_ids, 1):
        num_before = len(text)
        text += tokenizer.token_text(token_id)
        streamed += assembler.push(TokenDelta("r", 0, [token_id]))
        match = naive_match(text, num_before, stops)
        if match is not None and num_tokens > min_tokens:
            assert streamed == text[: num_before + match[2 if keep else 1]]
            return
        assert streamed == text[: len(text) - naive_num_held(text, stops)]


class CountedText(str):
    """A string that counts how often a character of it is read."""

    __slots__ = ("num_reads",)
    num_reads: int

    def __getitem__(self, index: Any) -> str:
        self.num_reads += 1
        return str.__getitem__(self, index)


def fibonacci_string(length: int) -> str:
    """Return the beginning of abaababa..., whose prefixes overlap most."""
    shorter, longer = "a", "ab"
    while len(longer) < length:
        shorter, longer = longer, longer + shorter
    return longer[:length]


@pytest.mark.parametrize("piece_length", [1, 5, 5000])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("a" * (MAX_STOP_LENGTH - 1) + "b", "a" * 5000),
        ("a" * MAX_STOP_LENGTH, ("a" * (MAX_STOP_LENGTH - 1) + "b") * 5),
        ("a" * MAX_STOP_LENGTH, "a" * 5000),
        ("ab" * (MAX_STOP_LENGTH // 2), "ab" * 500 + "aab" * 1000),
        (fibonacci_string(MAX_STOP_LENGTH - 1) + "c", fibonacci_string(5000)),
    ],
)
def test_a_character_costs_at_most_two_comparisons_on_average(stop: str, text: str, piece_length: int) -> None:
    counted = CountedText(stop)
    counted.num_reads = 0
    matcher = KmpMatcher(counted)
    counted.num_reads, num_pieces = 0, 0
    for start in range(0, len(text), piece_length):
        matcher.push(text[start : start + piece_length])
        num_pieces += 1
    assert 0 < counted.num_reads <= 2 * len(text) + num_pieces  # one more, to search a piece for the first character


def test_creating_a_matcher_costs_at_most_two_comparisons_per_character() -> None:
    counted = CountedText("yyx" + "y" * (MAX_STOP_LENGTH - 3))  # of no other test, because tables are cached
    counted.num_reads = 0
    KmpMatcher(counted)
    assert MAX_STOP_LENGTH <= counted.num_reads <= 2 * MAX_STOP_LENGTH


@given(stop=st.text(alphabet="ab", min_size=1, max_size=12), pieces=PIECES)
def test_comparisons_stay_within_two_per_character_for_any_text(stop: str, pieces: list[str]) -> None:
    counted = CountedText(stop)
    counted.num_reads = 0
    matcher = KmpMatcher(counted)
    counted.num_reads = 0
    for piece in pieces:
        matcher.push(piece)
    assert counted.num_reads <= sum(2 * len(piece) + 1 for piece in pieces)


def test_stop_string_completed_by_a_long_repetition_is_found_and_cut() -> None:
    tokenizer = make_tokenizer("byte_level")
    stop = "a" * (MAX_STOP_LENGTH - 1) + "b"
    assembler = TextAssembler(tokenizer, [], SamplingParams(stop=[stop]))
    texts = [assembler.push(TokenDelta("r", 0, [token_id])) for token_id in tokenizer.encode("a" * 2000 + "bc")]
    assert "".join(texts) == "a" * (2000 - (MAX_STOP_LENGTH - 1))
