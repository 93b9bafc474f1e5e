# SPDX-License-Identifier: Apache-2.0
"""Tensors of GGUF files are read where they lie, and only those rows that are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from paddle import Tensor

from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.folder import gguf_folder
from fastdeploy.models.files import open_files
from fastdeploy.models.gguf_source import GGUFSource
from tests.gguf.gguf_files import gguf_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' folders be derived in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def source_of(path: Path) -> GGUFSource:
    source = open_files(gguf_folder(path), "bfloat16")
    assert isinstance(source, GGUFSource)
    return source


def is_in_file(tensor: Tensor, path: Path) -> bool:
    """Return whether the memory of a tensor is the mapped file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith(path.name)
    return False


@pytest.mark.parametrize(
    ("file", "name", "dtype", "is_in_place"),
    [
        ("glm4moe_mtp", "model.embed_tokens.weight", "bfloat16", True),
        ("glm4moe_mtp", "model.layers.1.mlp.experts.2.up_proj.weight", "bfloat16", True),
        ("glm4moe_mtp", "model.layers.1.mlp.experts.2.up_proj.weight", "float32", False),
        ("llama_f32", "model.layers.0.self_attn.v_proj.weight", "float32", True),
        ("llama_f32", "model.layers.0.self_attn.v_proj.weight", "bfloat16", False),
        ("llama_f32", "model.layers.0.self_attn.q_proj.weight", "float32", False),
    ],
    ids=["table", "expert", "expert that is widened", "f32", "f32 that is rounded", "rows in another order"],
)
def test_values_that_are_stored_as_they_are_used_are_not_copied(
    file: str, name: str, dtype: str, is_in_place: bool
) -> None:
    path = gguf_path(file)
    (piece,) = source_of(path).pieces(name, dtype)
    assert is_in_file(piece.matrix, path) == is_in_place


def test_tensors_in_the_file_outlive_the_source_and_their_pages() -> None:
    source = source_of(gguf_path("llama_f32"))
    norm = source.read("model.norm.weight")
    expected = norm.numpy().copy()
    source.release("model.norm.weight")
    del source
    assert expected.any() and np.array_equal(norm.numpy(), expected)


def test_a_row_with_a_bad_scale_is_named_by_its_place_in_the_file_when_it_is_read(tmp_path: Path) -> None:
    file, content = GGUFFile.open(gguf_path("llama_groups")), bytearray(gguf_path("llama_groups").read_bytes())
    name, num_heads = "blk.0.attn_k.weight", file.metadata["llama.attention.head_count_kv"]
    tensor = file.tensors[name]
    begin = tensor.offset + 3 * tensor.row_bytes
    content[begin : begin + 2] = b"\0\x7c"  # an infinite scale
    (tmp_path / "bad.gguf").write_bytes(content)
    codes = source_of(tmp_path / "bad.gguf").coded("model.layers.0.self_attn.k_proj.weight")
    row = tensor.shape[0] // num_heads // 2 + 1  # the first rows of all pairs of a head come before the second ones
    codes.outputs(0, row)
    with pytest.raises(ConfigError, match=rf"bad\.gguf: tensor {name} has a value in row 3 that is not finite"):
        codes.outputs(row, row + 1)
