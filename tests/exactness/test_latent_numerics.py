# SPDX-License-Identifier: Apache-2.0
"""A latent row that overflows ends its own request with an error; requests beside it keep their texts.

The models have a token after which a value of the first layer's latent row, or of its rotated part, is infinite: this
token's embedding alone has a value in one column, and the same column of a projection is near the largest number.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import Tensor
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.speculative_config import MTPConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from tests.doubles import OracleProposer
from tests.exactness.engines import WAYS, Texts, build, config, configured
from tests.exactness.golden_models import VARIANTS, with_model
from tests.exactness.requests import run_all
from tests.exactness.test_latent import with_layer
from tests.models.model_driver import GOLDEN

NAME = "deepseek_v3"
DOWN = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
OVERFLOWING, COLUMN, LARGE = 5, 9, 3e38  # a token, the column of its embedding, and the value that it meets there
ROWS = {"latent": 7, "rotated": 32 + 3}  # of the projection
NUM_TOKENS = 24
LENGTHS = {"inside the prompt": 0, "first of the prompt": 0, "last of the prompt": 0, "first output": 1}
"""Requests that meet the token, and how many tokens they emit."""


def spoil(tensors: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """Return the tensors of a model in which a value of the token's rows is infinite."""
    values = {name: tensor.astype("float32").numpy() for name, tensor in tensors.items()}
    embedding = values["model.embed_tokens.weight"]
    embedding[:, COLUMN] = np.arange(len(embedding)) == OVERFLOWING
    values[DOWN][:, COLUMN] = 0.0
    values[DOWN][row, COLUMN] = LARGE
    return {name: paddle.to_tensor(value).astype(tensors[name].dtype) for name, value in values.items()}


def make_requests() -> list[GenerationRequest]:
    """Return requests of which every second one meets the token, as long as there are such."""
    rng = np.random.default_rng(6)
    phrases = [rng.integers(6, 112, 6 + index).tolist() for index in range(len(VARIANTS))]
    prompts = [(phrase * 4)[: 20 + index] for index, phrase in enumerate(phrases)]
    params = [replace(p, max_tokens=NUM_TOKENS, ignore_eos=True, logit_bias={OVERFLOWING: -100.0}) for p in VARIANTS]
    good = [GenerationRequest(f"r{i}", prompt, given) for i, (prompt, given) in enumerate(zip(prompts, params))]
    plain, prompt = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=3, logprobs=2), prompts[0]
    forced = replace(plain, allowed_token_ids=[OVERFLOWING])
    bad = [
        ([*prompt[:9], OVERFLOWING, *prompt[9:]], plain),
        ([OVERFLOWING, *prompt], plain),
        ([*prompt, OVERFLOWING], plain),
        (prompt, forced),
    ]
    failing = [GenerationRequest(name, *given) for name, given in zip(LENGTHS, bad, strict=True)]
    pairs = [request for pair in zip(failing, good) for request in pair]
    return [*pairs, *good[len(failing) :]]


def with_folder(cfg: EngineConfig, folder: Path) -> EngineConfig:
    """Return the configuration for a spoiled model, with the layer of the one that it was made from."""
    is_mtp = isinstance(cfg.speculative, MTPConfig)
    changed = with_layer(cfg, NAME, "bfloat16") if is_mtp else with_model(cfg, f"latent/{NAME}", "bfloat16")
    return replace(changed, model=str(folder))


@pytest.fixture(scope="module", params=list(ROWS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, source = tmp_path_factory.mktemp("model"), GOLDEN / "latent" / NAME
    shutil.copy(source / "config.json", path)
    tensors = spoil(load_file(source / "model.safetensors"), ROWS[request.param])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> Texts:
    """Return what each request gives in an engine of its own; those that meet the token end there."""
    texts: Texts = {}
    for request in make_requests():
        texts |= run_all(build(with_folder(config(), folder)), [request])
    for (name, _), text in texts.items():
        assert (text.error and text.error.type) == ("numerics" if name in LENGTHS else None), name
        assert len(text.token_ids) == LENGTHS.get(name, NUM_TOKENS), name
    return texts


def oracle_of(texts: Texts) -> OracleProposer:
    """Return a proposer of the texts, in which every fourth draft is the token that overflows."""
    drafts = {
        key: [OVERFLOWING if index % 4 == 3 else token for index, token in enumerate(text.token_ids)]
        for key, text in texts.items()
    }
    return OracleProposer(drafts, corruption=0.0)


@pytest.mark.parametrize(
    ("name", "method", "chunk"),
    [
        ("together", "naive", 2048),
        ("together", "naive", 7),
        ("preemption", "oracle", 64),
        ("prefix-hits-together", "oracle", 7),
        ("prefix-hits-alone", "ngram", 1),
        ("preemption-prefix-caching", "mtp", 7),
        ("prefix-hits-together", "with_ngram", 64),
    ],
)
def test_other_requests_keep_their_texts(folder: Path, alone: Texts, name: str, method: str, chunk: int) -> None:
    way, num_drafts = WAYS[name], 0 if method == "naive" else 3
    cfg = config(configured(method), num_drafts, chunk, way.num_blocks, way.prefix_caching)
    engine = build(with_folder(cfg, folder), oracle_of(alone) if method == "oracle" else None)
    for _ in range(2):  # then in blocks that hold values of the first time
        assert way.run(engine, make_requests()) == alone
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_preemptions > 0) == (way.num_blocks is not None)
    assert (stats.num_prefix_hit_tokens > 0) >= way.prefix_caching
    assert (stats.num_accepted_tokens > 0) == (method != "naive")
