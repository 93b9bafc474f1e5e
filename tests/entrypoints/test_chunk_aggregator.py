# SPDX-License-Identifier: Apache-2.0
"""Chunks with a minimum number of tokens."""

from __future__ import annotations

from msgspec import UNSET

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.entrypoints.openai.generation import ChoiceUpdate, ChunkAggregator
from fastdeploy.entrypoints.openai.logprobs import output_tokens
from tests.detokenize.tokenizers_for_tests import make_tokenizer


def update(index: int, token_ids: list[int], text: str, finish_reason: str | None = None) -> ChoiceUpdate:
    delta = TokenDelta(
        "r", index, token_ids, draft_sources=["ngram"] * (len(token_ids) - 1), finish_reason=finish_reason
    )
    return ChoiceUpdate(0, index, text, delta, is_first=token_ids[0] == 1)


def test_choices_are_aggregated_separately_and_lose_no_token() -> None:
    aggregator = ChunkAggregator(3)
    assert aggregator.push([update(0, [1], "a"), update(1, [1, 2, 3, 4], "b")])[0].text == "b"
    assert aggregator.push([update(0, [2], "c")]) == []
    (ready,) = aggregator.push([update(0, [3, 4], "d")])
    assert (ready.text, ready.delta.token_ids, ready.is_first) == ("acd", [1, 2, 3, 4], True)
    assert ready.delta.sources() == [None, None, "ngram", None]
    (last,) = aggregator.push([update(0, [5], "e", "stop")])
    assert (last.text, last.is_first, last.delta.finish_reason) == ("e", False, "stop")


def test_collected_tokens_are_returned_when_an_error_ends_the_stream() -> None:
    aggregator = ChunkAggregator(3)
    assert aggregator.push([update(0, [1], "a"), update(1, [1, 2], "b"), update(0, [2], "c")]) == []
    assert [(rest.index, rest.text, rest.delta.token_ids) for rest in aggregator.flush()] == [
        (0, "ac", [1, 2]),
        (1, "b", [1, 2]),
    ]
    assert aggregator.flush() == []


def test_a_minimum_of_one_token_delays_nothing() -> None:
    updates = [update(0, [1], "a"), update(0, [2], "b")]
    assert ChunkAggregator(1).push(updates) == updates


def test_output_tokens_have_their_bytes_and_origin() -> None:
    tokenizer = make_tokenizer("byte_level")
    smile = tokenizer.encode("\U0001f642", add_special_tokens=False)
    delta = TokenDelta("r", 0, [*smile[:1], *tokenizer.encode("fox")], draft_sources=["suffix"])
    first = output_tokens(tokenizer, delta)
    assert first[0].text.startswith("bytes:\\xf0")
    assert (first[0].origin, first[0].source) == ("draft", "suffix")
    assert (first[1].id, first[1].origin) == (tokenizer.encode("fox")[0], "target")
    assert first[1].source is UNSET
