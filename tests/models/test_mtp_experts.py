# SPDX-License-Identifier: Apache-2.0
"""Layers for multi-token prediction of models with experts: GLM-4.5's has experts itself, ERNIE's has a dense block."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from safetensors.paddle import load_file, save_file

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.config.speculative_config import MTPConfig, NaiveConfig, SpeculativeConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import MTPLayer, load_mtp_layers
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache
from tests.exactness.requests import run_all
from tests.models.mtp_training import DefinedLayer, replay, replayed_counts, states_of, train

GOLDEN = Path(__file__).parent.parent / "golden"
GLM, GLM_LAYER, ERNIE = GOLDEN / "glm4_moe", GOLDEN / "glm4_moe_mtp", GOLDEN / "ernie4_5_moe"
NUM_DRAFTS = 3
PROMPT_LEN, TEXT_LEN = 16, 60
Floats = NDArray[np.float32]
Tensors = dict[str, paddle.Tensor]


def with_layer(folder: Path, model: Path, layer: Tensors, change: Callable[[Tensors], None] | None = None) -> Path:
    """Write a copy of a golden model whose file also has the tensors of a layer, after `change`."""
    tensors = load_file(model / "model.safetensors") | layer
    if change is not None:
        change(tensors)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def load_target(folder: Path) -> CausalLM:
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    return load_model(config, max_rows=64, max_model_len=64)


class Chain:
    """Runs a layer over a text of its target, and then on its own states."""

    def __init__(self, layer: MTPLayer, config: ModelConfig) -> None:
        self.layer, self.num_computed = layer, 0
        self.batch, self.tokens = BatchIndex(64, 1, 4, 16), HostBuffer(64, "int32")
        self.cache = allocate_cache(4, 16, config.cache_spec)

    def __call__(self, tokens: list[int], states: paddle.Tensor) -> tuple[Floats, paddle.Tensor]:
        """Return log-probabilities [T, V] and output states [T, H] for T tokens and the states before them."""
        count, layer = len(tokens), self.layer
        self.tokens.array[:count] = tokens
        layer.input_states[:count] = states
        counts, computed = np.array([count], np.int32), np.array([self.num_computed], np.int32)
        layer.forward(self.tokens.tensor, self.batch.fill(counts, computed, counts, [[2, 0, 3, 1]]), self.cache)
        self.num_computed += count
        logits = paddle.zeros([64, layer.head.weight.out_features])
        layer.compute_logits(layer.output, count, logits)
        return paddle.nn.functional.log_softmax(logits[:count]).numpy(), layer.output[:count].clone()


def logprobs_of(folder: Path, layer_folder: Path | None) -> tuple[Floats, Floats]:
    """Return log-probabilities of the first draft after each position of the reference's text, and of later drafts."""
    reference = np.load(GLM_LAYER / "reference.npz")
    tokens, drafts = reference["tokens"].tolist(), reference["drafts"].tolist()
    target = load_target(folder)
    states = states_of(folder, [tokens])[0]
    path = None if layer_folder is None else str(layer_folder)
    chain = Chain(load_mtp_layers(target, path, "default_v1", UNQUANTIZED)[0], target.config)
    before = paddle.concat([paddle.zeros_like(states[:1]), states[:-1]])
    first, outputs = chain(tokens, before)
    later = []
    for token in drafts[:-1]:
        logprobs, outputs = chain([token], outputs[-1:])
        later.append(logprobs[0])
    return first[1:], np.stack(later)


@pytest.fixture(scope="module")
def glm_layer() -> Tensors:
    return load_file(GLM_LAYER / "model.safetensors")


def test_a_layer_with_experts_has_the_logprobs_of_transformers_in_a_folder_and_in_the_models_files(
    tmp_path: Path, glm_layer: Tensors
) -> None:
    reference = np.load(GLM_LAYER / "reference.npz")
    first, later = logprobs_of(GLM, GLM_LAYER)
    np.testing.assert_allclose(first[reference["positions"]], reference["logprobs"], rtol=0, atol=1e-4)
    np.testing.assert_allclose(later, reference["chained_logprobs"], rtol=0, atol=1e-4)
    assert later.argmax(-1).tolist() == reference["drafts"].tolist()[1:]
    same = logprobs_of(with_layer(tmp_path / "model", GLM, glm_layer), None)
    np.testing.assert_array_equal(same[0], first)
    np.testing.assert_array_equal(same[1], later)


