# SPDX-License-Identifier: Apache-2.0
"""PyTorch files of draft heads are found and read without torch, within their bounds."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config import torch_files
from fastdeploy.config.torch_files import find_torch_files, read_head_headers, read_torch_file, read_torch_headers
from fastdeploy.core.errors import ConfigError
from tests.config.torch_writer import (
    GOLDEN,
    SIX,
    WEIGHT,
    Stored,
    dictionary,
    mutate,
    pickle_of,
    refusal,
    tensor,
    write_container,
    write_pickle,
    write_torch_file,
)

DTYPES = {
    **{"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"},
    **{"int64": "I64", "int32": "I32", "bool": "BOOL"},
}


def shape_of(values: Any) -> tuple[int, ...]:
    return (len(values), *shape_of(values[0])) if isinstance(values, list) else ()


@pytest.mark.parametrize("file", ["protocol_2.bin", "protocol_4.pt"])
def test_files_of_torch_have_the_tensors_that_torch_reads(file: str) -> None:
    expected = json.loads((GOLDEN / "values.json").read_text())[file]
    tensors = read_torch_file(GOLDEN / file)
    assert {key: (found.dtype, found.shape) for key, found in tensors.items()} == {
        key: (DTYPES[found["dtype"]], shape_of(found["values"])) for key, found in expected.items()
    }


def test_a_written_file_has_the_places_of_its_tensors(tmp_path: Path) -> None:
    content = bytes(range(24))
    stored = {"a": Stored("F32", (2, 3), content), "b": Stored("BF16", (2,), b"wxyz"), "c": Stored("I64", (0, 3))}
    file = write_torch_file(tmp_path / "x.bin", stored)
    tensors = read_torch_file(file)
    assert [file.read_bytes()[found.begin :][: found.num_bytes] for found in tensors.values()] == [
        content,
        b"wxyz",
        b"",
    ]
    assert [(found.dtype, found.shape, found.strides) for found in tensors.values()] == [
        ("F32", (2, 3), (3, 1)),
        ("BF16", (2,), (1,)),
        ("I64", (0, 3), (3, 1)),
    ]


def test_tensors_without_elements_overlap_nothing(tmp_path: Path) -> None:
    items = {"a": tensor(SIX, 6, (0, 3), (0, 0)), "b": tensor(SIX, 0, (1, 1, 6), (0, 0, 1))}
    tensors = read_torch_file(write_pickle(tmp_path, pickle_of(dictionary(items))))
    assert [found.shape for found in tensors.values()] == [(0, 3), (1, 1, 6)]


def test_two_tensors_may_share_a_storage_and_one_may_begin_within_it(tmp_path: Path) -> None:
    items = {"a": WEIGHT, "b": tensor(SIX, 2, (4,), (1,)), "c": tensor(SIX, 0, (3, 2), (1, 3))}
    tensors = read_torch_file(write_pickle(tmp_path, pickle_of(dictionary(items))))
    assert tensors["b"].begin == tensors["a"].begin + 8 and tensors["c"].begin == tensors["a"].begin


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "message"),
    [
        (1, (2, 3), (3, 1), "takes 7 elements of a storage of 6"),
        (0, (3, 3), (3, 1), "takes 9 elements of a storage of 6"),
        (0, (2, 2), (5, 1), "takes 7 elements of a storage of 6"),
        (7, (0,), (1,), "takes 7 elements of a storage of 6"),
        (0, (2**40,), (0,), "overlaps itself"),
        (0, (2, 3), (0, 1), "overlaps itself"),
        (0, (2, 3), (1, 1), "overlaps itself"),
        (0, (2, 3), (2, 1), "overlaps itself"),
        (-1, (2,), (1,), "an offset, a shape or strides that are not valid"),
        (0, (-2,), (1,), "an offset, a shape or strides that are not valid"),
        (5, (6,), (-1,), "an offset, a shape or strides that are not valid"),
        (0, (2,), (1, 1), "an offset, a shape or strides that are not valid"),
        (0, (2**62, 2**62), (1, 1), "an offset, a shape or strides that are not valid"),
        (0, (1,) * 9, (1,) * 9, "an offset, a shape or strides that are not valid"),
    ],
)
def test_tensors_outside_their_storage_or_with_elements_twice_are_refused(
    tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], message: str
) -> None:
    pickled = pickle_of(dictionary({"a": tensor(SIX, offset, shape, strides)}))
    assert message in refusal(write_pickle(tmp_path, pickled))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"data/0": bytes(23)}, "data/0 has 23 bytes, expected 24"),
        ({"data/0": bytes(25)}, "data/0 has 25 bytes, expected 24"),
        ({"data/1": bytes(24)}, "has no member data/0"),
        ({"data/0": bytes(24), "byteorder": b"big"}, "has the byte order b'big', expected little"),
        ({"data/0": bytes(24), "data.pkl": bytes(2**21 + 1)}, "data.pkl has 2097153 bytes, expected at most 2097152"),
    ],
)
def test_wrong_members_are_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    pickled = {"data.pkl": pickle_of(dictionary({"a": WEIGHT}))}
    assert message in refusal(write_container(tmp_path / "x.bin", {**pickled, **members}))


def test_a_compressed_member_is_refused_with_what_to_do(tmp_path: Path) -> None:
    members: dict[str, bytes | int] = {"data.pkl": pickle_of(dictionary({"a": WEIGHT})), "data/0": bytes(24)}
    message = refusal(write_container(tmp_path / "x.bin", members, zipfile.ZIP_DEFLATED))
    assert "data.pkl is compressed or encrypted" in message and "safetensors.torch.save_file" in message


def test_the_format_before_pytorch_1_6_is_refused_with_what_to_do() -> None:
    message = refusal(GOLDEN / "legacy.bin")
    assert "legacy.bin is a bare pickle, the format of PyTorch before 1.6" in message
    assert "load it with torch and write it with safetensors.torch.save_file" in message


@pytest.mark.parametrize("content", [b"", b"P", b"GGUF", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"\x00" * 100])
def test_files_that_are_no_containers_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    assert "x.pt" in refusal(tmp_path / "x.pt")


def test_files_of_other_formats_are_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"GGUF" + bytes(100))
    assert "x.bin is not a file of torch.save: it is no zip container" in refusal(tmp_path / "x.bin")


def test_a_member_without_its_header_is_refused(tmp_path: Path) -> None:
    file = write_pickle(tmp_path, pickle_of(dictionary({"a": WEIGHT})))
    content = file.read_bytes()
    at = content.index(b"PK\x03\x04", 4)  # of the storage
    file.write_bytes(content[:at] + b"XX" + content[at + 2 :])
    assert "the zip container is damaged: data/0 has no header" in refusal(file)


def test_a_container_with_too_many_members_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_pickle(tmp_path, pickle_of(dictionary({"a": WEIGHT})))
    assert read_torch_file(file)
    monkeypatch.setattr(torch_files, "_MAX_READ", 100)
    message = refusal(file)
    assert "a description of " in message and " bytes, expected at most 100" in message


def test_a_container_without_a_folder_of_torch_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("a/b/data.pkl", pickle_of(b"}"))
        archive.writestr("xdata.pkl", pickle_of(b"}"))
    assert "it has no data.pkl in its only folder" in refusal(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["pytorch_model.bin", "optimizer.bin", "other.bin"], ["pytorch_model.bin"]),
        (["medusa_lm_head.pt", "training_args.bin", "optimizer.pt", "scheduler.pt"], ["medusa_lm_head.pt"]),
        (["a.bin", "rng_state_0.pt", "rng_state.pt", "scaler.pt", "sampler.bin"], ["a.bin"]),
        (["optimizer.pt", "model.pth", "config.json"], []),
        ([], []),
    ],
)
def test_the_state_of_a_training_holds_no_weights(tmp_path: Path, files: list[str], found: list[str]) -> None:
    for file in files:
        (tmp_path / file).touch()
    assert [path.name for path in find_torch_files(tmp_path)] == found


def test_shards_are_those_of_the_index_and_hold_a_tensor_once(tmp_path: Path) -> None:
    for shard in ("1", "2"):
        write_torch_file(tmp_path / f"pytorch_model-{shard}.bin", {f"layers.{shard}.x": Stored("F32", (1,))})
    with pytest.raises(ConfigError, match=r"contains 2 PyTorch files but no pytorch_model\.bin\.index\.json"):
        read_torch_headers(tmp_path)
    weight_map = {"layers.1.x": "pytorch_model-1.bin", "layers.2.x": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert list(read_torch_headers(tmp_path)) == ["model.layers.1.x", "model.layers.2.x"]
    write_torch_file(tmp_path / "pytorch_model-2.bin", {"model.layers.1.x": Stored("F32", (1,))})
    with pytest.raises(ConfigError, match=r"tensor model.layers.1.x is in both pytorch_model-1.bin and .*model-2.bin"):
        read_torch_headers(tmp_path)
    (tmp_path / "pytorch_model-2.bin").unlink()
    with pytest.raises(ConfigError, match=r"names files that do not exist: pytorch_model-2\.bin"):
        read_torch_headers(tmp_path)


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    header = b'{"fc.weight": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}'
    write_torch_file(tmp_path / "pytorch_model.bin", {"other": Stored("F32", (1,))})
    assert list(read_head_headers(tmp_path)) == ["other"]
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert list(read_head_headers(tmp_path)) == ["fc.weight"]


def test_mutated_containers_give_an_error_or_places_within_the_file(tmp_path: Path) -> None:
    content, chance, num_read = (GOLDEN / "protocol_4.pt").read_bytes(), random.Random(3), 0
    for _ in range(200):
        mutated = mutate(chance, content)
        (tmp_path / "x.bin").write_bytes(mutated)
        try:
            found = read_torch_file(tmp_path / "x.bin")
        except ConfigError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
            continue
        num_read += 1
        assert all(0 < place.begin <= place.begin + place.num_bytes <= len(mutated) for place in found.values())
    assert 10 < num_read < 190, "both happen often"
