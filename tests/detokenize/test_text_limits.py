# SPDX-License-Identifier: Apache-2.0
"""Texts are limited before they are tokenized, and tokenizing does not hold the interpreter's lock."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.core.errors import ContextLengthError, InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import RequestLimits, build_request, check_text, max_text_length
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.detokenize.random_texts import random_text
from tests.detokenize.test_sentencepiece import SUPPORTED, save
from tests.detokenize.tokenizers_for_tests import BACKENDS, make_tokenizer

LIMITS = RequestLimits(max_model_len=16, vocab_size=401)


def check_ids_are_those_of_encode(tokenizer: Tokenizer, seed: int, count: int) -> None:
    rng = random.Random(seed)
    for _ in range(count):
        text, add_special_tokens = random_text(rng), rng.random() < 0.5
        expected = tokenizer._backend.encode(text, add_special_tokens=add_special_tokens).ids
        assert tokenizer.encode(text, add_special_tokens) == expected, repr(text)


@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_are_those_of_the_slower_function(kind: str) -> None:
    check_ids_are_those_of_encode(make_tokenizer(kind), 1, 100)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_ids_of_sentencepiece_models_are_those_of_the_slower_function(tmp_path: Path, kind: str) -> None:
    check_ids_are_those_of_encode(save(tmp_path, kind), 2, 100)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_of_a_thousand_texts_are_those_of_the_slower_function(kind: str) -> None:
    check_ids_are_those_of_encode(make_tokenizer(kind), 3, 1000)


@pytest.mark.parametrize("kind", BACKENDS)
def test_other_threads_run_while_a_large_text_is_tokenized_and_decoded(kind: str) -> None:
    tokenizer, done = make_tokenizer(kind), threading.Event()
    text, num_ticks = "x" * 2_000_000, 0  # one word
    ids: list[int] = []

    def work() -> None:
        ids.extend(tokenizer.encode(text, add_special_tokens=False))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.001):
        num_ticks += 1
    thread.join()
    assert num_ticks > 20, "the library held the lock"
    assert tokenizer.decode(ids).strip() == text


@pytest.mark.parametrize(("kind", "limit"), [("byte_level", 832), ("metaspace", 768), ("byte_fallback", 768)])
def test_text_of_any_vocabulary_has_a_limit_that_the_error_names(
    kind: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(kind)
    assert max_text_length(tokenizer, 16) == limit
    monkeypatch.setattr(tokenizer, "encode", None)  # must not be called
    with pytest.raises(ContextLengthError, match=f"expected 1 to 15 tokens, which have at most {limit} characters"):
        build_request(tokenizer, LIMITS, "r", "a" * (limit + 1), SamplingParams())


def test_text_that_is_truncated_may_have_eight_times_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, params = make_tokenizer("byte_level"), SamplingParams(truncate_prompt_tokens=3)
    assert len(build_request(tokenizer, LIMITS, "r", "a" * 6656, params).prompt_token_ids) == 3
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(ContextLengthError, match="prompt: expected at most 6656 characters, got 6657"):
        build_request(tokenizer, LIMITS, "r", "a" * 6657, params)


@pytest.mark.parametrize(
    ("max_model_len", "limit", "truncated"),
    [
        (100, 5_200, 41_600),  # four of the longest tokens, which have 13 bytes
        (50_000, 2**20, 2**21),
        (2**20, 2**24, 2**24),  # 16 characters per token of a very long context
    ],
)
def test_limit_is_bounded_by_the_memory_that_tokenizing_takes(max_model_len: int, limit: int, truncated: int) -> None:
    tokenizer = make_tokenizer("byte_level")
    assert max_text_length(tokenizer, max_model_len) == limit
    assert max_text_length(tokenizer, max_model_len, is_truncated=True) == truncated


@pytest.mark.parametrize("prompt", ["a\ud800", "\udfff", "é\udc80é"])
def test_lone_surrogates_are_refused_by_field(prompt: str) -> None:
    tokenizer = make_tokenizer("byte_level")
    with pytest.raises(InvalidRequestError, match=r"prompt: expected valid Unicode, got the lone surrogate '\\ud"):
        build_request(tokenizer, LIMITS, "r", prompt, SamplingParams())
    with pytest.raises(InvalidRequestError, match="text: expected valid Unicode"):
        tokenizer.encode(prompt)
    for field in ("stop", "bad_words"):
        changed: dict[str, Any] = {field: [prompt]}
        with pytest.raises(InvalidRequestError, match=f"{field}: expected valid Unicode"):
            SamplingParams(**changed)


def test_bad_words_have_a_limit_of_characters_in_all() -> None:
    assert len(SamplingParams(bad_words=["x" * 1024] * 64).bad_words) == 64
    with pytest.raises(InvalidRequestError, match="bad_words: at most 65536 characters in all strings, got 65537"):
        SamplingParams(bad_words=["x" * 1024] * 64 + ["y"])


def test_text_at_the_limit_passes() -> None:
    tokenizer = make_tokenizer("byte_level")
    check_text("suffix", "a" * 10, tokenizer, 10)
    with pytest.raises(ContextLengthError, match="suffix: expected at most 10 characters, got 11"):
        check_text("suffix", "a" * 11, tokenizer, 10)


def test_length_counts_what_normalization_writes(tmp_path: Path) -> None:
    tokenizer, text = save(tmp_path, "unigram_nfkc"), "\ufdfa" * 20_000
    assert tokenizer.text_length(text) == 18 * 20_000
    check_text("prompt", text, tokenizer, 360_000)
    with pytest.raises(ContextLengthError, match="prompt: expected at most 359999 characters, got 360000"):
        check_text("prompt", text, tokenizer, 359_999)
    assert make_tokenizer("byte_level").text_length(text) == 20_000


class LengthRecorder:
    """Stands for `Tokenizer.encode` and records the lengths of the texts."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def encode(self, text: str, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        self.lengths.append(len(text))
        return [1]


def check_random_lengths(seed: int, count: int) -> None:
    """Use prompts and bad words of random lengths; none above its limit reaches the library."""
    rng = random.Random(seed)
    for _ in range(count):
        tokenizer, limits = make_tokenizer(rng.choice(list(BACKENDS))), RequestLimits(rng.randrange(2, 64), 401)
        is_truncated = rng.random() < 0.5
        limit = max_text_length(tokenizer, limits.max_model_len, is_truncated)
        text = rng.choice(["a", "é", " ", "x the "]) * rng.randrange(1, 2 * limit)
        bad_word = "b" * rng.choice([1, 100, 65_535, 65_536, 65_537])
        options: dict[str, Any] = {"truncate_prompt_tokens": 1} if is_truncated else {}
        recorder = LengthRecorder()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "encode", recorder.encode)
            try:
                build_request(tokenizer, limits, "r", text, SamplingParams(bad_words=[bad_word], **options))
            except InvalidRequestError as error:
                assert error.field == ("bad_words" if len(bad_word) > 65_536 else "prompt")
                assert len(bad_word) > 65_536 or len(text) > limit
            else:
                assert len(text) <= limit and len(text) in recorder.lengths
        assert max(recorder.lengths, default=0) <= max(limit, 65_537)  # a bad word is also tokenized after a space


def test_text_of_any_length_is_limited_before_it_is_tokenized() -> None:
    check_random_lengths(4, 200)


@pytest.mark.nightly
def test_a_thousand_texts_are_limited_before_they_are_tokenized() -> None:
    check_random_lengths(5, 1000)
