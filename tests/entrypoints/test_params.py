# SPDX-License-Identifier: Apache-2.0
"""From request fields and the folder's proposals to sampling parameters."""

from __future__ import annotations

from fastdeploy.config.model_config import GenerationDefaults
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
