# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8 whose config.json or tensors are wrong are refused with one line that names file and tensor."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import paddle
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.loader import check_tensors, load_model
from tests.models.fp8_folders import (
    EXPERT,
    FP8_GOLDEN,
    NAMES,
    QUERY,
    Tensors,
    changed,
    set_code,
    set_scale,
    stack_experts,
)
from tests.models.test_checkpoint_fuzz import VALUES, damage_safetensors

Edit = Callable[[Tensors], None]
SCALE = f"{QUERY}_scale_inv"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def load(folder: Path) -> None:
    load_model(ModelConfig.from_pretrained(folder), max_rows=16, max_model_len=64)


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"weight_block_size": None}, "with a scale per tensor (quant_method 'fp8' without weight_block_size)"),
        (
            {"weight_block_size": [64, 128]},
            "a scale per block of [64, 128] are not supported, only [128, 128]; use FP8",
        ),
        ({"weight_block_size": [128]}, "a scale per block of [128]"),
        ({"weight_block_size": "128"}, "a scale per block of '128'"),
        ({"fmt": "e5m2"}, "of fmt 'e5m2' are not supported, only e4m3; use FP8 with a scale per block of 128 x 128"),
        ({"scale_fmt": "e8m0"}, "scale_fmt 'e8m0'"),
        ({"expert_dtype": "fp4"}, "experts of expert_dtype 'fp4'"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: expected a list of names, got 'lm_head'"),
        ({"ignored_layers": [1]}, "ignored_layers: expected a list of names, got [1]"),
    ],
)
def test_other_codes_and_blocks_are_refused_before_files_are_read(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed("qwen3", tmp_path, **keys)
    with pytest.raises(ConfigError, match=r"^quantization_config: ") as caught:
        ModelConfig.from_pretrained(folder)
    assert f"{folder}/config.json: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize("keys", [{"scale_fmt": "float"}, {"fmt": None}, {"ignored_layers": None}, {"x": 1}])
def test_keys_that_say_nothing_else_are_accepted(keys: dict[str, Any], tmp_path: Path) -> None:
    load(changed("qwen3", tmp_path, **keys))


def put(name: str, value: paddle.Tensor | None) -> Edit:
    """Set a tensor, or leave it out."""

    def edit(tensors: Tensors) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return edit


def narrow_stack(tensors: Tensors) -> None:
    """Store stacked experts with a width that is not a multiple of 128."""
    stack_experts(tensors)
    tensors[STACK] = tensors[STACK].view(paddle.uint8)[:, :250].contiguous().view(paddle.float8_e4m3fn)


def flat_stack(tensors: Tensors) -> None:
    stack_experts(tensors)
    tensors[STACK] = tensors[STACK].view(paddle.uint8)[0].clone().view(paddle.float8_e4m3fn)


E4M3 = paddle.zeros([4], "uint8").view(paddle.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "edit", "tensor", "problem"),
    [
        ("qwen3", put(SCALE, None), QUERY, f"is F8_E4M3 without its scales {SCALE}"),
        (
            "qwen3",
            put(SCALE, paddle.ones([2, 1])),
            SCALE,
            "is [2, 1], expected [1, 2], a scale per block of [128, 128]",
        ),
        ("qwen3", put(SCALE, paddle.ones([])), SCALE, "is [], expected [1, 2]"),
        ("qwen3", put(SCALE, paddle.ones([1, 2], "int32")), SCALE, "is stored as I32, expected one of F32, BF16, F16"),
        ("qwen3", put(QUERY, paddle.ones([64, 132])), SCALE, f"is a scale of FP8 weights, but {QUERY} is no tensor"),
        ("qwen3", put(QUERY, None), SCALE, f"is a scale of FP8 weights, but {QUERY} is no tensor of F8_E4M3"),
        ("qwen3", put("x.weight", E4M3), "x.weight", "is F8_E4M3 [4], expected a matrix"),
        ("glm4_moe", narrow_stack, STACK, "is [4, 250, 40], expected [experts, 2 * a multiple of 128, inputs]"),
        ("glm4_moe", flat_stack, STACK, "is [256, 40], expected [experts, 2 * a multiple of 128, inputs]"),
    ],
)
def test_companions_that_are_missing_or_misshapen_are_refused_before_values_are_read(
    name: str, edit: Edit, tensor: str, problem: str, tmp_path: Path
) -> None:
    folder = changed(name, tmp_path, edit)
    with pytest.raises(ConfigError) as caught:
        check_tensors(ModelConfig.from_pretrained(folder), "default_v1")
    assert f"model: {folder}/model.safetensors: tensor {tensor} {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (set_code(QUERY, 0x7F), f"tensor {QUERY} has values that are not finite"),
        (set_code(QUERY, 0xFF), f"tensor {QUERY} has values that are not finite"),
        (set_code(EXPERT, 0xFF), f"tensor {EXPERT} has values that are not finite"),
        (set_scale(QUERY, 0.0), f"tensor {SCALE} has a scale of 0, expected numbers above 0"),
        (set_scale(QUERY, -0.5), f"tensor {SCALE} has a scale of -0.5, expected numbers above 0"),
        (set_scale(QUERY, float("nan")), f"tensor {SCALE} has values that are not finite"),
        (set_scale(EXPERT, float("inf")), f"tensor {EXPERT}_scale_inv has values that are not finite"),
        (set_scale(EXPERT, 1e37), f"tensor {EXPERT} has a value that is too large for bfloat16, with its scale"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_values_that_are_not_valid_are_refused_by_file_and_tensor(
    is_stacked: bool, dtype: str, edit: Edit, problem: str, tmp_path: Path
) -> None:
    def both(tensors: Tensors) -> None:
        edit(tensors)
        if is_stacked:
            stack_experts(tensors)

    folder = changed("glm4_moe", tmp_path, both)
    config = ModelConfig.from_pretrained(folder, dtype=dtype)
    stacked = problem.replace(EXPERT, EXPERT.replace(".0.down_proj.weight", ".down_proj"))
    with pytest.raises(ConfigError) as caught:
        load_model(config, max_rows=16, max_model_len=64)
    assert "model.safetensors: " + (stacked if is_stacked else problem) in str(caught.value)


def test_a_module_that_config_json_says_is_plain_must_not_have_codes(tmp_path: Path) -> None:
    name = QUERY.removesuffix(".weight")
    message = refusal(changed("qwen3", tmp_path, modules_to_not_convert=["lm_head", name]))
    assert f"tensor {QUERY} is F8_E4M3, but modules_to_not_convert in config.json has it" in message


WEIGHT = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "tensor", "problem"),
    [
        (put(f"{WEIGHT}_scale", None), WEIGHT, f"is F8_E4M3 without its scales {WEIGHT}_scale"),
        (
            put(f"{WEIGHT}_scale", paddle.ones([1])),
            f"{WEIGHT}_scale",
            "is [1], expected [140, 1], a scale per block of",
        ),
        (
            put(f"{WEIGHT}_zero_point", paddle.ones([140, 1])),
            f"{WEIGHT}_zero_point",
            "is unexpected beside a weight in",
        ),
        (put(WEIGHT, None), f"{WEIGHT}_scale", "is not float-quantized, as config.json says"),
        (put(WEIGHT, E4M3), WEIGHT, "is F8_E4M3 [4], expected a matrix"),
        (put(WEIGHT, E4M3[0]), WEIGHT, "is F8_E4M3 [], expected a matrix"),
        (set_code(WEIGHT, 0x7F), WEIGHT, "has values that are not finite"),
        (put(f"{WEIGHT}_scale", paddle.full([140, 1], -1.0)), f"{WEIGHT}_scale", "has a scale of -1, expected numbers"),
    ],
)
def test_compressed_tensors_with_a_scale_per_output_are_refused_by_tensor(
    edit: Edit, tensor: str, problem: str, tmp_path: Path
) -> None:
    message = refusal(changed("qwen3_per_output", tmp_path, edit))
    assert f"tensor {tensor} {problem}" in message


