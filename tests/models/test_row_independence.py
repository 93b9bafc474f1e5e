# SPDX-License-Identifier: Apache-2.0
"""The logits of a row are bit-identical for any other rows in the step and any chunks of the request."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from fastdeploy.config.model_config import DType, ModelConfig
from fastdeploy.models.loader import load_model
from tests.models.model_driver import GOLDEN, GOLDEN_NAMES, Driver, Logits, load_golden

NUM_TOKENS = 60
NAMES = ["ernie4_5", "llama_untied_bias", "qwen2", "qwen3", "ernie4_5_moe", "glm4_moe", "qwen3_moe"]
NAMES += ["latent/deepseek_v2", "latent/deepseek_v3", "latent/glm4_moe_lite"]


def tokens_of(seed: int, count: int = NUM_TOKENS) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 112, count)]


def assert_same_bits(found: Logits, expected: Logits) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", get_args(DType))
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_chunked_prefill_equals_prefill_at_once(name: str, dtype: DType) -> None:
    driver = Driver(load_golden(name, dtype))
    tokens = tokens_of(1)
    whole = driver.run_alone(tokens)
    for chunks in ([1] * 60, [7] * 8 + [4], [16, 16, 16, 12], [17, 31, 12], [59, 1], [33, 1, 1, 25]):
        assert_same_bits(driver.run_alone(tokens, chunks), whole)


@pytest.mark.parametrize("dtype", get_args(DType))
def test_chunked_prefill_of_a_long_prompt_equals_prefill_at_once(dtype: DType) -> None:
    config = ModelConfig.from_pretrained(GOLDEN / "qwen3", dtype=dtype)
    config = replace(config, hidden_size=152, intermediate_size=312, num_heads=3, num_kv_heads=1, head_dim=64)
    config = replace(config, rope=replace(config.rope, rotary_dim=64))
    driver = Driver(load_model(config, max_rows=600, max_model_len=640, load_choices="dummy"))
    tokens = tokens_of(9, 560)
    whole = driver.run_alone(tokens)
    for chunks in ([504, 56], [255, 257, 48], [64] * 8 + [48], [7] * 80, [1, 559], [512, 17, 31]):
        assert_same_bits(driver.run_alone(tokens, chunks), whole)


@pytest.mark.parametrize("dtype", get_args(DType))
@pytest.mark.parametrize("name", NAMES)
def test_requests_in_a_mixed_batch_equal_requests_alone(name: str, dtype: DType) -> None:
    driver = Driver(load_golden(name, dtype))
    texts = [tokens_of(seed) for seed in range(8)]
    alone = [driver.run_alone(text) for text in texts]
    rng = np.random.default_rng(5)
    requests = [driver.start() for _ in texts]
    while any(request.num_computed < NUM_TOKENS for request in requests):
        work = []
        for request, text in zip(requests, texts, strict=True):
            begin, size = request.num_computed, int(rng.choice([0, 1, 1, 4, 6, 17, 30]))
            if size and begin < NUM_TOKENS:
                work.append((request, text[begin : begin + size]))
        if work:
            driver.step([work[index] for index in rng.permutation(len(work))])
    for request, expected in zip(requests, alone, strict=True):
        assert_same_bits(request.all_logits, expected)


@pytest.mark.parametrize("dtype", get_args(DType))
@pytest.mark.parametrize("name", NAMES)
def test_rows_of_drafts_equal_rows_of_single_steps(name: str, dtype: DType) -> None:
    driver = Driver(load_golden(name, dtype))
    tokens = tokens_of(2)
    stepped = driver.run_alone(tokens, [30] + [1] * 30)
    for num_drafts in (1, 3, 5, 16):
        sizes, left = [30], 30
        while left:
            sizes.append(min(1 + num_drafts, left))
            left -= sizes[-1]
        assert_same_bits(driver.run_alone(tokens, sizes), stepped)


@pytest.mark.parametrize("dtype", get_args(DType))
def test_rejected_drafts_do_not_change_later_rows(dtype: DType) -> None:
    driver = Driver(load_golden("ernie4_5", dtype))
    tokens, wrong = tokens_of(3), tokens_of(4)
    expected = driver.run_alone(tokens)
    request = driver.start()
    driver.step([(request, tokens[:20])])
    for begin in range(20, NUM_TOKENS):
        rejected = wrong[: min(5, 64 - begin - 1)]
        driver.step([(request, [tokens[begin], *rejected])])
        request.num_computed -= len(rejected)
        request.logits[-1] = request.logits[-1][:1]
    assert_same_bits(request.all_logits, expected)


def test_rows_beyond_num_rows_are_not_written() -> None:
    driver = Driver(load_golden("qwen3"))
    driver.logits.fill_(7.0)
    driver.run_alone(tokens_of(6, 3))
    logits = driver.logits.numpy()
    assert (logits[3:] == 7.0).all() and (logits[:3] != 7.0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_equals_its_operators_called_separately(name: str) -> None:
    model, tokens = load_golden(name), tokens_of(7)
    called, captured = Driver(model, captures=False), Driver(model)
    assert_same_bits(captured.run_alone(tokens, [30] * 2), called.run_alone(tokens, [30] * 2))
    assert captured.forward._graph is not None and called.forward._graph is None


def test_a_model_may_alternate_between_several_caches() -> None:
    model, tokens = load_golden("qwen2"), tokens_of(8)
    first, second = Driver(model), Driver(model)
    expected = first.run_alone(tokens)
    requests = [(driver, driver.start()) for driver in (first, second)]
    for begin in range(0, NUM_TOKENS, 20):
        for driver, request in requests:
            driver.step([(request, tokens[begin : begin + 20])])
    for _, request in requests:
        assert_same_bits(request.all_logits, expected)
