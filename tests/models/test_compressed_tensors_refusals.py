# SPDX-License-Identifier: Apache-2.0
"""Files of compressed-tensors that contradict config.json or themselves are refused by file and tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from tests.models.compressed_tensors_files import StoredTensor, Tensors, copy_of, weights_of

Change = Callable[[Tensors, dict[str, Any]], None]
GATE, UP, DOWN = (f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down"))
V = "model.layers.1.self_attn.v_proj"  # 8 bits in groups of 32, with zero points
SIXTEENS = "model.layers.1.mlp.up_proj"


def remove(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name) and None


def add(name: str, kind: str, values: Any) -> Change:
    return lambda tensors, config: tensors.update({name: StoredTensor(kind, values)})


def edit(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name].values = change(tensors[name].values)

    return apply


def put(name: str, value: int) -> Change:
    """Overwrite one element."""

    def change(values: Any) -> Any:
        values.reshape(-1)[5] = value
        return values

    return edit(name, change)


def of_config(**changes: Any) -> Change:
    return lambda tensors, config: config.update(changes)


def of_group(index: int, **changes: Any) -> Change:
    return lambda tensors, config: config["config_groups"][f"group_{index}"].update(changes)


def of_weights(index: int, **changes: Any) -> Change:
    return lambda tensors, config: config["config_groups"][f"group_{index}"]["weights"].update(changes)


ORDER = np.arange(128, dtype=np.int32) // 16


@pytest.mark.parametrize(
    ("change", "tensor", "problem"),
    [
        (remove(f"{GATE}.weight_packed"), f"{GATE}.weight_scale", "is not pack-quantized, as config.json says"),
        (remove(f"{GATE}.weight_scale"), GATE, "needs a tensor weight_scale beside it, which is missing"),
        (remove(f"{GATE}.weight_shape"), GATE, "needs a tensor weight_shape beside it, which is missing"),
        (remove(f"{GATE}.weight_zero_point"), GATE, "needs a tensor weight_zero_point beside it, which is missing"),
        (remove(f"{DOWN}.weight"), f"{DOWN}.weight_scale", "needs a tensor weight beside it, which is missing"),
        (
            add(f"{DOWN}.weight_zero_point", "I8", np.zeros((128, 1), np.int8)),
            f"{DOWN}.weight_zero_point",
            "does not belong to a weight that is int-quantized, symmetric, with a scale per channel",
        ),
        (add(f"{DOWN}.weight_shape", "I64", np.array([128, 128])), f"{DOWN}.weight_shape", "does not belong to"),
        (add(f"{DOWN}.weight_g_idx", "I32", ORDER), f"{DOWN}.weight_g_idx", "does not belong to"),
        (add(f"{GATE}.weight", "BF16", np.zeros((128, 128), np.uint16)), f"{GATE}.weight", "does not belong to"),
        (add(f"{GATE}.weight_x", "I32", ORDER), f"{GATE}.weight_x", "does not belong to"),
        (edit(f"{GATE}.weight_packed", lambda values: values[:, :-1]), f"{GATE}.weight_shape", "is [128, 128], but"),
        (edit(f"{GATE}.weight_packed", lambda values: values[:-1]), f"{GATE}.weight_shape", "is [128, 128], but"),
        (edit(f"{GATE}.weight_packed", lambda values: values[0]), f"{GATE}.weight_packed", "is I32 [16], expected"),
        (edit(f"{GATE}.weight_packed", lambda values: values[:0]), f"{GATE}.weight_packed", "is I32 [0, 16], expected"),
        (
            edit(f"{GATE}.weight_shape", lambda values: values + np.array([0, 9])),
            f"{GATE}.weight_shape",
            "is [128, 137]",
        ),
        (edit(f"{GATE}.weight_shape", lambda values: values * 0), f"{GATE}.weight_shape", "is [0, 0], but"),
        (edit(f"{GATE}.weight_shape", lambda values: -values), f"{GATE}.weight_shape", "is [-128, -128], but"),
        (edit(f"{GATE}.weight_shape", lambda values: values[:1]), f"{GATE}.weight_shape", "is I64 [1], expected"),
        (add(f"{GATE}.weight_shape", "F32", np.ones(2, "f4")), f"{GATE}.weight_shape", "is F32 [2], expected"),
        (edit(f"{GATE}.weight_scale", lambda values: values[:, :1]), f"{GATE}.weight_scale", "expected BF16 or F16"),
        (edit(f"{GATE}.weight_scale", lambda values: values.T), f"{GATE}.weight_scale", "is BF16 [2, 128], expected"),
        (add(f"{GATE}.weight_scale", "I8", np.ones((128, 2), "i1")), f"{GATE}.weight_scale", "is I8 [128, 2], exp"),
        (edit(f"{V}.weight_zero_point", lambda values: values[1:]), f"{V}.weight_zero_point", "is I32 [15, 4], exp"),
        (add(f"{V}.weight_zero_point", "I8", np.ones((64, 4), "i1")), f"{V}.weight_zero_point", "is I8 [64, 4], exp"),
        (put(f"{GATE}.weight_scale", 0), f"{GATE}.weight_scale", "has a scale that is not above 0"),
        (put(f"{GATE}.weight_scale", 0x8000), f"{GATE}.weight_scale", "has a scale that is not above 0"),
        (put(f"{GATE}.weight_scale", 0x7F80), f"{GATE}.weight_scale", "has a scale that is not above 0"),
        (put(f"{GATE}.weight_scale", 0x7FC0), f"{GATE}.weight_scale", "has a scale that is not above 0"),
        (put(f"{DOWN}.weight_scale", 0xFFC0), f"{DOWN}.weight_scale", "has a scale that is not above 0"),
        (put(f"{SIXTEENS}.weight_scale", 0x7E00), f"{SIXTEENS}.weight_scale", "has a scale that is not above 0"),
        (put(f"{SIXTEENS}.weight_scale", 0x4B00), f"{SIXTEENS}.weight_scale", "belongs to weights that are too large"),
        (add(f"{SIXTEENS}.weight_g_idx", "I32", ORDER + 1), f"{SIXTEENS}.weight_g_idx", "has a group that is not one"),
        (add(f"{SIXTEENS}.weight_g_idx", "I32", ORDER - 1), f"{SIXTEENS}.weight_g_idx", "has a group that is not one"),
        (add(f"{SIXTEENS}.weight_g_idx", "I32", ORDER[:-1]), f"{SIXTEENS}.weight_g_idx", "is I32 [127], expected"),
        (add(f"{SIXTEENS}.weight_g_idx", "F32", ORDER.astype("f4")), f"{SIXTEENS}.weight_g_idx", "is F32 [128], exp"),
        (of_config(ignore=[GATE]), GATE, "has codes, but config.json says that it is not quantized"),
        (of_config(ignore=["re:.*gate"]), GATE, "has codes, but config.json says that it is not quantized"),
        (of_config(ignore=["Linear"]), "", "has codes, but config.json says that it is not quantized"),
        (of_group(1, targets=["re:.*up_proj"]), GATE, "has codes, but config.json says that it is not quantized"),
        (of_group(1, format="int-quantized"), GATE, "is not int-quantized, as config.json says"),
        (of_group(2, format="pack-quantized"), DOWN, "is not pack-quantized, as config.json says"),
        (of_weights(1, num_bits=8), f"{GATE}.weight_shape", "is [128, 128], but"),
        (of_weights(1, symmetric=True), f"{GATE}.weight_zero_point", "does not belong to"),
        (of_weights(1, group_size=96), f"{GATE}.weight_packed", "has 128 inputs, which groups of 96 do not divide"),
        (of_weights(1, group_size=32), f"{GATE}.weight_scale", "is BF16 [128, 2], expected"),
        (of_weights(1, strategy="channel"), f"{GATE}.weight_scale", "is BF16 [128, 2], expected"),
        (of_weights(2, num_bits=4), f"{DOWN}.weight", "has a code that is not one of -8..7"),
        (of_weights(2, type="float"), DOWN, "FP8"),
    ],
)
def test_tensors_that_contradict_config_json_or_each_other_are_refused(
    change: Change, tensor: str, problem: str, tmp_path: Path
) -> None:
    folder = copy_of("llama_mixed", tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        weights_of(folder)
    message = str(caught.value)
    assert f"{folder}/model.safetensors: tensor {tensor}" in message and problem in message and "\n" not in message


@pytest.mark.parametrize("place", ["weight", "weight_zero_point"])
def test_plain_codes_and_zero_points_that_have_more_than_four_bits_are_refused(place: str, tmp_path: Path) -> None:
    for value in (8, -9):
        folder = copy_of("llama_w4a8", tmp_path / str(value), put(f"{GATE}.{place}", value))
        with pytest.raises(ConfigError, match=rf"tensor {GATE}.{place} has .* not one of -8..7"):
            weights_of(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_config(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported"),
        (of_config(format="mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not supported"),
        (of_config(format="marlin-24"), "format 'marlin-24' is not supported"),
        (of_config(format="dense"), "format 'dense' is not supported"),
        (of_group(3, format="sparse-24-bitmask"), "format 'sparse-24-bitmask' is not supported"),
        (of_config(sparsity_config={"format": "sparse-24-bitmask"}), "with sparse weights ('sparse-24-bitmask')"),
        (of_config(transform_config={"config_groups": {"u": {}}}), "with transforms (transform_config)"),
        (of_weights(0, num_bits=2), "integers of 2 bits are not supported"),
        (of_weights(0, num_bits=3), "integers of 3 bits are not supported"),
        (of_weights(0, num_bits=6), "integers of 6 bits are not supported"),
        (of_weights(0, type="float"), "floating-point numbers of 4 bits are not supported"),
        (of_weights(0, strategy="tensor_group"), "integers of 4 bits with a scale per 'tensor_group' are not"),
        (of_weights(0, strategy="block", block_structure=[8, 8]), "integers of 4 bits with a scale per 'block'"),
        (of_weights(2, type="float", strategy="tensor"), "of 8 bits with a scale per 'tensor' are not supported"),
        (
            of_weights(2, type="float", strategy="block", block_structure=[64, 128]),
            "blocks of [64, 128] are not supported, only [128, 128]",
        ),
        (of_weights(0, group_size=None), "needs the size of a group"),
        (of_weights(0, group_size=0), "needs the size of a group"),
        (of_weights(0, num_bits="4"), "group_0.weights.num_bits: "),
        (of_weights(0, symmetric="x"), "group_0.weights.symmetric: "),
        (of_group(0, weights=[4]), "group_0.weights: "),
        (of_group(0, targets="Linear"), "group_0.targets: "),
        (of_group(0, targets=["re:("]), "'re:(' is no regular expression"),
        (of_config(ignore=["re:a{99999999999}"]), "'re:a{99999999999}' is no regular expression"),
        (of_config(ignore="lm_head"), "quantization_config.ignore: "),
        (of_config(config_groups={}), "config_groups: expected a scheme for some modules, got none"),
        (of_config(config_groups=[1]), "quantization_config.config_groups: "),
        (of_config(config_groups={"W4A16": ["Linear"]}), "config_groups.W4A16: expected an object"),
        (of_group(2, input_activations={"num_bits": "8"}), "group_2.input_activations.num_bits: "),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name_before_any_tensor_is_read(
    change: Change, message: str, tmp_path: Path
) -> None:
    folder = copy_of("llama_mixed", tmp_path, change)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_pretrained(folder)
    found = str(caught.value)
    assert message in found and found.startswith("quantization_config") and f"{folder}/config.json" in found
