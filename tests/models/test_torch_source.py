# SPDX-License-Identifier: Apache-2.0
"""The tensors of PyTorch files: values, checks, and memory."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastdeploy.core.errors import ConfigError
from fastdeploy.models.files import open_files, open_head_files
from fastdeploy.models.torch_source import TorchSource
from fastdeploy.models.weight_source import digest_weight_files
from tests.config.torch_writer import (
    Stored,
    dictionary,
    pickle_of,
    storage,
    tensor,
    write_container,
    write_torch_file,
)
from tests.models.model_driver import GOLDEN

KINDS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32"}


def folder_with(folder: Path, file: str) -> Path:
    shutil.copy(GOLDEN / "torch_files" / file, folder)
    return folder


def write_floats(folder: Path, **values: list[float]) -> Path:
    contents = {name: struct.pack(f"<{len(numbers)}f", *numbers) for name, numbers in values.items()}
    stored = {name: Stored("F32", (len(values[name]),), content) for name, content in contents.items()}
    write_torch_file(folder / "pytorch_model.bin", stored)
    return folder


@pytest.mark.parametrize("file", ["protocol_2.bin", "protocol_4.pt"])
def test_files_of_torch_have_the_values_that_torch_reads(tmp_path: Path, file: str) -> None:
    expected: dict[str, Any] = json.loads((GOLDEN / "torch_files" / "values.json").read_text())[file]
    source = open_head_files(folder_with(tmp_path, file))
    assert set(source.shapes) == set(expected) and source.header_formats == {"pt"}
    for name, found in expected.items():
        values = source.read(name)
        assert (values.dtype.name.lower(), source.kind(name)) == (found["dtype"], KINDS.get(found["dtype"], "BOOL"))
        assert values.astype("float64").tolist() == found["values"] and tuple(values.shape) == source.shapes[name]


def test_a_matrix_of_the_dtype_of_the_run_is_not_copied_and_a_transposed_one_is(tmp_path: Path) -> None:
    matrix = tensor(storage("BF16", "0", 6), 0, (2, 3), (3, 1))
    transposed = tensor(storage("BF16", "0", 6), 0, (3, 2), (1, 3))
    pickled = pickle_of(dictionary({"a": matrix, "b": transposed}))
    content = np.arange(1, 7, dtype=np.float32).view(np.uint16)[1::2].tobytes()
    write_container(tmp_path / "pytorch_model.bin", {"data.pkl": pickled, "data/0": content})
    source = TorchSource(tmp_path)
    first, again = (source.pieces("a", "bfloat16")[0].matrix for _ in range(2))
    assert first.data_ptr() == again.data_ptr() == source.read("a").data_ptr()
    assert source.read("b").data_ptr() != source.read("a").data_ptr()
    assert source.read("b").tolist() == source.read("a").T.tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_values_that_are_not_finite_are_refused_with_file_and_name(tmp_path: Path, value: float) -> None:
    source = open_head_files(write_floats(tmp_path, good=[1.0], bad=[0.0, value]))
    source.prepare(["good"])
    for use in (lambda: source.read("bad"), lambda: source.prepare(["good", "bad"])):
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin: tensor bad has values that are not finite"):
            use()


def test_tensors_are_renamed_left_out_and_released(tmp_path: Path) -> None:
    source = open_head_files(write_floats(tmp_path, a=[1.0], b=[2.0], c=[3.0]))
    source.rename("a", "d")
    source.leave_out(["b"])
    assert set(source.shapes) == {"c", "d"} and source.read("d").tolist() == [1.0] and source.kind("d") == "F32"
    source.release("d")
    assert source.read("c").tolist() == [3.0]
    assert source.form("c") is None and source.fidelity("c") == "plain"


def test_tensors_without_elements_have_a_shape_and_cannot_be_read(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "x.bin", {"a": Stored("F32", (0, 3))})
    source = open_head_files(tmp_path)
    assert source.shapes == {"a": (0, 3)}
    with pytest.raises(ConfigError, match=r"x\.bin: tensor a is empty"):
        source.read("a")


def test_names_are_the_usual_ones_and_buffers_are_left_out(tmp_path: Path) -> None:
    names = ("layers.0.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.q_proj.weight", "fc.weight")
    write_torch_file(tmp_path / "x.pt", {name: Stored("F32", (1,)) for name in names})
    assert set(open_head_files(tmp_path).shapes) == {"model.layers.0.self_attn.q_proj.weight", "fc.weight"}


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    write_torch_file(tmp_path / "x.bin", {"fc.qweight": Stored("I64", (1,)), "fc.qzeros": Stored("I64", (1,))})
    with pytest.raises(ConfigError, match=r"x\.bin: weights .*fc\.q"):
        open_head_files(tmp_path)


def test_safetensors_of_a_head_are_preferred_and_may_hold_ids_and_flags(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "protocol_2.bin")
    tensors = {"d2t": np.array([0, 2**40]), "t2d": np.array([True, False]), "fc.weight": np.ones((1, 2), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    source = open_head_files(folder)
    assert {name: source.read(name).tolist() for name in source.shapes} == {
        "d2t": [0, 2**40],
        "t2d": [True, False],
        "fc.weight": [[1.0, 1.0]],
    }
    with pytest.raises(ConfigError, match=r"is stored as (?:I64|BOOL), expected one of"):
        open_files(folder)


def test_a_folder_without_weights_names_the_formats_of_heads(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(ConfigError, match=r"contains no \*\.safetensors, \*\.bin or \*\.pt"):
        open_head_files(tmp_path)


@pytest.mark.parametrize("file", ["protocol_2.bin", "protocol_4.pt"])
def test_the_model_itself_is_not_read_from_pytorch_files(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError, match=r"PyTorch pickle .* checkpoints are not supported"):
        open_files(folder_with(tmp_path, file))


def test_the_digest_tells_heads_apart_and_that_of_safetensors_ignores_other_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for value, folder in enumerate((one, two)):
        folder.mkdir()
        write_floats(folder, a=[float(value)])
    digests = digest_weight_files(one), digest_weight_files(two)
    assert digests[0] != digests[1]
    (one / "optimizer.pt").write_bytes(b"x")
    assert digest_weight_files(one) == digests[0]
    save_file({"a": np.ones(1, np.float32)}, one / "model.safetensors")
    with_safetensors = digest_weight_files(one)
    (one / "pytorch_model.bin").unlink()
    assert digest_weight_files(one) == with_safetensors != digests[0]
