# SPDX-License-Identifier: Apache-2.0
"""A layer of each form that is trained by its definition drafts in the engine what the definition drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import paddle
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from tests.exactness.requests import HEADS, run_all
from tests.models.mtp_training import DEMO, FORMS, DefinedLayer, engine_of, states_of, texts_of, train, write_checkpoint

NUM_TOKENS = 48  # generated after each prompt
Tensors = dict[str, paddle.Tensor]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(str(DEMO))
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)  # greedy texts are loops
    return [GenerationRequest(str(i), tokenizer.encode(head)[:20], params) for i, head in enumerate(HEADS)]


@pytest.fixture(scope="module")
def texts(requests: list[GenerationRequest]) -> list[list[int]]:
    return texts_of(requests)


@pytest.fixture(scope="module")
def states(texts: list[list[int]]) -> paddle.Tensor:
    return states_of(texts)


@pytest.fixture(scope="module", params=FORMS)
def trained(request: pytest.FixtureRequest, texts: list[list[int]], states: paddle.Tensor) -> DefinedLayer:
    config = ModelConfig.from_pretrained(str(DEMO), dtype="float32")
    layer = DefinedLayer(request.param, DEMO, config, seed=1)
    train([layer], paddle.to_tensor(texts, "int64"), states, num_steps=40)
    return layer


def accepted_with(
    folder: Path, layer: DefinedLayer, requests: list[GenerationRequest], change: Callable[[Tensors], None]
) -> list[float]:
    """Run the target with the layer after `change`; return the acceptance rate at each position."""
    own = {name: value.clone() for name, value in layer.weights.items()}
    change(own)
    write_checkpoint(folder, own)
    engine = engine_of(str(folder), "mtp")
    run_all(engine, requests)
    stats = engine.stats()
    return [a / b for a, b in zip(stats.accepted_per_position, stats.drafted_per_position)]


def unchanged(tensors: Tensors) -> None:
    pass


def state_first(tensors: Tensors) -> None:
    """Exchange the halves of the projection, as if the state came first."""
    name = next(name for name in tensors if "eh_proj" in name or "linear_proj" in name)
    embedding, state = tensors[name].chunk(2, axis=1)
    tensors[name] = paddle.concat([state, embedding], axis=1)


def test_a_trained_layer_has_the_acceptance_rate_of_its_definition(
    tmp_path: Path,
    trained: DefinedLayer,
    requests: list[GenerationRequest],
    texts: list[list[int]],
    states: paddle.Tensor,
) -> None:
    tokens = paddle.to_tensor(texts, "int64")
    first = trained.states(tokens[:, 1:-1], states[:, :-2])
    right = (trained.logits(first).argmax(-1) == tokens[:, 2:]).astype("float32")
    begin = len(requests[0].prompt_token_ids)
    defined = float(right[:, begin:].mean())
    accepted = accepted_with(tmp_path / "model", trained, requests, unchanged)
    assert accepted[0] == pytest.approx(defined, abs=0.08)
    assert min(accepted) > 0.9


def test_the_other_order_of_the_projection_has_a_low_acceptance_rate(
    tmp_path: Path, trained: DefinedLayer, requests: list[GenerationRequest]
) -> None:
    assert accepted_with(tmp_path / "model", trained, requests, state_first)[0] < 0.6
