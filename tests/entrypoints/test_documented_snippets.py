# SPDX-License-Identifier: Apache-2.0
"""Snippets that users know from other engines' documents run with only the import line and the model's name changed."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy import LLM, SamplingParams

NGRAM_SPELLINGS: list[dict[str, Any]] = [
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}},
    {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4},
]


@pytest.mark.parametrize("spelling", NGRAM_SPELLINGS)
def test_ngram_snippet(spelling: dict[str, Any]) -> None:
    prompts = [
        "The future of AI is",
    ]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)

    llm = LLM(
        model="demo",
        tensor_parallel_size=1,
        **spelling,
    )
    outputs = llm.generate(prompts, sampling_params)

    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        assert prompt == prompts[0]
        assert len(generated_text) > 0
    speculation = llm.engine.describe()["speculation"]
    assert (speculation["method"], speculation["num_speculative_tokens"]) == ("ngram", 5)
