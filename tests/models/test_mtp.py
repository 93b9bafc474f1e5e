# SPDX-License-Identifier: Apache-2.0
"""The layer for multi-token prediction equals its definition in NumPy; its loader refuses other tensors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle
import pytest
from numpy.typing import NDArray
from safetensors.paddle import load_file, save_file

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.decoder import CausalLM
from fastdeploy.models.loader import load_model
from fastdeploy.models.mtp import MTPLayer, load_mtp_layers
from fastdeploy.ops.batch_index import BatchIndex
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.caches import allocate_cache

DEMO = Path(resolve_model_path("demo"))
Floats = NDArray[np.float32]
Tensors = dict[str, paddle.Tensor]
MAX_ROWS = 64
BLOCK_SIZE = 16


def demo_config() -> ModelConfig:
    return ModelConfig.from_pretrained(DEMO, dtype="float32")


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return load_model(demo_config(), max_rows=MAX_ROWS, max_model_len=MAX_ROWS)


def load(target: CausalLM, folder: Path | None = None, quantization: QuantizationConfig = UNQUANTIZED) -> MTPLayer:
    return load_mtp_layers(target, None if folder is None else str(folder), "default_v1", quantization)[0]


class Reference:
    """The layer in float32 NumPy, without a cache: every position is computed from the whole sequence before it."""

    def __init__(self, config: ModelConfig) -> None:
        stored = load_file(DEMO / "model.safetensors")
        self.weights = {name: value.astype("float32").numpy() for name, value in stored.items()}
        self.config = config

    def outputs(self, tokens: list[int], states: Floats) -> Floats:
        """Return the outputs after the norm at positions 1 .. n - 1; states[t] belongs to position t."""
        embedded = self.weights["model.embed_tokens.weight"][tokens[1:]]
        joined = np.concatenate(
            [self.norm("mtp_emb_norm.0", embedded), self.norm("mtp_hidden_norm.0", states)], axis=-1
        )
        x = self.linear("mtp_linear_proj.0", joined)
        x = x + self.attention(self.norm("mtp_block.0.input_layernorm", x))
        y = self.norm("mtp_block.0.post_attention_layernorm", x)
        gate = self.linear("mtp_block.0.mlp.gate_proj", y)
        up = self.linear("mtp_block.0.mlp.up_proj", y)
        x = x + self.linear("mtp_block.0.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        return self.norm("norm", x)

    def norm(self, name: str, x: Floats) -> Floats:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x * scale * self.weights[f"model.{name}.weight"]

    def linear(self, name: str, x: Floats) -> Floats:
        return x @ self.weights[f"model.{name}.weight"].T

    def attention(self, x: Floats) -> Floats:
        heads, groups, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        query = self.rotate(self.linear("mtp_block.0.self_attn.q_proj", x).reshape(-1, heads, dim))
        key = self.rotate(self.linear("mtp_block.0.self_attn.k_proj", x).reshape(-1, groups, dim))
        value = self.linear("mtp_block.0.self_attn.v_proj", x).reshape(-1, groups, dim)
        key, value = (np.repeat(part, heads // groups, axis=1) for part in (key, value))
        scores = np.einsum("qhd,khd->hqk", query, key) * dim**-0.5
        scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
        return self.linear("mtp_block.0.self_attn.o_proj", attended)

    def rotate(self, x: Floats) -> Floats:
        """Rotate the pairs (2i, 2i + 1) of every head; row 0 is at position 1."""
        dim = x.shape[-1]
        angles = np.outer(np.arange(1, len(x) + 1), 10000.0 ** (-np.arange(0, dim, 2) / dim))[:, None]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * np.cos(angles) - x[..., 1::2] * np.sin(angles)
        out[..., 1::2] = x[..., 1::2] * np.cos(angles) + x[..., 0::2] * np.sin(angles)
        return out


class Stepper:
    """Runs a layer over one sequence, some rows at a time."""

    def __init__(self, layer: MTPLayer) -> None:
        self.layer = layer
        config = demo_config()
        self.batch = BatchIndex(MAX_ROWS, 1, 4, BLOCK_SIZE)
        self.cache = allocate_cache(4, BLOCK_SIZE, config.cache_spec)
        self.tokens = HostBuffer(MAX_ROWS, "int32")
        self.num_computed = 0

    def __call__(self, tokens: list[int], states: Floats) -> Floats:
        count = len(tokens)
        self.tokens.array[:count] = tokens
        self.layer.input_states[:count] = paddle.to_tensor(states)
        counts, computed = np.array([count], np.int32), np.array([self.num_computed], np.int32)
        metadata = self.batch.fill(counts, computed, counts, [[2, 0, 3, 1]])
        self.num_computed += count
        self.layer.forward(self.tokens.tensor, metadata, self.cache)
        return self.layer.output[:count].numpy().copy()


@pytest.mark.parametrize("cuts", [[21], [1, 20], [5, 11, 5]], ids=str)
def test_outputs_and_drafts_equal_the_definition(target: CausalLM, cuts: list[int]) -> None:
    random = np.random.default_rng(3)
    tokens = random.integers(8, 4096, 24).tolist()
    states = random.standard_normal((20, 256)).astype(np.float32)
    reference, stepper = Reference(demo_config()), Stepper(load(target))
    rows = np.concatenate([np.zeros((1, 256), np.float32), states])
    found = []
    for cut in cuts:
        chunk = slice(stepper.num_computed, stepper.num_computed + cut)
        found.append(stepper(tokens[chunk], rows[chunk]))
    outputs = np.concatenate(found)[1:]
    for token in tokens[21:]:  # drafts: each from the output before it
        states = np.concatenate([states, outputs[-1:]])
        outputs = np.concatenate([outputs, stepper([token], outputs[-1:])])
    np.testing.assert_allclose(outputs, reference.outputs(tokens, states), rtol=0, atol=2e-4)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_positions_before_a_layers_first_row_are_masked(target: CausalLM, tmp_path: Path, index: int) -> None:
    random = np.random.default_rng(4)
    states = random.standard_normal((9, 256)).astype(np.float32)
    folder, outputs = str(folder_of(tmp_path, repeat)), []
    for first, scale in ((7, 0.0), (900, 3.0)):
        layer = load_mtp_layers(target, folder, "default_v1", UNQUANTIZED, max_layers=3)[index]
        scales = np.array([[scale]] * (index + 1) + [[1.0]] * (8 - index))
        outputs.append(Stepper(layer)([*[first] * (index + 1), *range(50, 58 - index)], states * scales))
    np.testing.assert_array_equal(outputs[0][index + 1 :], outputs[1][index + 1 :])
    assert not np.array_equal(outputs[0][index], outputs[1][index])


def repeat(tensors: Tensors) -> None:
    """Add two copies of the layer."""
    for name in list(tensors):
        for index in (1, 2):
            tensors[re.sub(r"(mtp_\w+)\.0", rf"\1.{index}", name)] = tensors[name].clone()


def folder_of(tmp_path: Path, change: Callable[[Tensors], None]) -> Path:
    """Write the demonstration model's layer, changed, to a separate folder."""
    tensors = {name: value for name, value in load_file(DEMO / "model.safetensors").items() if ".mtp_" in name}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(DEMO / "config.json", tmp_path)
    return tmp_path


