# SPDX-License-Identifier: Apache-2.0
"""Heads that were packed into a file multiply like those that were packed at the start, or are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import paddle
import pytest

from fastdeploy.config.packed_checkpoint import DATA_FILE, PackedEntry, PackedHeader
from fastdeploy.config.quantization import UNQUANTIZED
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.expected_weights import ExpectedHeads
from fastdeploy.models.packed_store import PackedReader, PackedWriter
from fastdeploy.models.weights import _packed_layers
from fastdeploy.ops.backends.cpu.backend import BACKEND
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.head_products import PackedHeads, pack_heads, project_heads
from fastdeploy.ops.linear import WeightPiece
from fastdeploy.ops.quantized_form import FORMS
from tests.ops.bits import assert_same_bits, bits

HEADS, K, N, NAME = 3, 24, 40, "model.layers.0.self_attn.kv_b_proj.keys"


def heads(dtype: str, quantization: str) -> PackedHeads:
    matrices = [random_rows(N, K, dtype, head) for head in range(HEADS)]
    return pack_heads([[WeightPiece(matrix, 0, N)] for matrix in matrices], quantization)


def products(w: PackedHeads) -> paddle.Tensor:
    out = paddle.zeros([5, HEADS * N], w.dtype)
    project_heads(random_rows(5, HEADS * K, w.dtype, 9), w, out, 5)
    return out


def expected(dtype: str, quantization: str) -> ExpectedHeads:
    return ExpectedHeads(HEADS, K, N, dtype, FORMS.get(quantization))


def write(folder: Path, w: PackedHeads, expected: ExpectedHeads) -> tuple[PackedHeads, dict[str, PackedEntry], int]:
    """Write heads; return what the writer returns, the entries and the size of the file."""
    with (folder / DATA_FILE).open("wb") as file:
        writer = PackedWriter(file, folder / DATA_FILE)
        mapped = writer.keep(NAME, lambda: w, expected)
    return mapped, writer.entries, writer.num_bytes


def reader(folder: Path, dtype: str, entries: Mapping[str, PackedEntry], num_bytes: int) -> PackedReader:
    formats, layout = UNQUANTIZED, BACKEND.weight_layout
    return PackedReader(
        PackedHeader(layout, dtype, formats, "", num_bytes, num_bytes, (), formats, entries), folder, None, True
    )


def make() -> PackedHeads:
    raise AssertionError("the file has these heads")


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", "none"), *(("bfloat16", kind) for kind in ("none", *FORMS))]
)
def test_mapped_heads_have_the_bits_and_the_form_of_packed_ones(tmp_path: Path, dtype: str, quantization: str) -> None:
    packed, kind = heads(dtype, quantization), expected(dtype, quantization)
    written, entries, num_bytes = write(tmp_path, packed, kind)
    store = reader(tmp_path, dtype, entries, num_bytes)
    assert store.form(NAME, lambda: FORMS["wint8"]) == FORMS.get(quantization)
    mapped = store.keep(NAME, make, kind)
    for found in (written, mapped):
        assert replace(found, data=packed.data) == packed and found.num_bytes == packed.num_bytes
        assert_same_bits(bits(products(found)), bits(products(packed)), quantization)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_heads", 2, "has num_heads 2, config.json implies 3"),
        ("in_features", 40, "has in_features 40, config.json implies 24"),
        ("quantization", "wint8", "has quantization 'wint8', config.json implies wint4"),
        ("is_gated", False, "has an unknown field is_gated"),
    ],
)
def test_heads_that_do_not_fit_the_configuration_are_refused(
    tmp_path: Path, field: str, value: Any, problem: str
) -> None:
    kind = expected("bfloat16", "wint4")
    _, entries, num_bytes = write(tmp_path, heads("bfloat16", "wint4"), kind)
    changed = replace(entries[NAME], fields={**entries[NAME].fields, field: value})
    with pytest.raises(ConfigError, match=f"{NAME} {problem}"):
        reader(tmp_path, "bfloat16", {NAME: changed}, num_bytes).keep(NAME, make, kind)
    as_experts = replace(entries[NAME], kind="PackedExperts")
    with pytest.raises(ConfigError, match=f"{NAME} is a PackedExperts, expected a PackedHeads"):
        reader(tmp_path, "bfloat16", {NAME: as_experts}, num_bytes).keep(NAME, make, kind)


def test_changed_bytes_of_heads_are_refused(tmp_path: Path) -> None:
    kind = expected("bfloat16", "w8a8")
    _, entries, num_bytes = write(tmp_path, heads("bfloat16", "w8a8"), kind)
    data = bytearray((tmp_path / DATA_FILE).read_bytes())
    data[-1] ^= 1
    (tmp_path / DATA_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match=f"the bytes of {NAME} were changed"):
        reader(tmp_path, "bfloat16", entries, num_bytes).keep(NAME, make, kind)


def test_heads_belong_to_the_forms_of_a_model() -> None:
    packed = heads("bfloat16", "wint4")
    assert list(_packed_layers((packed, packed.data))) == [packed]