def zero_bias(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.gate.e_score_correction_bias"] *= 0


def zero_shared_expert(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.shared_experts.down_proj.weight"] *= 0


def other_gate(tensors: Tensors) -> None:
    tensors["model.layers.3.mlp.gate.weight"] = tensors["model.layers.3.mlp.gate.weight"].flip([0])


@pytest.mark.parametrize("change", [zero_bias, zero_shared_expert, other_gate])
def test_each_part_of_the_experts_matters(
    tmp_path: Path, glm_layer: Tensors, change: Callable[[Tensors], None]
) -> None:
    reference = np.load(GLM_LAYER / "reference.npz")
    first, _ = logprobs_of(with_layer(tmp_path / "model", GLM, glm_layer, change), None)
    assert np.abs(first[reference["positions"]] - reference["logprobs"]).max() > 1e-2


@pytest.mark.parametrize("has_transposed_router", [True, False])
def test_a_layer_in_paddle_layout_is_the_same_with_its_router_in_either_layout(
    tmp_path: Path, glm_layer: Tensors, has_transposed_router: bool
) -> None:
    router = "model.layers.3.mlp.gate.weight"
    is_transposed = {
        name: tensor.ndim == 2 and "embed" not in name and (has_transposed_router or name != router)
        for name, tensor in glm_layer.items()
    }
    stored = {name: tensor.t().contiguous() if is_transposed[name] else tensor for name, tensor in glm_layer.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "np"})
    for found, expected in zip(logprobs_of(GLM, tmp_path), logprobs_of(GLM, GLM_LAYER), strict=True):
        np.testing.assert_array_equal(found, expected)


def repeat_target(tensors: Tensors) -> None:
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]


def change_last_value(tensors: Tensors) -> None:
    repeat_target(tensors)
    for name in ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"):
        tensors[name] = tensors[name].clone()
        tensors[name][-1, -1] += 1


@pytest.mark.parametrize(("change", "is_shared"), [(repeat_target, True), (change_last_value, False)])
def test_an_embedding_and_a_head_that_repeat_the_targets_are_shared(
    tmp_path: Path, glm_layer: Tensors, change: Callable[[Tensors], None], is_shared: bool
) -> None:
    folder = with_layer(tmp_path / "model", GLM, glm_layer, change)
    target = load_target(folder)
    for path in (None, str(folder)):
        (layer,) = load_mtp_layers(target, path, "default_v1", UNQUANTIZED)
        assert (layer.own_head is None, layer.head is target.shared.head) == (is_shared, is_shared)
        assert (layer._embedding is target.shared.embedding) == is_shared


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.experts.8.up_proj.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "model.layers.3.self_attn.rotary.weight",
        "other.model.layers.3.enorm.weight",
        pytest.param(f"model.layers.{'9' * 5000}.eh_proj.weight", id="too many digits"),
    ],
)
def test_the_decoder_ignores_the_tensors_of_the_layer_and_no_others(
    tmp_path: Path, glm_layer: Tensors, name: str
) -> None:
    load_target(with_layer(tmp_path / "model", GLM, glm_layer))
    with pytest.raises(ConfigError, match=rf"1 unexpected \({name[:60]}"):
        load_target(with_layer(tmp_path / "other", GLM, glm_layer | {name: paddle.zeros([2, 2])}))


def lose_expert(tensors: Tensors) -> None:
    del tensors["model.layers.3.mlp.experts.5.down_proj.weight"]


def lose_bias(tensors: Tensors) -> None:
    del tensors["model.layers.3.mlp.gate.e_score_correction_bias"]


@pytest.mark.parametrize(("change", "name"), [(lose_expert, "experts.5.down_proj.weight"), (lose_bias, "gate.e_score")])
def test_a_layer_without_one_of_its_tensors_is_refused(
    tmp_path: Path, glm_layer: Tensors, change: Callable[[Tensors], None], name: str
) -> None:
    folder = with_layer(tmp_path / "model", GLM, glm_layer, change)
    target = load_target(folder)
    with pytest.raises(ConfigError, match=rf"1 missing \(model.layers.3.mlp.{name}"):
        load_mtp_layers(target, None, "default_v1", UNQUANTIZED)


def engine_of(
    model: Path,
    speculative: SpeculativeConfig,
    chunk: int = 256,
    num_blocks: int | None = None,
    quantization: str | None = None,
) -> Engine:
    """Return an engine of a golden model, in float32 without a weight format, else in bfloat16."""
    return make_engine(
        EngineConfig(
            model=str(model),
            dtype="float32" if quantization is None else "bfloat16",
            quantization=QuantizationConfig.from_value(quantization or "none"),
            max_model_len=64,
            cache=CacheConfig(block_size=16, num_blocks=num_blocks),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, long_prefill_token_threshold=chunk),
            speculative=speculative,
        )
    )


def mtp(hidden_state: str = "normed", layer: Path | None = None) -> MTPConfig:
    folder = None if layer is None else str(layer)
    return MTPConfig(num_speculative_tokens=NUM_DRAFTS, adaptive=False, mtp_hidden_state=hidden_state, model=folder)


