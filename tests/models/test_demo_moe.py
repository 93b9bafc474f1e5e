# SPDX-License-Identifier: Apache-2.0
"""The demonstration model with experts: what it is for is that every part of its routers matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.layers.experts import SparseMLP
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from tests.exactness.requests import HEADS
from tests.models.model_driver import Driver, log_softmax

FOLDER = Path(resolve_model_path("demo/moe"))
NUM_TOKENS = 512


@pytest.fixture
def model() -> CausalLM:
    config = ModelConfig.from_pretrained(FOLDER, dtype="float32")
    return load_model(config, max_rows=NUM_TOKENS, max_model_len=NUM_TOKENS)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """Python source."""
    return Tokenizer.from_pretrained(str(FOLDER)).encode("\n".join(HEADS) + Path(np.__file__).read_text())[:NUM_TOKENS]


def sparse_mlps(model: CausalLM) -> list[SparseMLP]:
    return [layer.mlp for layer in model._layers if isinstance(layer.mlp, SparseMLP)]


def logprobs_of(model: CausalLM, tokens: list[int]) -> NDArray[np.float64]:
    """Return the log-probabilities [num_tokens, vocab_size] after each token."""
    return log_softmax(Driver(model).run_alone(tokens))


def test_every_expert_of_every_layer_is_used(model: CausalLM, tokens: list[int]) -> None:
    logprobs_of(model, tokens)
    assert [mlp.router.load.tolist()[0] for mlp in sparse_mlps(model)] == [16] * 7


def test_every_correction_bias_is_trained(model: CausalLM) -> None:
    for mlp in sparse_mlps(model):
        bias = mlp.router.correction_bias
        assert bias is not None and float(bias.max() - bias.min()) > 0.01


def test_the_correction_biases_change_the_probabilities(model: CausalLM, tokens: list[int]) -> None:
    trained = logprobs_of(model, tokens)
    for mlp in sparse_mlps(model):
        bias = mlp.router.correction_bias
        assert bias is not None
        mlp.router = replace(mlp.router, correction_bias=paddle.zeros_like(bias))
    differences = np.abs(logprobs_of(model, tokens) - trained).max(axis=1)
    assert np.quantile(differences, 0.5) > 0.1, "at half of the tokens"


def test_the_files_are_small_enough_for_a_package() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 24e6
