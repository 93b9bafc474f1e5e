# SPDX-License-Identifier: Apache-2.0
"""A value outside its range is refused with the name of its parameter."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", -0.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("seed", 1 << 64),
        ("seed", 1.5),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1025),
        ("stop_token_ids", [-1]),
        ("bad_words_token_ids", [[]]),
        ("bad_words_token_ids", [[1]] * 16385),
        ("bad_words_token_ids", [[1] * 16385]),
        ("logit_bias", {3: 101.0}),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", [5] * 129),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [3, -1]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", [2**31]),
        ("allowed_token_ids", [5] * 262145),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
    ],
)
def test_value_outside_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_a_request_without_output_has_one_choice_and_no_min_tokens() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0
    with pytest.raises(InvalidRequestError, match="n: expected 1 with max_tokens 0, got 2"):
        SamplingParams(max_tokens=0, n=2)
    with pytest.raises(InvalidRequestError, match="logprob_token_ids: needs output tokens, but max_tokens is 0"):
        SamplingParams(max_tokens=0, logprob_token_ids=[3])
    with pytest.raises(InvalidRequestError, match="min_tokens: 1 is above max_tokens 0"):
        SamplingParams(max_tokens=0, min_tokens=1)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="above max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


def test_ids_with_log_probabilities_ask_for_log_probabilities() -> None:
    assert SamplingParams(logprob_token_ids=[3]).logprobs == 0
    assert SamplingParams(logprob_token_ids=[3], logprobs=2).logprobs == 2
    assert SamplingParams(logprob_token_ids=[]).logprobs is None


def test_sixteen_stop_strings_of_1024_characters_are_accepted() -> None:
    assert SamplingParams(stop=["a" * 1024] * 16).stop == ["a" * 1024] * 16


def test_shorthands_are_converted() -> None:
    params = SamplingParams(stop="x", top_k=None, seed=-1, speculative={"method": "off"})  # type: ignore[arg-type]
    assert (params.stop, params.top_k, params.seed) == (["x"], 0, (1 << 64) - 1)
    assert params.speculative == SpeculativeParams("off")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temprature", "temprature: unknown argument of SamplingParams; did you mean 'temperature'?"),
        ("max_token", "max_token: unknown argument of SamplingParams; did you mean 'max_tokens'?"),
        ("zzz", "zzz: unknown argument of SamplingParams"),
        ("thinking_token_budget", "thinking_token_budget: use reasoning_max_tokens"),
        ("output_kind", "output_kind: use the argument `stream` of generate or chat"),
        (
            "flat_logprobs",
            "flat_logprobs: leave it out; each position of the log-probabilities is a mapping by token id",
        ),
        (
            "prompt_logprob_token_ids",
            "prompt_logprob_token_ids: use prompt_logprobs; -1 reports every token id at each position of the prompt "
            "(LLM(max_logprobs=-1))",
        ),
    ],
)
def test_unknown_argument_is_refused_with_the_nearest_one_or_what_to_use_instead(name: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{"n": 1, name: 1})
    assert str(caught.value) == message


def test_arguments_of_vllm_that_request_nothing_are_accepted() -> None:
    params = SamplingParams(  # type: ignore[call-arg]
        n=2, spaces_between_special_tokens=True, extra_args=None, logits_processors=[], use_beam_search=False
    )
    assert params == SamplingParams(n=2)


def test_other_wrong_calls_stay_type_errors() -> None:
    with pytest.raises(TypeError, match="multiple values for argument 'n'"):
        SamplingParams(1, n=2)  # type: ignore[misc]


def test_whole_numbers_of_any_type_are_integers_and_fractions_are_refused() -> None:
    given = SamplingParams(n=2.0, top_k=np.int64(3), stop_token_ids=[5.0, np.int32(6)], bad_words_token_ids=[[7.0]])
    assert given == SamplingParams(n=2, top_k=3, stop_token_ids=[5, 6], bad_words_token_ids=[[7]])
    assert {type(value) for value in (given.n, given.top_k, *given.stop_token_ids)} == {int}
    for bad in (2.5, np.float64(2.5), True, np.bool_(True), float("nan"), float("inf"), "2"):
        with pytest.raises(InvalidRequestError, match="top_k: expected an integer"):
            SamplingParams(top_k=bad)


def test_real_numbers_of_any_type_are_floats() -> None:
    for half in (np.float32(0.5), np.float16(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2)):
        given = SamplingParams(temperature=half, logit_bias={np.int64(5): half})
        assert given == SamplingParams(temperature=0.5, logit_bias={5: 0.5})
        assert {type(given.temperature), *map(type, given.logit_bias.values())} == {float}
    for bad in (True, np.bool_(True), "1", 1j, None.__class__, np.array([0.5]), Fraction(10**400), Decimal("nan")):
        with pytest.raises(InvalidRequestError, match=r"temperature: expected a number in \[0, 2e\+09\], got "):
            SamplingParams(temperature=bad)


def test_lists_may_be_arrays_and_other_iterables_but_no_texts() -> None:
    expected = SamplingParams(
        stop=["a"],
        stop_token_ids=[5, 6],
        visible_token_ids=[5, 6],
        allowed_token_ids=[5, 6],
        bad_words_token_ids=[[5, 6]],
    )
    for ids in (np.array([5, 6]), (5, 6), range(5, 7), np.array([5.0, 6.0])):
        given = SamplingParams(
            stop=("a",), stop_token_ids=ids, visible_token_ids=ids, allowed_token_ids=ids, bad_words_token_ids=(ids,)
        )
        assert given == expected
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids", "visible_token_ids"):
        for bad in ("ab", b"ab", 5, {5: 6}):
            with pytest.raises(InvalidRequestError, match=f"^{name}: expected a list, got "):
                SamplingParams(**{name: bad})
    for bad in ([5], [None], ["ab"]):
        with pytest.raises(InvalidRequestError, match=r"^bad_words_token_ids: expected lists of token ids, got "):
            SamplingParams(bad_words_token_ids=bad)
    with pytest.raises(InvalidRequestError, match=r"^stop: expected a text or a list of texts, got 5"):
        SamplingParams(stop=5)
    with pytest.raises(
        InvalidRequestError, match=r"^logit_bias: expected a mapping of token ids to numbers, got an array"
    ):
        SamplingParams(logit_bias=[5])