def requests_of(vocab_size: int, temperatures: tuple[float, ...] = (0.0,)) -> list[GenerationRequest]:
    """Return requests with random prompts."""
    random, length = np.random.default_rng(2), TEXT_LEN - PROMPT_LEN
    return [
        GenerationRequest(
            str(i),
            random.integers(3, vocab_size, PROMPT_LEN).tolist(),
            SamplingParams(temperature=temperatures[i % len(temperatures)], seed=i, max_tokens=length, ignore_eos=True),
        )
        for i in range(8)
    ]


@pytest.mark.parametrize("quantization", [None, "none", "wint8", "wint4", "w8a8", "w4a8"])
@pytest.mark.parametrize(("chunk", "num_blocks"), [(256, None), (7, 16)], ids=str)
def test_texts_of_a_model_with_experts_do_not_depend_on_its_layer(
    chunk: int, num_blocks: int | None, quantization: str | None
) -> None:
    requests = requests_of(112, (0.0, 0.6))
    plain = run_all(engine_of(GLM, NaiveConfig(), quantization=quantization), requests)
    engine = engine_of(GLM, mtp(layer=GLM_LAYER), chunk, num_blocks, quantization)
    for _ in range(2):  # the second time with prefix hits
        assert run_all(engine, requests) == plain
    stats = engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_blocks is not None)


@pytest.mark.parametrize(("chunk", "num_blocks"), [(256, None), (7, None), (7, 18)], ids=str)
def test_a_layer_with_experts_has_the_acceptance_of_transformers(chunk: int, num_blocks: int | None) -> None:
    reference = np.load(GLM_LAYER / "reference.npz")
    texts, drafts = reference["texts"].tolist(), reference["drafts_of_texts"]
    params = SamplingParams(temperature=0.0, max_tokens=TEXT_LEN - PROMPT_LEN, ignore_eos=True)
    requests = [GenerationRequest(str(i), text[:PROMPT_LEN], params) for i, text in enumerate(texts)]
    expected = replay(texts, PROMPT_LEN, NUM_DRAFTS, lambda i, end: drafts[i, end - PROMPT_LEN - 1])
    engine = engine_of(GLM, mtp(layer=GLM_LAYER), chunk, num_blocks)
    found = run_all(engine, requests)
    assert [[*text[:PROMPT_LEN], *found[str(i), 0].token_ids] for i, text in enumerate(texts)] == texts
    stats = engine.stats()
    counts = np.array([stats.drafted_per_position, stats.accepted_per_position])
    np.testing.assert_allclose(counts[1] / counts[0], expected[1] / expected[0], rtol=0, atol=0.01)
    if num_blocks is None:
        np.testing.assert_array_equal(counts, expected)
    assert counts[1].min() > 0
    assert (stats.num_preemptions > 0) == (num_blocks is not None)


@pytest.mark.parametrize("form", ["ernie", "ernie_raw"])
def test_a_dense_layer_of_a_model_with_experts_has_the_acceptance_of_its_definition(tmp_path: Path, form: str) -> None:
    requests, config = requests_of(112), ModelConfig.from_pretrained(str(ERNIE), dtype="float32")
    plain = run_all(engine_of(ERNIE, NaiveConfig()), requests)
    texts = [[*r.prompt_token_ids, *plain[r.request_id, 0].token_ids] for r in requests]
    tensors = load_file(ERNIE / "model.safetensors")
    tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    layer = DefinedLayer(form, config, seed=1, target=tied | tensors)
    states = states_of(ERNIE, texts, layer.hidden_state)
    train([layer], paddle.to_tensor(texts[:5], "int64"), states[:5], num_steps=40)
    engine = engine_of(with_layer(tmp_path / "model", ERNIE, layer.weights), mtp(layer.hidden_state))
    assert run_all(engine, requests) == plain
    counts, stats = replayed_counts(layer, texts, states, PROMPT_LEN, NUM_DRAFTS), engine.stats()
    assert [stats.drafted_per_position, stats.accepted_per_position] == counts.tolist()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_dummy_layers_have_the_form_of_the_architectures_releases() -> None:
    layers = []
    for model in (GLM, ERNIE):
        config = ModelConfig.from_pretrained(str(model), dtype="float32")
        target = load_model(config, max_rows=8, max_model_len=8, load_choices="dummy")
        layers += load_mtp_layers(target, None, "dummy", UNQUANTIZED)
    sparse, dense = layers
    assert sparse.own_head is not None and dense.own_head is None
    assert sparse.num_weight_bytes > 4 * 8 * 3 * 32 * 24 > dense.num_weight_bytes  # eight experts in float32


def test_dummy_layers_of_deepseeks_form_refuse_raw_states() -> None:
    target = load_model(
        ModelConfig.from_pretrained(str(GLM), dtype="float32"), max_rows=8, max_model_len=8, load_choices="dummy"
    )
    with pytest.raises(ConfigError, match="expected normed, got raw"):
        load_mtp_layers(target, None, "dummy", UNQUANTIZED, hidden_state="raw")
