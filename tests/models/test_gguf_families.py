# SPDX-License-Identifier: Apache-2.0
"""Models in GGUF files of every family and type compute what transformers does with the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.config.speculative_config import NaiveConfig
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.models.loader import load_model
from tests.exactness.requests import run_all
from tests.gguf.gguf_files import WITH_REFERENCE, gguf_path, reference
from tests.models.model_driver import MAX_MODEL_LEN, MAX_ROWS, Driver, Logits, log_softmax
from tests.models.test_mtp_experts import GLM, GLM_LAYER, engine_of, logprobs_of, mtp, requests_of

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def logits_of(name: str, tokens: np.ndarray) -> Logits:
    """Return the logits of every row, computed in float32."""
    config = ModelConfig.from_pretrained(gguf_folder(gguf_path(name)), dtype="float32")
    return Driver(load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN)).run_alone(tokens)


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_logprobs_are_those_of_transformers_with_the_dequantized_weights(name: str) -> None:
    expected = reference(name)
    found = log_softmax(logits_of(name, expected["tokens"]))[expected["rows"]]
    assert np.abs(found - expected["logprobs"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_kept_rounded_and_converted_weights_compute_nearly_the_same_in_bfloat16(name: str) -> None:
    expected = reference(name)
    config = ModelConfig.from_pretrained(gguf_folder(gguf_path(name)), dtype="bfloat16")
    formats = config.weight_formats(UNQUANTIZED)
    assert formats.is_none == (name == "llama_f32")
    model = load_model(config, max_rows=MAX_ROWS, max_model_len=MAX_MODEL_LEN, quantization=formats)
    found = log_softmax(Driver(model).run_alone(expected["tokens"]))[expected["rows"]]
    differences = np.abs(found - expected["logprobs"])
    assert differences.max() <= 0.15 and differences.mean() <= 0.02


def test_a_file_without_loss_computes_what_its_checkpoint_does() -> None:
    with np.load(GLM / "reference.npz") as expected:
        found = log_softmax(logits_of("glm4moe_mtp", expected["tokens"]))[expected["positions"]]
        assert np.abs(found - expected["logprobs_float32"]).max() <= TOLERANCE


def test_a_layer_for_multi_token_prediction_has_the_logprobs_of_transformers() -> None:
    first, later = logprobs_of(gguf_folder(gguf_path("glm4moe_mtp")), None)
    with np.load(GLM_LAYER / "reference.npz") as expected:
        np.testing.assert_allclose(first[expected["positions"]], expected["logprobs"], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(later, expected["chained_logprobs"], rtol=0, atol=TOLERANCE)


def test_drafts_of_a_file_are_accepted_and_change_no_text() -> None:
    folder, requests = gguf_folder(gguf_path("glm4moe_mtp")), requests_of(112)
    plain = run_all(engine_of(folder, NaiveConfig()), requests)
    engine = engine_of(folder, mtp())
    assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
