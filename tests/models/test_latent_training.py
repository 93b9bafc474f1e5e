# SPDX-License-Identifier: Apache-2.0
"""A latent layer for multi-token prediction that can be trained has the values of its definition, and is accepted."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from safetensors.paddle import load_file

from tests.models.latent_definition import LatentDefinition, load_definition
from tests.models.latent_training import LatentLayer
from tests.models.mtp_training import replayed_counts, train
from tests.models.test_latent_definition import LATENT, NAMES, NUM_DRAFTS, PROMPT_LEN, counts_of, reference


def with_trained(name: str, layer: LatentLayer) -> LatentDefinition:
    model = load_definition(LATENT / name)
    model.weights |= {key: weight.numpy().astype(np.float64) for key, weight in layer.weights.items()}
    return model


def untrained(name: str) -> LatentLayer:
    files = [load_file(file) for file in sorted((LATENT / name).glob("*.safetensors"))]
    target = {key: tensor.astype("float32") for tensors in files for key, tensor in tensors.items()}
    return LatentLayer(load_definition(LATENT / name).form, 1, target)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_can_be_trained_has_the_values_of_the_definition(name: str) -> None:
    layer, tokens = untrained(name), reference(name)["tokens"].tolist()
    model = with_trained(name, layer)
    states = model.states(tokens)
    found = layer.states(paddle.to_tensor([tokens[1:]]), paddle.to_tensor(states[None, :-1].astype(np.float32)))
    expected = model.draft_states(tokens[1:], states[:-1])[0]
    np.testing.assert_allclose(found[0].numpy(), expected, rtol=0, atol=1e-4)
    logits = layer.logits(found)[0]
    logprobs = paddle.nn.functional.log_softmax(logits).numpy()
    np.testing.assert_allclose(logprobs, model.draft_logprobs(expected), rtol=0, atol=1e-4)


def test_drafts_of_a_layer_that_was_trained_here_are_accepted_and_rejected_as_the_definition_says() -> None:
    name = "deepseek_v3"
    layer, texts = untrained(name), reference(f"{name}_mtp")["texts"][:4].tolist()
    states = np.stack([load_definition(LATENT / name).states(text) for text in texts]).astype(np.float32)
    stored = paddle.to_tensor(states)
    train([layer], paddle.to_tensor(texts[:3], "int64"), stored[:3], num_steps=30)
    counts = replayed_counts(layer, texts, stored, PROMPT_LEN, NUM_DRAFTS)
    np.testing.assert_array_equal(counts, counts_of(with_trained(name, layer), texts))
    assert (counts[1] > 0).all() and (counts[1] < counts[0]).all()
