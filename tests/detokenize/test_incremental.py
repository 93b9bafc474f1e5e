# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization gives the same text as decoding all tokens at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from tests.detokenize.tokenizers_for_tests import make_tokenizer

TEXTS = st.text(alphabet="abdefhlnortw ,.\nhéö你好世界🙂🙃🏳️‍🌈", max_size=40)
KINDS = ["byte_level", "metaspace", "byte_fallback"]


def stream(kind: str, prompt: list[int], token_ids: list[int], sizes: list[int], skip: bool = True) -> list[str]:
    """Push the tokens in pieces of these sizes, repeated, and return the texts, the one of `flush` last."""
    detokenizer = IncrementalDetokenizer(make_tokenizer(kind), prompt, skip)
    pieces, position, i = [], 0, 0
    while position < len(token_ids):
        size = sizes[i % len(sizes)]
        pieces.append(detokenizer.push(token_ids[position : position + size]))
        position, i = position + size, i + 1
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS, text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_joined_equal_what_the_tokens_add_to_the_prompt(
    kind: str, prompt: str, text: str, sizes: list[int]
) -> None:
    tokenizer = make_tokenizer(kind)
    prompt_ids = tokenizer.encode("the quick " + prompt)
    token_ids = tokenizer.encode(text)
    whole = tokenizer.decode(prompt_ids + token_ids)
    assert "".join(stream(kind, prompt_ids, token_ids, sizes)) == whole[len(tokenizer.decode(prompt_ids)) :]


@given(token_ids=st.lists(st.integers(0, 405), max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_byte_level_tokens_equal_the_whole_decode_even_if_they_are_not_valid_text(
    token_ids: list[int], sizes: list[int]
) -> None:
    assert "".join(stream("byte_level", [], token_ids, sizes)) == make_tokenizer("byte_level").decode(token_ids)


@example(token_ids=[4, 180, 180, 180, 180, 180, 180, 74])  # ids without a token between two that have one
@given(
    token_ids=st.lists(st.integers(0, 300), max_size=40).map(lambda ids: [token_id for token_id in ids if token_id > 0])
)
def test_any_metaspace_tokens_equal_the_whole_decode(token_ids: list[int]) -> None:
    assert "".join(stream("metaspace", [], token_ids, [1])) == make_tokenizer("metaspace").decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_piece_has_an_incomplete_character(kind: str) -> None:
    token_ids = make_tokenizer(kind).encode("a" + "🏴" * 7 + "é龍")
    pieces = stream(kind, [], token_ids, [1])
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == "a" + "🏴" * 7 + "é龍"
    assert sum(bool(piece) for piece in pieces) >= 9, "complete characters are returned at once"


def test_flush_returns_the_incomplete_character_at_the_end() -> None:
    half = make_tokenizer("byte_level").encode("🏴")[:-1]
    assert stream("byte_level", [], half, [1])[-1] == "\ufffd"


def test_output_completes_the_character_that_the_prompt_began() -> None:
    token_ids = make_tokenizer("byte_level").encode("🏴")
    assert "".join(stream("byte_level", token_ids[:2], token_ids[2:], [1])) == "🏴"


def test_a_word_after_a_skipped_special_token_keeps_its_space() -> None:
    tokenizer = make_tokenizer("metaspace")
    word = tokenizer.encode("fox")
    special = tokenizer.encode("</s>")[-1:]
    assert "".join(stream("metaspace", [*tokenizer.encode("the"), *special * 8], word, [1])) == " fox"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_show_when_they_are_not_skipped(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    token_ids = tokenizer.encode("dog</s>")
    assert "".join(stream(kind, [], token_ids, [1], skip=False)).endswith("</s>")
    assert "</s>" not in "".join(stream(kind, [], token_ids, [1], skip=True))


def test_work_per_token_does_not_grow_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("metaspace")
    longest = 0
    decode = tokenizer.decode

    def recording_decode(token_ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", recording_decode)
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.encode("the dog " * 500))
    for token_id in tokenizer.encode("the quick brown fox " * 200):
        detokenizer.push([token_id])
    assert 0 < longest <= 24
