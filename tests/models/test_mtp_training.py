# SPDX-License-Identifier: Apache-2.0
"""A layer of each form that is trained by its definition drafts in the engine what the definition drafts."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from tests.exactness.requests import HEADS, run_all
from tests.models.mtp_training import (
    DEMO,
    FORMS,
    Counts,
    DefinedLayer,
    defined_drafts,
    engine_of,
    replayed_counts,
    states_of,
    texts_of,
    train,
    write_checkpoint,
)

NUM_DRAFTS = 3
NUM_PROMPT_TOKENS = 20
NUM_TOKENS = 60  # generated after each prompt
Tensors = dict[str, paddle.Tensor]
Trained = tuple[DefinedLayer, Counts]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    tokenizer = Tokenizer.from_pretrained(str(DEMO))
    common = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        GenerationRequest(
            f"{i} {penalty}", tokenizer.encode(head)[:NUM_PROMPT_TOKENS], replace(common, repetition_penalty=penalty)
        )
        for penalty in (1.15, 1.3)
        for i, head in enumerate(HEADS)
    ]


@pytest.fixture(scope="module")
def texts(requests: list[GenerationRequest]) -> list[list[int]]:
    return texts_of(requests)


@pytest.fixture(scope="module")
def states(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, paddle.Tensor]:
    folder = tmp_path_factory.mktemp("target") / "model"
    write_checkpoint(folder, {})
    return {name: states_of(folder, texts, name) for name in ("normed", "raw")}


@pytest.fixture(scope="module", params=FORMS)
def trained(request: pytest.FixtureRequest, texts: list[list[int]], states: dict[str, paddle.Tensor]) -> Trained:
    """Return a layer that was trained on some of the texts, and its counts on all of them."""
    config = ModelConfig.from_pretrained(str(DEMO), dtype="float32")
    layer = DefinedLayer(request.param, config, seed=1)
    train([layer], paddle.to_tensor(texts[:5], "int64"), states[layer.hidden_state][:5], num_steps=20)
    return layer, replayed_counts(layer, texts, states[layer.hidden_state], NUM_PROMPT_TOKENS, NUM_DRAFTS)


def write_layer(folder: Path, layer: DefinedLayer, change: Callable[[Tensors], None] | None = None) -> str:
    """Write the demonstration model with the layer after `change`."""
    own = {name: value.clone() for name, value in layer.weights.items()}
    if change is not None:
        change(own)
    write_checkpoint(folder, own)
    return str(folder)


def counts_of(engine: Engine, requests: list[GenerationRequest]) -> Counts:
    """Return the counts that the requests add to those of the engine."""
    before = counts_so_far(engine)
    run_all(engine, requests)
    return counts_so_far(engine) - before


def counts_so_far(engine: Engine) -> Counts:
    stats = engine.stats()
    pair = stats.drafted_per_position, stats.accepted_per_position
    return np.array([[*counts, *[0] * NUM_DRAFTS][:NUM_DRAFTS] for counts in pair], np.int64)


def rates(counts: Counts) -> list[float]:
    return list(counts[1] / counts[0])


@pytest.mark.parametrize(("chunk", "num_blocks"), [(7, None), (7, 28)], ids=str)
def test_acceptance_is_that_of_the_definition_after_chunks_prefix_hits_and_preemption(
    tmp_path: Path,
    trained: Trained,
    requests: list[GenerationRequest],
    chunk: int,
    num_blocks: int | None,
) -> None:
    layer, defined = trained
    folder = write_layer(tmp_path / "model", layer)
    engine = engine_of(folder, layer.form, NUM_DRAFTS, chunk=chunk, num_blocks=num_blocks)
    for _ in range(2):  # the second time with prefix hits
        counts = counts_of(engine, requests)
        if num_blocks is None:
            np.testing.assert_array_equal(counts, defined)
        assert rates(counts) == pytest.approx(rates(defined), abs=0.01)
    stats = engine.stats()
    assert stats.num_prefix_hit_tokens > 0 and (stats.num_preemptions > 0) == (num_blocks is not None)
    assert all(0.2 < rate < 0.8 for rate in rates(defined))


def test_another_state_leads_to_other_drafts_after_the_first(
    trained: Trained, texts: list[list[int]], states: dict[str, paddle.Tensor]
) -> None:
    layer, other = trained[0], copy(trained[0])
    other.hidden_state = "raw" if layer.hidden_state == "normed" else "normed"
    num_different = np.zeros(NUM_DRAFTS, np.int64)
    ends = range(NUM_PROMPT_TOKENS + 1, len(texts[0]), 7)
    for text, of_text in zip(texts, states[layer.hidden_state]):
        for end in ends:
            pair = [defined_drafts([one], text[:end], of_text[: end - 1]) for one in (layer, other)]
            num_different += [a != b for a, b in islice(zip(*pair), NUM_DRAFTS)]
    assert num_different[0] == 0 and num_different[1:].sum() > 4


def state_first(tensors: Tensors) -> None:
    """Exchange the halves of the projection, as if the state came first."""
    name = next(name for name in tensors if "eh_proj" in name or "linear_proj" in name)
    embedding, state = tensors[name].chunk(2, axis=1)
    tensors[name] = paddle.concat([state, embedding], axis=1)


def test_the_other_order_of_the_projection_has_a_low_acceptance_rate(
    tmp_path: Path, trained: Trained, requests: list[GenerationRequest]
) -> None:
    layer, defined = trained
    engine = engine_of(write_layer(tmp_path / "model", layer, state_first), layer.form, NUM_DRAFTS)
    assert rates(counts_of(engine, requests))[0] < 0.5 * rates(defined)[0]
