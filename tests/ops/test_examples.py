# SPDX-License-Identifier: Apache-2.0
"""Every operator of the registry: its CPU kernel against the reference, on the requested rows only."""

import importlib

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry

FAMILIES = "linear norm embedding gather attention latent_attention batch_index sampling verify drafting experts"
FAMILIES += " head_products logits"
for _family in FAMILIES.split():
    importlib.import_module(f"fastdeploy.ops.{_family}")

PREPARATION = {
    "pack_linear",
    "pack_gate",
    "pack_experts",
    "pack_heads",
    "allocate_kv_cache",
    "allocate_latent_cache",
    "first_outputs",
}  # run inside the examples of other operators
CASES = [(name, i) for name, entry in registry.entries().items() for i in range(len(entry.examples))]


def wide(tensor: paddle.Tensor) -> np.ndarray:
    return tensor.astype("float32").numpy()


def dtype_of(tensor: paddle.Tensor) -> str:
    return str(tensor.dtype).removeprefix("paddle.")


@pytest.mark.parametrize(("name", "index"), CASES)
def test_native_result_is_within_tolerance_of_the_reference(name: str, index: int) -> None:
    entry = registry.entries()[name]
    expected = entry.examples[index](registry.lookup("reference"))
    for got, want in zip(entry.examples[index](registry.lookup("cpu")), expected, strict=True):
        error = np.abs(wide(got) - wide(want)) / (1 + np.abs(wide(want)))
        assert error.max() <= entry.tolerance.get(dtype_of(got), 0.0)


def test_every_operator_has_examples() -> None:
    assert {name for name, entry in registry.entries().items() if not entry.examples} <= PREPARATION


def test_an_example_gives_the_same_bits_when_it_runs_twice() -> None:
    for name, entry in registry.entries().items():
        for example in entry.examples:
            first, second = (example(registry.lookup("cpu")) for _ in range(2))
            for a, b in zip(first, second, strict=True):
                assert np.array_equal(wide(a), wide(b), equal_nan=True), name