def unchanged(tensors: Tensors) -> None:
    pass


def to_paddle(tensors: Tensors) -> None:
    for name in list(tensors):
        value = tensors.pop(name)
        tensors[f"ernie{name.removeprefix('model')}"] = value.t().contiguous() if value.ndim == 2 else value


def to_fused_paddle(tensors: Tensors) -> None:
    to_paddle(tensors)
    attention, mlp = "ernie.mtp_block.0.self_attn", "ernie.mtp_block.0.mlp"
    qkv = [tensors.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
    tensors[f"{attention}.qkv_proj.weight"] = paddle.concat(qkv, axis=1)
    gate_up = [tensors.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
    tensors[f"{mlp}.up_gate_proj.weight"] = paddle.concat(gate_up, axis=1)


def transpose_projection(tensors: Tensors) -> None:
    """Store the projection alone as [in, out]."""
    name = "model.mtp_linear_proj.0.weight"
    tensors[name] = tensors[name].t().contiguous()


@pytest.mark.parametrize("change", [unchanged, to_paddle, to_fused_paddle, transpose_projection])
def test_a_separate_folder_in_either_layout_gives_the_same_layer(
    target: CausalLM, tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    states = np.random.default_rng(5).standard_normal((9, 256)).astype(np.float32)
    outputs = [
        Stepper(load(target, folder))(list(range(50, 59)), states) for folder in (None, folder_of(tmp_path, change))
    ]
    np.testing.assert_array_equal(*outputs)


def add_copies(tensors: Tensors) -> None:
    """Add what belongs to the target, as files of a whole model have it."""
    stored = load_file(DEMO / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        tensors[name] = stored[name]
    tensors["lm_head.weight"] = stored["model.embed_tokens.weight"]


@pytest.mark.parametrize("own", ["", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_tensors_beside_a_separate_layer_count_if_they_differ_from_the_targets(
    target: CausalLM, tmp_path: Path, own: str
) -> None:
    def change(tensors: Tensors) -> None:
        add_copies(tensors)
        if own:
            tensors[own] = tensors[own] * 2.0

    layer, plain, shared = load(target, folder_of(tmp_path, change)), load(target), target.shared
    is_shared = {
        "model.embed_tokens.weight": layer._embedding is shared.embedding,
        "model.norm.weight": layer._final_norm is shared.final_norm,
        "lm_head.weight": layer.head is shared.head,
    }
    assert is_shared == {name: name != own for name in is_shared}
    states = np.random.default_rng(5).standard_normal((9, 256)).astype(np.float32)
    found, expected = (Stepper(layer)(list(range(50, 59)), states) for layer in (layer, plain))
    if own == "model.norm.weight":
        np.testing.assert_allclose(found, 2.0 * expected, rtol=1e-6)
    elif own != "model.embed_tokens.weight":  # a norm follows the embedding
        np.testing.assert_array_equal(found, expected)


def lose_norm(tensors: Tensors) -> None:
    del tensors["model.mtp_emb_norm.0.weight"]


def add_foreign(tensors: Tensors) -> None:
    tensors["model.mtp_block.0.self_attn.q_norm.weight"] = paddle.zeros([64])


def cut_projection(tensors: Tensors) -> None:
    tensors["model.mtp_linear_proj.0.weight"] = paddle.zeros([256, 256])


def add_layer(tensors: Tensors) -> None:
    tensors["model.mtp_block.1.input_layernorm.weight"] = paddle.ones([256])


def add_deepseek_layers(tensors: Tensors) -> None:
    tensors.clear()
    tensors |= {f"model.layers.{index}.eh_proj.weight": paddle.zeros([256, 512]) for index in (14, 15)}


def lose_all(tensors: Tensors) -> None:
    tensors.clear()
    tensors["model.norm.weight"] = paddle.ones([256])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lose_norm, r"1 missing \(model.mtp_emb_norm.0.weight\)"),
        (add_foreign, r"1 unexpected \(model.mtp_block.0.self_attn.q_norm.weight\)"),
        (cut_projection, r"mtp_linear_proj.0.weight is \[256, 256\], expected \[256, 512\]"),
        (add_layer, r"11 missing \(model.mtp_emb_norm.1.weight"),
        (add_deepseek_layers, r"24 missing \(model.layers.14.enorm.weight"),
        (lose_all, "no layer for multi-token prediction"),
    ],
)
def test_a_layer_that_does_not_match_is_refused_by_name(
    target: CausalLM, tmp_path: Path, change: Callable[[Tensors], None], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(target, folder_of(tmp_path, change))


def test_quantization_of_the_layer_needs_bfloat16(target: CausalLM) -> None:
    with pytest.raises(ConfigError, match="needs dtype bfloat16"):
        load(target, quantization=QuantizationConfig.from_value("wint8"))
