# SPDX-License-Identifier: Apache-2.0
"""From request fields and the defaults of generation_config.json to sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.params import ParamLimits, chat_params, completion_params
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

PROPOSED = GenerationDefaults(temperature=0.6, top_p=0.9, max_new_tokens=32)
LIMITS = ParamLimits(max_logprobs=20)


def test_defaults_apply_to_fields_that_are_not_given() -> None:
    params = completion_params(CompletionRequest(prompt="x", top_p=0.5), PROPOSED, LIMITS)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 32)


def test_do_sample_false_is_greedy_decoding() -> None:
    params = completion_params(
        CompletionRequest(prompt="x"), GenerationDefaults(do_sample=False, temperature=0.6), LIMITS
    )
    assert params.is_greedy


def test_default_max_tokens_does_not_limit_min_tokens_of_the_request() -> None:
    assert completion_params(CompletionRequest(prompt="x", min_tokens=40), PROPOSED, LIMITS).max_tokens is None
    assert completion_params(CompletionRequest(prompt="x", max_tokens=50), PROPOSED, LIMITS).max_tokens == 50
    assert chat_params(ChatCompletionRequest(messages=[], max_completion_tokens=60), PROPOSED, LIMITS).max_tokens == 60


def test_biases_of_fastdeploy_s_and_openai_s_fields_are_merged() -> None:
    args = {"logit_bias": {"7": -2, "5": 1}}
    body = CompletionRequest(prompt="x", logit_bias={"5": 1, "6": 3}, logits_processors_args=args)
    assert completion_params(body, GenerationDefaults(), LIMITS).logit_bias == {5: 1, 6: 3, 7: -2}
    body.logit_bias = {"7": 2}
    with pytest.raises(InvalidRequestError, match="another value for token id 7"):
        completion_params(body, GenerationDefaults(), LIMITS)


def test_thinking_budget_is_the_reasoning_s_limit() -> None:
    body = ChatCompletionRequest(messages=[], logits_processors_args={"thinking_budget": 9})
    assert chat_params(body, GenerationDefaults(), LIMITS).reasoning_max_tokens == 9
    body = ChatCompletionRequest(messages=[], logits_processors_args={"thinking_budget": 9.0})
    body.reasoning_max_tokens = 9
    assert chat_params(body, GenerationDefaults(), LIMITS).reasoning_max_tokens == 9


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_chat_has_output_unless_its_protocol_knows_requests_without(field: str, value: int) -> None:
    body = ChatCompletionRequest(messages=[], **{field: value})
    with pytest.raises(InvalidRequestError, match=rf"{field}: expected an integer in \[1, 2147483647\], got {value}"):
        chat_params(body, PROPOSED, LIMITS)
    if value == 0:
        assert chat_params(body, PROPOSED, LIMITS, accepts_prefill_only=True).max_tokens == 0


def test_a_completion_without_output_needs_a_reason_for_its_prompt() -> None:
    limited = ParamLimits(max_logprobs=20, max_output_tokens=10)
    for given in ({"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 2}):
        body = CompletionRequest(prompt="x", max_tokens=0, **given)
        assert completion_params(body, PROPOSED, limited).max_tokens == 0, given
    with pytest.raises(InvalidRequestError, match=r"max_tokens: .* or 0 with echo or prompt_logprobs; got 0"):
        completion_params(CompletionRequest(prompt="x", max_tokens=0, logprobs=1), PROPOSED, limited)
    with pytest.raises(InvalidRequestError, match="n: expected 1 with max_tokens 0, got 2"):
        completion_params(CompletionRequest(prompt="x", max_tokens=0, echo=True, n=2), PROPOSED, limited)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"thinking_token_budget": 9}, 9),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 9, "reasoning_max_tokens": 9}, 9),
        ({"thinking_token_budget": 9, "logits_processors_args": {"thinking_budget": 9}}, 9),
    ],
)
def test_thinking_token_budget_is_the_reasoning_s_limit(given: dict[str, Any], expected: int | None) -> None:
    body = ChatCompletionRequest(messages=[], **given)
    assert chat_params(body, GenerationDefaults(), LIMITS).reasoning_max_tokens == expected
    if "reasoning_max_tokens" not in given:
        completion = CompletionRequest(prompt="x", **given)
        assert completion_params(completion, GenerationDefaults(), LIMITS).reasoning_max_tokens == expected


@pytest.mark.parametrize(("given", "expected"), [(None, None), (False, None), (True, 1), (0, 0), (5, 5)])
def test_logprobs_of_completions_may_be_a_boolean(given: int | bool | None, expected: int | None) -> None:
    assert (
        completion_params(CompletionRequest(prompt="x", logprobs=given), GenerationDefaults(), LIMITS).logprobs
        == expected
    )


def test_echo_with_logprobs_requests_prompt_logprobs() -> None:
    body = CompletionRequest(prompt="x", echo=True, logprobs=2)
    assert completion_params(body, GenerationDefaults(), LIMITS).prompt_logprobs == 2
    body.logprobs = False
    assert completion_params(body, GenerationDefaults(), LIMITS).prompt_logprobs is None