def test_a_scale_without_a_weight_in_fp8_is_refused_where_tensors_tell_the_format(tmp_path: Path) -> None:
    edit = put(WEIGHT, paddle.ones([140, 132], "bfloat16"))
    message = refusal(changed("qwen3_per_output", tmp_path, edit, format="naive-quantized"))
    assert f"_scale is of a weight in FP8, but {WEIGHT} is no tensor of F8_E4M3" in message


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = changed("qwen3", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "cannot read" in refusal(tmp_path)


def test_fp8_weights_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    folder = changed("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert "weights in FP8 with a scale per block (" in message
    assert " are not supported without a quantization_config in config.json; use plain weights" in message


def test_damaged_checkpoints_in_fp8_are_loaded_or_refused_with_one_error(tmp_path: Path) -> None:
    chance, num_loaded, num_refused = random.Random(1), 0, 0
    for index in range(120):
        folder, name = tmp_path / f"{index}", chance.choice(NAMES)
        if chance.random() < 0.3:
            config = json.loads((FP8_GOLDEN / name / "config.json").read_text())["quantization_config"]
            changed(name, folder, **{chance.choice([*config, "ignored_layers"]): deepcopy(chance.choice(VALUES))})
        else:
            shutil.copytree(FP8_GOLDEN / name, folder)
            damage_safetensors(chance, folder / "model.safetensors")
        try:
            load(folder)
            num_loaded += 1
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000
            num_refused += 1
        shutil.rmtree(folder)
    assert num_loaded > 5 and num_refused > 60, "both happen often"
