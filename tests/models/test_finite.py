# SPDX-License-Identifier: Apache-2.0
"""Weights that are not finite are found, wherever they are, and refused by the name of their tensor."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.models.finite import find_not_finite, is_finite
from tests.models.test_loader import Tensors, copy_of, load, refusal

BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}
LARGEST = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7F7FFF}  # the next one is infinite in bfloat16


def tensor_of(bits: np.ndarray, dtype: str) -> paddle.Tensor:
    """Return a tensor with this memory."""
    if dtype == "bfloat16":
        tensor = paddle.zeros(list(bits.shape), dtype)
        tensor.set_value(bits)
        return tensor
    return paddle.to_tensor(bits.view(dtype))


@pytest.mark.parametrize("dtype", BITS)
def test_values_up_to_the_largest_are_finite_and_all_beyond_are_not(dtype: str) -> None:
    largest, kind = LARGEST[dtype], BITS[dtype]
    sign, last = 1 << (8 * np.dtype(kind).itemsize - 1), (1 << (8 * np.dtype(kind).itemsize - 1)) - 1
    for magnitude in (0, 1, largest - 1, largest, largest + 1, largest + 2, last):
        for bits in (magnitude, sign | magnitude):
            assert is_finite(tensor_of(np.array([bits], kind), dtype)) is (magnitude <= largest), hex(bits)


def test_two_codes_of_fp8_are_not_finite_and_all_integers_are() -> None:
    codes = [paddle.to_tensor(np.array([code], np.uint8)).view(paddle.float8_e4m3fn) for code in range(256)]
    assert [code for code, tensor in enumerate(codes) if not is_finite(tensor)] == [0x7F, 0xFF]
    assert find_not_finite({str(code): tensor for code, tensor in enumerate(codes)}) == "127"
    assert is_finite(paddle.full([4], -1, "int32")) and find_not_finite({"x": paddle.full([4], 255, "uint8")}) is None


def check_random_tensors(num_tensors: int, seed: int) -> None:
    """Check tensors with at most one value that is not finite against NumPy."""
    chance, generator = random.Random(seed), np.random.default_rng(seed)
    for _ in range(num_tensors):
        dtype = chance.choice(list(BITS))
        kind, largest = BITS[dtype], LARGEST[dtype]
        size = chance.choice([1, 7, 2**10, 2**17 + 1, 2**22 + 5])
        bits = generator.integers(0, largest + 1, size, kind, endpoint=False)
        bits |= generator.integers(0, 2, size, kind) << kind(8 * np.dtype(kind).itemsize - 1)
        assert is_finite(tensor_of(bits, dtype))
        bits[chance.randrange(size)] |= kind(largest + 1)
        assert not is_finite(tensor_of(bits, dtype)), (dtype, size)


def test_one_bad_value_anywhere_is_found() -> None:
    check_random_tensors(60, seed=1)


@pytest.mark.nightly
def test_one_bad_value_anywhere_is_found_in_a_thousand_tensors() -> None:
    check_random_tensors(1000, seed=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_checkpoint_with_such_a_value_is_refused_by_file_and_tensor(tmp_path: Path, name: str, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        values = tensors[name].astype("float32").numpy().copy()
        values.flat[-1] = value
        tensors[name] = paddle.to_tensor(values).astype(tensors[name].dtype)

    assert refusal(copy_of("qwen2", tmp_path, spoil)) == (
        f"model: {tmp_path}/model.safetensors: tensor {name} has values that are not finite"
    )


def test_tensors_that_the_model_does_not_use_are_not_checked(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = paddle.full([4], float("inf"), "float32")

    load(copy_of("qwen2", tmp_path, add))
