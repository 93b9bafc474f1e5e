# SPDX-License-Identifier: Apache-2.0
"""From request fields and the folder's proposals to sampling parameters."""

from __future__ import annotations

import pytest

from fastdeploy.config.model_config import GenerationDefaults
from fastdeploy.core.errors import InvalidRequestError
from fastdeploy.entrypoints.openai.params import chat_params, completion_params
from fastdeploy.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

PROPOSED = GenerationDefaults(temperature=0.6, top_p=0.9, max_new_tokens=32)


def test_proposals_apply_where_the_request_is_silent() -> None:
    params = completion_params(CompletionRequest(prompt="x", top_p=0.5), PROPOSED, 20)
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 32)


def test_do_sample_false_proposes_greedy_decoding() -> None:
    params = completion_params(CompletionRequest(prompt="x"), GenerationDefaults(do_sample=False, temperature=0.6), 20)
    assert params.is_greedy


def test_proposed_max_tokens_gives_way_to_the_request() -> None:
    assert completion_params(CompletionRequest(prompt="x", min_tokens=40), PROPOSED, 20).max_tokens is None
    assert completion_params(CompletionRequest(prompt="x", max_tokens=50), PROPOSED, 20).max_tokens == 50
    assert chat_params(ChatCompletionRequest(messages=[], max_completion_tokens=60), PROPOSED, 20).max_tokens == 60


def test_fastdeploy_s_spelling_of_biases_joins_openai_s() -> None:
    args = {"logit_bias": {"7": -2, "5": 1}}
    asked = CompletionRequest(prompt="x", logit_bias={"5": 1, "6": 3}, logits_processors_args=args)
    assert completion_params(asked, GenerationDefaults(), 20).logit_bias == {5: 1, 6: 3, 7: -2}
    asked.logit_bias = {"7": 2}
    with pytest.raises(InvalidRequestError, match="another value for token id 7"):
        completion_params(asked, GenerationDefaults(), 20)


def test_thinking_budget_is_the_reasoning_s_limit() -> None:
    asked = ChatCompletionRequest(messages=[], logits_processors_args={"thinking_budget": 9})
    assert chat_params(asked, GenerationDefaults(), 20).reasoning_max_tokens == 9
    asked.reasoning_max_tokens = 9
    assert chat_params(asked, GenerationDefaults(), 20).reasoning_max_tokens == 9


@pytest.mark.parametrize(("given", "expected"), [(None, None), (False, None), (True, 1), (0, 0), (5, 5)])
def test_logprobs_of_completions_may_be_a_boolean(given: int | bool | None, expected: int | None) -> None:
    assert (
        completion_params(CompletionRequest(prompt="x", logprobs=given), GenerationDefaults(), 20).logprobs == expected
    )


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    asked = CompletionRequest(prompt="x", echo=True, logprobs=2)
    assert completion_params(asked, GenerationDefaults(), 20).prompt_logprobs == 2
    asked.logprobs = False
    assert completion_params(asked, GenerationDefaults(), 20).prompt_logprobs is None
