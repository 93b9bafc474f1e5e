# SPDX-License-Identifier: Apache-2.0
"""Models with latent attention: the values of transformers, what they depend on, and drafts of their MTP layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.model_config import DType, ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.models.mtp import load_mtp_layers
from tests.exactness.requests import run_all
from tests.models.latent_definition import LatentDefinition, load_definition
from tests.models.latent_forms import FORMS, ROWS, write_form
from tests.models.latent_forms import TOKENS as FORM_TOKENS
from tests.models.latent_training import LatentLayer
from tests.models.model_driver import GOLDEN, Driver, Logits, load_golden, log_softmax
from tests.models.mtp_training import replay, replayed_counts, train
from tests.models.test_latent_definition import LATENT, NAMES, NUM_DRAFTS, PROMPT_LEN, WITH_LAYER, layer_logprobs
from tests.models.test_mtp_experts import Chain, Tensors, engine_of, load_target, mtp, with_layer
from tests.models.test_parity import TOLERANCE, reference

TEXT_LEN = 60
WEIGHT_FORMATS = ("wint8", "wint4", "w8a8", "w4a8")


def golden(name: str) -> str:
    return f"latent/{name}"


def logprobs_of(name: str, dtype: DType = "float32", quantization: str = "none", **changes: object) -> Logits:
    model, expected = load_golden(golden(name), dtype, quantization, **changes), reference(golden(name))
    return log_softmax(Driver(model).run_alone(expected["tokens"]))


@pytest.mark.parametrize("form", FORMS)
def test_logprobs_of_other_forms_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    model = load_target(write_form(tmp_path / "model", form))
    found = log_softmax(Driver(model).run_alone(FORM_TOKENS))[list(ROWS)]
    np.testing.assert_allclose(found, np.load(GOLDEN / "latent_forms.npz")[form], rtol=0, atol=TOLERANCE["float32"])


def latent(name: str, **values: Any) -> dict[str, Any]:
    config = ModelConfig.from_pretrained(GOLDEN / golden(name)).latent
    assert config is not None
    return {"latent": replace(config, **values)}


def plain_scale(name: str) -> dict[str, Any]:
    config = latent(name)["latent"]
    return latent(name, scale=(config.nope_dim + config.rope_dim) ** -0.5)


def other_pairs(name: str) -> dict[str, Any]:
    return latent(name, is_interleaved=not latent(name)["latent"].is_interleaved)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [plain_scale, other_pairs, lambda name: latent(name, norm_eps=1e-5)])
def test_the_models_take_the_scale_the_pairs_and_the_epsilon_of_their_configuration(
    name: str, change: Callable[[str], dict[str, Any]]
) -> None:
    """A wrong value in the configuration shows, so that test_latent_config.py need not run models."""
    if change is plain_scale and "yarn" not in (LATENT / name / "config.json").read_text():
        return  # the scale has no other factor
    expected = reference(golden(name))
    found = logprobs_of(name, **change(name))[expected["positions"]]
    assert np.abs(found - expected["logprobs_float32"]).max() > 10 * TOLERANCE["float32"]


@pytest.mark.parametrize("quantization", WEIGHT_FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_are_close_to_the_reference(name: str, quantization: str) -> None:
    expected = reference(golden(name))
    found = logprobs_of(name, "bfloat16", quantization)[expected["positions"]]
    error = np.abs(found - expected["logprobs_float32"]).mean()
    assert error < {"wint8": 0.05, "w8a8": 0.1}.get(quantization, 0.4)


def layer_reference(name: str) -> dict[str, np.ndarray]:
    with np.load(LATENT / f"{name}_mtp" / "reference.npz") as values:
        return dict(values)


def layer_tensors(name: str) -> Tensors:
    return load_file(LATENT / f"{name}_mtp" / "model.safetensors")


def engine_logprobs(folder: Path, layer_folder: Path | None, name: str) -> tuple[Logits, Logits]:
    """Return log-probabilities of the first draft after each position of the golden text, and of all drafts at its
    end."""
    expected = layer_reference(name)
    tokens, drafts = expected["tokens"].tolist(), expected["drafts"].tolist()
    target = load_target(folder)
    states = paddle.to_tensor(load_definition(LATENT / name).states(tokens).astype(np.float32))
    path = None if layer_folder is None else str(layer_folder)
    chain = Chain(load_mtp_layers(target, path, "default_v1", UNQUANTIZED)[0], target.config)
    logprobs, outputs = chain(tokens, paddle.concat([paddle.zeros_like(states[:1]), states[:-1]]))
    chained = [logprobs[-1]]
    for token in drafts[:-1]:
        later, outputs = chain([token], outputs[-1:])
        chained.append(later[0])
    return logprobs[1:], np.stack(chained)


@pytest.mark.parametrize("name", WITH_LAYER)
def test_a_latent_layer_has_the_logprobs_of_transformers_in_a_folder_and_in_the_models_files(
    tmp_path: Path, name: str
) -> None:
    expected = layer_reference(name)
    first, chained = engine_logprobs(LATENT / name, LATENT / f"{name}_mtp", name)
    np.testing.assert_allclose(first[expected["positions"]], expected["logprobs"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(chained[1:], expected["chained_logprobs"], rtol=0, atol=1e-4)
    assert chained.argmax(-1).tolist() == expected["drafts"].tolist()
    both = with_layer(tmp_path / "model", LATENT / name, layer_tensors(name))
    for found, same in zip(engine_logprobs(both, None, name), (first, chained), strict=True):
        np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("name", WITH_LAYER)
@pytest.mark.parametrize("chunk", [256, 7])
def test_a_latent_layer_has_the_acceptance_of_transformers(name: str, chunk: int) -> None:
    expected = layer_reference(name)
    texts, drafts = expected["texts"].tolist(), expected["drafts_of_texts"]
    counts = replay(texts, PROMPT_LEN, NUM_DRAFTS, lambda index, end: drafts[index, end - PROMPT_LEN - 1])
    check_acceptance(LATENT / name, LATENT / f"{name}_mtp", texts, counts, chunk)


def check_acceptance(model: Path, layer: Path, texts: list[list[int]], counts: np.ndarray, chunk: int) -> None:
    """Raise AssertionError unless an engine writes the texts, and drafts and accepts as often at each position."""
    params = SamplingParams(temperature=0.0, max_tokens=TEXT_LEN - PROMPT_LEN, ignore_eos=True)
    requests = [GenerationRequest(str(i), text[:PROMPT_LEN], params) for i, text in enumerate(texts)]
    engine = engine_of(model, mtp(layer=layer), chunk)
    found = run_all(engine, requests)
    assert [[*text[:PROMPT_LEN], *found[str(i), 0].token_ids] for i, text in enumerate(texts)] == texts
    stats = engine.stats()
    np.testing.assert_array_equal([stats.drafted_per_position, stats.accepted_per_position], counts)
    assert counts[1].min() > 0


def test_a_layer_that_was_trained_here_has_the_acceptance_of_its_definition(tmp_path: Path) -> None:
    name = "deepseek_v3"
    texts, definition = layer_reference(name)["texts"].tolist(), load_definition(LATENT / name)
    target = {key: tensor.astype("float32") for key, tensor in load_file(LATENT / name / "model.safetensors").items()}
    layer = LatentLayer(definition.form, 1, target)
    states = paddle.to_tensor(np.stack([definition.states(text) for text in texts]).astype(np.float32))
    train([layer], paddle.to_tensor(texts[:4], "int64"), states[:4], num_steps=30)
    save_file(layer.weights, tmp_path / "model.safetensors", {"format": "pt"})
    counts = replayed_counts(layer, texts, states, PROMPT_LEN, NUM_DRAFTS)
    check_acceptance(LATENT / name, tmp_path, texts, counts, 256)


@pytest.mark.parametrize("name", WITH_LAYER)
def test_the_definition_and_the_engine_agree_on_a_layer_whose_target_states_are_any(name: str) -> None:
    """States that no target computes: the layer alone is compared, at all positions."""
    model: LatentDefinition = load_definition(LATENT / name, LATENT / f"{name}_mtp")
    rng = np.random.default_rng(8)
    tokens, states = rng.integers(0, 112, 40).tolist(), rng.standard_normal((40, 32))
    target = load_target(LATENT / name)
    (layer,) = load_mtp_layers(target, str(LATENT / f"{name}_mtp"), "default_v1", UNQUANTIZED)
    rows = np.concatenate([np.zeros((1, 32)), states[:-1]]).astype(np.float32)
    found = Chain(layer, target.config)(tokens, paddle.to_tensor(rows))[0][1:]
    np.testing.assert_allclose(found, layer_logprobs(model, tokens, states)[0], rtol=0, atol=1e-4)
