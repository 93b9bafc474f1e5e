# SPDX-License-Identifier: Apache-2.0
"""Logits and greedy tokens equal those that transformers, or PaddleNLP, computed for the same checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from fastdeploy.config.model_config import DType
from fastdeploy.models.registry import ARCHITECTURES
from tests.models.model_driver import GOLDEN, GOLDEN_NAMES, Driver, load_golden, log_softmax

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def reference(name: str) -> dict[str, np.ndarray]:
    """Return the golden's values; those of PaddleNLP are float32 for every dtype, as it has no bfloat16 on the CPU."""
    with np.load(GOLDEN / name / "reference.npz") as values:
        found = dict(values)
    for key in ("logprobs", "argmax", "margin"):
        found.setdefault(f"{key}_bfloat16", found[f"{key}_float32"])
    return found


def test_goldens_cover_every_architecture_and_rope_type() -> None:
    configs = [load_golden(name).config for name in GOLDEN_NAMES]
    assert {config.architecture for config in configs} == set(ARCHITECTURES)
    assert {config.rope.kind for config in configs} == {"default", "linear", "dynamic", "llama3", "yarn"}


@pytest.mark.parametrize("dtype", get_args(DType))
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_logprobs_are_those_of_the_reference(name: str, dtype: DType) -> None:
    expected = reference(name)
    logits = Driver(load_golden(name, dtype)).run_alone(expected["tokens"])
    found = log_softmax(logits)[expected["positions"]]
    assert np.abs(found - expected[f"logprobs_{dtype}"]).max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", get_args(DType))
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_best_token_of_every_row_is_that_of_the_reference(name: str, dtype: DType) -> None:
    expected = reference(name)
    logits = Driver(load_golden(name, dtype)).run_alone(expected["tokens"])
    decided = expected[f"margin_{dtype}"] > TOLERANCE[dtype]
    assert decided.sum() > 20
    np.testing.assert_array_equal(logits.argmax(-1)[decided], expected[f"argmax_{dtype}"][decided])


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_greedy_decoding_continues_as_the_reference_does(name: str) -> None:
    expected = reference(name)
    prompt_len = int(expected["prompt_len"])
    tokens = [int(token) for token in expected["tokens"][:prompt_len]]
    driver = Driver(load_golden(name))
    request = driver.start()
    driver.step([(request, tokens)])
    while len(tokens) < len(expected["tokens"]):
        tokens.append(int(request.logits[-1][-1].argmax()))
        driver.step([(request, tokens[-1:])])
    assert tokens == expected["tokens"].tolist()


@pytest.mark.parametrize("name", [name for name in GOLDEN_NAMES if "rope" in name or "partial" in name])
def test_a_golden_fails_with_the_default_rotary_setting(name: str) -> None:
    expected = reference(name)
    rope = load_golden(name).config.rope
    plain = replace(rope, kind="default", attention_factor=1.0, rotary_dim=load_golden(name).config.head_dim)
    logits = Driver(load_golden(name, rope=plain)).run_alone(expected["tokens"])
    found = log_softmax(logits)[expected["positions"]]
    assert np.abs(found - expected["logprobs_float32"]).max() > 100 * TOLERANCE["float32"]
