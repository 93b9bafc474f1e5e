# SPDX-License-Identifier: Apache-2.0
"""Building and validation of requests."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.errors import ContextLengthError, InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.preprocess import RequestLimits, build_request, tokenize_bad_words
from tests.detokenize.tokenizers_for_tests import make_tokenizer

LIMITS = RequestLimits(max_model_len=16, vocab_size=401)


def build(prompt: Any, **params: Any) -> Any:
    return build_request(make_tokenizer("byte_level"), LIMITS, "r1", prompt, SamplingParams(**params))


def test_text_is_encoded_and_token_ids_are_used_unchanged() -> None:
    tokenizer = make_tokenizer("byte_level")
    assert build("the fox").prompt_token_ids == tokenizer.encode("the fox")
    assert build([5, 400]).prompt_token_ids == [5, 400]


@pytest.mark.parametrize("num_tokens", [1, 15])
def test_shortest_and_longest_prompts_pass(num_tokens: int) -> None:
    assert len(build([7] * num_tokens).prompt_token_ids) == num_tokens


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        ("", {}, "prompt", "expected 1 to 15 tokens"),
        ([7] * 16, {}, "prompt", "expected 1 to 15 tokens .* got 16"),
        ([7, 401], {}, "prompt", r"token ids in \[0, 400\], got 401"),
        ([7, -1], {}, "prompt", r"token ids in \[0, 400\], got -1"),
        ([7, True], {}, "prompt", "got True"),
        (
            [7] * 12,
            {"min_tokens": 5},
            "min_tokens",
            "expected at most 4, which the prompt leaves of the context, got 5",
        ),
        ("a", {"stop_token_ids": [401]}, "stop_token_ids", "got 401"),
        ("a", {"logit_bias": {401: 1.0}}, "logit_bias", "got 401"),
        ("a", {"bad_words_token_ids": [[3, 999]]}, "bad_words_token_ids", "got 999"),
    ],
)
def test_bad_requests_name_the_field_and_its_limits(prompt: Any, params: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        build(prompt, **params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, 3),
        ({"truncate_prompt_tokens": 30}, 20),
        ({"truncate_prompt_tokens": -1}, 15),
        ({"truncate_prompt_tokens": -1, "max_tokens": 6}, 10),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, 1),
    ],
)
def test_truncated_prompts_keep_their_last_tokens(params: Any, kept: int) -> None:
    prompt = list(range(10, 30))
    if kept > 15:
        with pytest.raises(ContextLengthError, match="got 20"):
            build(prompt, **params)
    else:
        assert build(prompt, **params).prompt_token_ids == prompt[-kept:]


def test_truncation_counts_the_tokens_of_a_text() -> None:
    tokenizer = make_tokenizer("byte_level")
    assert build("the quick brown fox", truncate_prompt_tokens=2).prompt_token_ids == tokenizer.encode(" brown fox")
    left = build("the quick brown fox", truncate_prompt_tokens=2, truncation_side="left")
    assert left.prompt_token_ids == tokenizer.encode(" brown fox")
    right = build("the quick brown fox", truncate_prompt_tokens=2, truncation_side="right")
    assert right.prompt_token_ids == tokenizer.encode("the quick")


def test_bad_words_are_tokenized_with_and_without_a_leading_space() -> None:
    tokenizer = make_tokenizer("byte_level")
    params = SamplingParams(bad_words=["fox"], bad_words_token_ids=[[9, 9]])
    request = build_request(tokenizer, LIMITS, "r1", "a", params)
    assert request.params.bad_words_token_ids == [[9, 9], tokenizer.encode("fox"), tokenizer.encode(" fox")]
    assert params.bad_words_token_ids == [[9, 9]], "the caller's parameters are not changed"


def test_bad_words_may_have_16384_token_ids_in_all() -> None:
    assert len(build("a", bad_words_token_ids=[[7] * 4] * 4096).params.bad_words_token_ids) == 4096
    num_ids = sum(map(len, build("a", bad_words=["fox"]).params.bad_words_token_ids))
    with pytest.raises(InvalidRequestError, match="at most 16384 token ids in all sequences, got 16385") as caught:
        build("a", bad_words=["fox"], bad_words_token_ids=[[7] * (16385 - num_ids)])
    assert caught.value.field == "bad_words"


def test_a_bad_word_that_is_repeated_counts_once() -> None:
    tokenizer = make_tokenizer("byte_level")
    assert tokenize_bad_words(tokenizer, ["fox"] * 4096) == [tokenizer.encode("fox"), tokenizer.encode(" fox")]


def test_token_sequence_of_a_bad_word_that_ends_with_a_shorter_one_is_omitted() -> None:
    tokenizer = make_tokenizer("byte_level")
    assert tokenizer.encode(" 龍")[-3:] == tokenizer.encode("龍")
    assert tokenize_bad_words(tokenizer, ["龍"]) == [tokenizer.encode("龍")]


def test_a_prompt_that_is_too_long_is_told_the_flag_and_the_models_context() -> None:
    limits, tokenizer = RequestLimits(16, 401, model_context=4096), make_tokenizer("byte_level")
    for prompt, got in (([5] * 16, "minus one output token), got 16"), ("a" * 833, "), got 833")):
        with pytest.raises(ContextLengthError) as caught:
            build_request(tokenizer, limits, "r", prompt, SamplingParams())
        assert str(caught.value).startswith("prompt: expected 1 to 15 tokens")
        assert "--max-model-len 16 of the model's 4096" in str(caught.value)
        assert str(caught.value).endswith(got)


def test_text_that_is_far_too_long_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("byte_level")
    longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
    assert tokenizer.max_token_length == longest
    with pytest.raises(ContextLengthError, match="expected 1 to 15 tokens"):
        build("a" * (4 * 16 * longest))
    monkeypatch.setattr(tokenizer, "encode", None)  # must not be called
    with pytest.raises(ContextLengthError, match=r"at most 832 characters \(--max-model-len 16\), got 833") as caught:
        build("a" * 833)
    assert caught.value.field == "prompt" and longest == 13
