# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with latent attention in other layouts compute the same bits; incomplete ones are refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from safetensors.paddle import load_file, save_file

from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models import mtp
from fastdeploy.models.mtp import load_mtp_layers
from tests.models.model_driver import Driver
from tests.models.test_latent_definition import LATENT, WITH_LAYER
from tests.models.test_mtp_experts import Tensors, with_layer
from tests.models.test_packed_weights import leaves, load, pack
from tests.models.test_row_independence import assert_same_bits, tokens_of

MODELS = ("deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite_bias")
ATTENTION = "model.layers.1.self_attn."
UP = f"{ATTENTION}kv_b_proj.weight"


def variant(name: str, folder: Path, change: Callable[[Tensors], object], format: str = "pt", **config: Any) -> Path:
    """Write a golden checkpoint after a change of its tensors, its format and its config.json."""
    shutil.copytree(LATENT / name, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": format})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


def fuse_experts(tensors: Tensors) -> None:
    """Store the experts of each layer as modules of transformers 5 hold them."""
    for prefix in {name.split("0.gate_proj")[0] for name in tensors if ".experts.0.gate_proj" in name}:
        count = sum(name.startswith(prefix) for name in tensors) // 3
        gates, ups, downs = (
            [tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)]
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"{prefix}gate_up_proj"] = paddle.stack([paddle.concat(pair) for pair in zip(gates, ups, strict=True)])
        tensors[f"{prefix}down_proj"] = paddle.stack(downs)


def transpose(tensors: Tensors) -> None:
    """Store linear layers as [in, out]."""
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "embed" not in name:
            tensors[name] = tensor.t().contiguous()


def check_same(folder: Path, name: str, quantization: str) -> None:
    formats = QuantizationConfig.from_value(quantization)
    found, expected = (load(path, formats, dtype="bfloat16") for path in (folder, LATENT / name))
    assert_same_bits(Driver(found).run_alone(tokens_of(3)), Driver(expected).run_alone(tokens_of(3)))
    assert found.forms == expected.forms


@pytest.mark.parametrize("quantization", ["none", "wint4"])
@pytest.mark.parametrize("name", MODELS)
def test_fused_experts_of_transformers_5_have_the_bits_of_single_ones(
    name: str, quantization: str, tmp_path: Path
) -> None:
    folder = variant(name, tmp_path / "fused", fuse_experts)
    check_same(folder, name, quantization)
    pack(folder, tmp_path / "packed", quantization)
    check_same(tmp_path / "packed", name, quantization)


@pytest.mark.parametrize("name", WITH_LAYER)
def test_a_layer_with_fused_experts_has_the_bits_of_one_with_single_ones(
    name: str, tmp_path: Path, loaded: list[list[mtp.MTPWeights]]
) -> None:
    layer = load_file(LATENT / f"{name}_mtp" / "model.safetensors")
    formats = QuantizationConfig.from_value("wint8").for_model(has_experts=True)
    for path, change in ((tmp_path / "fused", fuse_experts), (tmp_path / "single", None)):
        target = load(with_layer(path, LATENT / name, layer, change), formats, dtype="bfloat16")
        load_mtp_layers(target, None, "default_v1", formats)
    is_same = leaves(loaded[0][0]) == leaves(loaded[1][0])
    assert is_same


@pytest.mark.parametrize("quantization", ["none", "w4a8"])
@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_in_paddles_layout_have_the_same_bits(name: str, quantization: str, tmp_path: Path) -> None:
    check_same(variant(name, tmp_path / "paddle", transpose, format="np"), name, quantization)


def test_buffers_of_rotary_tables_are_ignored(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors[f"{ATTENTION}rotary_emb.inv_freq"] = paddle.ones([8])

    check_same(variant("deepseek_v3", tmp_path / "model", add), "deepseek_v3", "none")


def take(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(f"{ATTENTION}{name}") for name in names]


def split(tensors: Tensors) -> None:
    """Store the parts that make keys and values apart."""
    keys, values = tensors.pop(UP).reshape([4, 32, 32]).chunk(2, axis=1)
    for name, part in (("k_b_proj", keys), ("v_b_proj", values)):
        tensors[f"{ATTENTION}{name}.weight"] = part.reshape([-1, 32])


def fuse_down(tensors: Tensors) -> None:
    parts = [tensors.pop(f"{ATTENTION}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    tensors[f"{ATTENTION}fused_qkv_a_proj_with_mqa.weight"] = paddle.concat(parts)


def put(change: Callable[[paddle.Tensor], paddle.Tensor], name: str = UP) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (take("kv_b_proj.weight"), f"1 missing ({UP})"),
        (take("kv_a_layernorm.weight"), f"1 missing ({ATTENTION}kv_a_layernorm.weight)"),
        (take("q_a_layernorm.weight"), f"1 missing ({ATTENTION}q_a_layernorm.weight)"),
        (split, f"1 missing ({UP}); 2 unexpected ({ATTENTION}k_b_proj.weight, {ATTENTION}v_b_proj.weight)"),
        (fuse_down, f"1 unexpected ({ATTENTION}fused_qkv_a_proj_with_mqa.weight)"),
        (put(lambda up: up[:-8]), f"1 of wrong shape ({UP} is [120, 32], expected [128, 32])"),
        (put(lambda up: up[:, :24]), f"{UP} is [128, 24], expected [128, 32]"),
        (put(lambda up: up.reshape([4, 32, 32])), f"{UP} is [4, 32, 32], expected [128, 32]"),
        (put(lambda up: up.t()), f"{UP} is [32, 128], expected [128, 32]); the linear layers are transposed"),
        (put(lambda up: up * float("inf")), f"tensor {UP} has values that are not finite"),
        (
            put(lambda row: row[:-16], f"{ATTENTION}kv_a_proj_with_mqa.weight"),
            f"{ATTENTION}kv_a_proj_with_mqa.weight is [32, 32], expected [48, 32]",
        ),
    ],
)
def test_missing_tensors_and_wrong_shapes_are_refused_by_name(
    change: Callable[[Tensors], object], problem: str, tmp_path: Path
) -> None:
    folder = variant("deepseek_v3", tmp_path / "model", change)
    assert problem in refusal(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert caught.value.field == "model" and "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("deepseek_v3", {"q_lora_rank": None}, r"3 missing \(model.layers.0.self_attn.q_proj.weight, .*unexpected"),
        (
            "deepseek_v2_lite",
            {"q_lora_rank": 24},
            r"missing \(.*q_a_layernorm.weight.* 3 unexpected \(.*\.q_proj.weight",
        ),
        ("deepseek_v3", {"attention_bias": True}, r"9 missing \(.*q_a_proj.bias.*kv_a_proj_with_mqa.bias.*o_proj.bias"),
        ("deepseek_v3", {"v_head_dim": 24}, r"kv_b_proj.weight is \[128, 32\], expected \[160, 32\]"),
        ("glm4_moe_lite_bias", {"attention_bias": False}, r"unexpected \(.*kv_a_proj_with_mqa.bias"),
    ],
)
def test_a_configuration_of_other_sizes_is_refused_with_the_tensors(
    name: str, config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    message = refusal(variant(name, tmp_path / "model", lambda tensors: None, **config))
    assert re.search(problem, message)
