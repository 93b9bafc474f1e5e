# SPDX-License-Identifier: Apache-2.0
"""Offsets of tokens in the text that a client gets."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import normalizers

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.added_tokens import wrap_in_tokens
from fastdeploy.detokenize.incremental import IncrementalDetokenizer
from fastdeploy.detokenize.text_offsets import TextOffsets, prompt_offsets
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.random_texts import random_text
from tests.detokenize.tokenizers_for_tests import BACKENDS, byte_level_backend, make_tokenizer

KINDS = sorted(BACKENDS)


def begins_with(text: str, offset: int, name: str) -> bool:
    """Return whether a token is where its offset says; a part of a character counts as the character."""
    rest, name = text[offset:].replace("\u2581", " "), name.replace("\u2581", " ")
    return "\ufffd" in name or rest.startswith(name) or rest.startswith(name.removeprefix(" "))


def with_bos(backend: tokenizers.Tokenizer) -> Tokenizer:
    wrap_in_tokens(backend, "<s>", None)
    return Tokenizer(backend)


def test_the_added_start_token_takes_no_place_in_the_prompt_s_text() -> None:
    tokenizer = with_bos(byte_level_backend())
    token_ids = tokenizer.encode("the quick<s> fox")
    names = [tokenizer.token_text(token_id) for token_id in token_ids]
    assert names[0] == "<s>" and "".join(names[1:]) == "the quick<s> fox"
    expected = [sum(map(len, names[1:i])) for i in range(len(names))]
    assert prompt_offsets(tokenizer, token_ids, "the quick<s> fox", added=tokenizer.encode("")) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_prompt_are_where_their_offsets_say(kind: str) -> None:
    rng, tokenizer = random.Random(3), with_bos(BACKENDS[kind]())
    num_found = 0
    for _ in range(60):
        text = random_text(rng)
        token_ids = tokenizer.encode(text)
        offsets = prompt_offsets(tokenizer, token_ids, text, tokenizer.encode(""))
        assert offsets == sorted(offsets) and all(0 <= offset <= len(text) for offset in offsets)
        unknown = tokenizer.find_special_ids(["<unk>"]).values()
        for token_id, offset in zip(token_ids[1:], offsets[1:], strict=True):
            if token_id not in unknown:
                assert begins_with(text, offset, tokenizer.token_text(token_id)), (text, offset)
                num_found += 1
        if set(unknown).isdisjoint(token_ids):
            rest, last = text[offsets[-1] :], tokenizer.token_text(token_ids[-1])
            assert len(token_ids) == 1 or "\ufffd" in last or rest.strip(" \u2581") == last.strip(" \u2581")
    assert num_found > 3000


def test_a_normalized_prompt_has_its_offsets_in_the_text_that_was_sent() -> None:
    backend = byte_level_backend()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    tokenizer = Tokenizer(backend)
    text = "he\u0301llo the  quick  fox END"
    token_ids = tokenizer.encode(text)
    offset_of = dict(zip(map(tokenizer.token_text, token_ids), prompt_offsets(tokenizer, token_ids, text), strict=True))
    assert offset_of[" quick"] == text.index(" quick") and offset_of[" fox"] == text.index(" fox")
    assert offset_of[" END" if " END" in offset_of else "END"] == text.index(" END" if " END" in offset_of else "END")


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_an_output_are_where_their_offsets_say(kind: str, skips: bool) -> None:
    rng, tokenizer = random.Random(5), make_tokenizer(kind)
    params = SamplingParams(skip_special_tokens=skips)
    for _ in range(60):
        prompt = tokenizer.encode("the quick", add_special_tokens=False)
        token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([1, 5, 60]))]
        token_ids += tokenizer.encode(random_text(rng)[:200], add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt, skips)
        text = "EC" + detokenizer.push(token_ids) + detokenizer.flush()
        whole, parts = (TextOffsets(tokenizer, prompt, params, 2) for _ in range(2))
        offsets = whole.push(token_ids)
        assert offsets == [offset for token_id in token_ids for offset in parts.push([token_id])]
        assert offsets[0] == 2 and offsets == sorted(offsets) and offsets[-1] <= len(text)
        for token_id, offset in zip(token_ids, offsets, strict=True):
            is_hidden = skips and token_id in tokenizer.special_ids
            if not is_hidden and not tokenizer.is_byte_fallback(token_id):  # of which most runs are not valid UTF-8
                assert begins_with(text, offset, tokenizer.token_text(token_id)), (text, offset)


def test_the_tokens_of_one_character_have_its_offset_and_a_hidden_token_that_of_the_next() -> None:
    tokenizer = make_tokenizer("byte_level")
    first, *others = [tokenizer.vocabulary()[char] for char in "\u00f0\u0141\u013a\u0125"]  # the bytes of one character
    user, end = tokenizer.vocabulary()["<|user|>"], tokenizer.vocabulary()["E"]
    offsets = TextOffsets(tokenizer, [], SamplingParams(), 0)
    assert offsets.push([first, *others, user, first, *others]) == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert TextOffsets(tokenizer, [], SamplingParams(), 7).push([first, end, user, end]) == [7, 8, 9, 9]
