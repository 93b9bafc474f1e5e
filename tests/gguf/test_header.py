# SPDX-License-Identifier: Apache-2.0
"""Headers of GGUF files are read as the format says, and refused in one line where they are not as it says."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import GGML_TYPES
from fastdeploy.gguf import header as reader
from fastdeploy.gguf.file import GGUFFile, part_name
from fastdeploy.gguf.header import read_header
from tests.gguf.files import aligned, header, info, make_gguf, text, value, write

METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "ü", "", "<|end|>"],
    "tokenizer.ggml.token_type": [1, 2, 3],
    "flags": [True, False],
    "empty": [],
    "large": 2**40,
    "general.name": "x" * 1000,
}
TENSORS = [
    ("token_embd.weight", (7, 64), "Q4_0"),
    ("blk.0.ffn_up_exps.weight", (3, 5, 256), "Q6_K"),
    ("n", (9,), "F32"),
]


def refused(tmp_path: Path, content: bytes, *words: str) -> None:
    path = write(tmp_path / "m.gguf", content)
    with pytest.raises(ConfigError) as error:
        read_header(path)
    assert str(path) in error.value.message and "\n" not in error.value.message
    for word in words:
        assert word in error.value.message


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path, version: int) -> None:
    content = bytearray(make_gguf(METADATA, TENSORS, 64))
    content[4:8] = struct.pack("<I", version)
    path = write(tmp_path / "m.gguf", bytes(content))
    found = read_header(path)
    assert found.metadata == METADATA
    assert [(t.name, t.shape, t.kind.name) for t in found.tensors.values()] == TENSORS
    first, second, third = found.tensors.values()
    assert first.offset % 64 == 0 and first.offset >= found.num_bytes > first.offset - 64
    assert (first.row_bytes, first.num_bytes) == (36, 7 * 36) and second.num_bytes == 15 * 210
    assert second.offset == first.offset + 256 and third.offset + third.num_bytes <= path.stat().st_size


def test_files_that_are_no_gguf_of_a_known_kind_are_refused(tmp_path: Path) -> None:
    good = make_gguf(METADATA, TENSORS, 64)
    refused(tmp_path, b"", "is empty")
    refused(tmp_path, b"GGML" + good[4:], "no GGUF file")
    refused(tmp_path, b"GGUF", "incomplete")
    refused(tmp_path, b"GGUF" + struct.pack("<I", 1) + good[8:], "version 1", "2 or 3")
    refused(tmp_path, b"GGUF" + struct.pack(">I", 3) + good[8:], "big-endian")
    with pytest.raises(ConfigError, match="cannot read"):
        read_header(tmp_path / "missing.gguf")
    with pytest.raises(ConfigError, match="cannot read"):
        read_header(tmp_path)


@pytest.mark.parametrize("length", [5, 23, 30, 100, 700, 1300])
def test_a_truncated_header_is_refused(tmp_path: Path, length: int) -> None:
    content = make_gguf(METADATA, TENSORS, 64)
    assert length < read_header(write(tmp_path / "good.gguf", content)).num_bytes
    refused(tmp_path, content[:length])


def test_truncated_data_is_refused_by_its_tensor(tmp_path: Path) -> None:
    refused(tmp_path, make_gguf(METADATA, TENSORS, 64)[:-65], "incomplete", "tensor n ends at byte")


def test_counts_that_the_file_does_not_hold_allocate_nothing(tmp_path: Path) -> None:
    huge = 2**60
    refused(tmp_path, header({}, [], counts=(huge, 0)), "do not fit")
    refused(tmp_path, header({}, [], counts=(0, huge)), "do not fit")
    array = struct.pack("<IIQ", 9, 8, 2**21)
    refused(tmp_path, header({}, [text("a") + array], counts=(0, 1)), "incomplete")
    refused(tmp_path, header({}, [text("a") + struct.pack("<IIQ", 9, 0, huge)], counts=(0, 1)), "metadata a", "at most")
    refused(tmp_path, header({}, [text("a") + struct.pack("<IQ", 8, huge)], counts=(0, 1)), "metadata a", "bytes")
    refused(tmp_path, header({}, [text("a") + struct.pack("<IIQ", 9, 9, 1)], counts=(0, 1)), "list of lists")
    refused(tmp_path, header({}, [text("a") + struct.pack("<IIQ", 9, 77, 1)], counts=(0, 1)), "unknown type 77")
    refused(tmp_path, header({}, [text("a") + struct.pack("<II", 77, 1)], counts=(0, 1)), "unknown type 77")


def test_a_header_that_is_too_long_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 500)
    refused(tmp_path, make_gguf(METADATA, TENSORS, 64), "more than 500 bytes")


@pytest.mark.parametrize(
    ("entries", "word"),
    [
        ([text("a") + value(1), text("a") + value(2)], "metadata a is there twice"),
        ([text(b"\xff\xfe") + value(1)], "not UTF-8"),
        ([text("a") + struct.pack("<I", 8) + text(b"\xff")], "metadata a is not UTF-8"),
        ([text("a") + struct.pack("<IIQ", 9, 8, 2) + text("b") + text(b"\xff")], "metadata a, item 1 is not UTF-8"),
        ([text("a") + struct.pack("<IB", 7, 2)], "expected 0 or 1"),
        ([text("general.alignment") + value(24)], "general.alignment: expected a power of two"),
        ([text("general.alignment") + value(0)], "general.alignment"),
        ([text("general.alignment") + value("64")], "general.alignment"),
    ],
)
def test_bad_metadata_is_refused_by_its_key(tmp_path: Path, entries: list[bytes], word: str) -> None:
    refused(tmp_path, aligned(header({}, entries, counts=(0, len(entries)))), word)


Q4_0, F32 = GGML_TYPES["Q4_0"].type_id, GGML_TYPES["F32"].type_id


@pytest.mark.parametrize(
    ("infos", "word"),
    [
        ([info("t", (2, 33), Q4_0, 0)], "rows of 33 values"),
        ([info("t", (2, 32), 4, 0)], "type 4, which is not supported"),
        ([info("t", (2, 32), 9999, 0)], "type 9999"),
        ([info("t", (0, 32), F32, 0)], "shape [0, 32]"),
        ([info("t", (2**30, 2**30, 32), F32, 0)], "shape"),
        ([info("t", (1, 1, 1, 1, 1), F32, 0)], "5 dimensions"),
        ([info("t", (), F32, 0)], "0 dimensions"),
        ([info("t", (8,), F32, 3)], "no multiple of the alignment"),
        ([info("t", (8,), F32, 0), info("t", (8,), F32, 32)], "tensor t is there twice"),
        ([info("t", (16,), F32, 0), info("u", (8,), F32, 32)], "tensors t and u overlap"),
        ([info("t", (8,), F32, 2**40)], "incomplete: tensor t"),
        ([info("a\nb", (8,), F32, 2**40)], r"tensor 'a\nb'"),
        ([info("x" * 65, (8,), F32, 0)], "at most 64"),
    ],
)
def test_bad_tensors_are_refused_by_name(tmp_path: Path, infos: list[bytes], word: str) -> None:
    refused(tmp_path, aligned(header({}, infos)) + bytes(1024), word)


def parts(folder: Path, count: int, **changed: object) -> Path:
    """Write the parts of a model with a tensor each; return the first."""
    for index in range(count):
        metadata = {"split.no": index, "split.count": count, "split.tensors.count": count, **changed}
        names = [(f"blk.{index}.w", (2, 32), "Q8_0")]
        write(folder / part_name("m", index + 1, count), make_gguf(metadata, names))
    return folder / part_name("m", 1, count)


def test_parts_are_one_model(tmp_path: Path) -> None:
    file = GGUFFile.open(parts(tmp_path, 3))
    assert [part.name for part in file.parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert {name: tensor.file.name for name, tensor in file.tensors.items()} == {
        f"blk.{i}.w": part_name("m", i + 1, 3) for i in range(3)
    }
    assert GGUFFile.open(file.parts[0]).digest == file.digest


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda folder: (folder / part_name("m", 2, 3)).unlink(), "parts are missing: m-00002-of-00003.gguf"),
        (lambda folder: parts(folder, 3, **{"split.no": 1}), "expected split.no 0"),
        (lambda folder: parts(folder, 3, **{"split.tensors.count": 4}), "split.tensors.count says 4"),
        (lambda folder: parts(folder, 3, **{"split.count": 2}), "is a part of 2"),
        (lambda folder: parts(folder, 3, **{"split.count": -1 % 2**32}), "split.count: expected 1 to 99999"),
        (
            lambda folder: write(
                folder / part_name("m", 2, 3),
                make_gguf({"split.no": 1, "split.count": 3}, [("blk.0.w", (2, 32), "Q8_0")]),
            ),
            "tensor blk.0.w is in both",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, damage: object, word: str) -> None:
    first = parts(tmp_path, 3)
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(ConfigError) as error:
        GGUFFile.open(first)
    assert word in error.value.message


def test_another_part_than_the_first_is_refused_and_names_the_first(tmp_path: Path) -> None:
    parts(tmp_path, 3)
    with pytest.raises(ConfigError, match=r"part 2 of 3; give the first one, m-00001-of-00003\.gguf"):
        GGUFFile.open(tmp_path / part_name("m", 2, 3))
    alone = (tmp_path / part_name("m", 2, 3)).rename(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match=r"NAME-00001-of-00003\.gguf"):
        GGUFFile.open(alone)


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(100, 1000))]
)
def test_a_mutated_header_is_read_or_refused_in_one_line(tmp_path: Path, seed: int) -> None:
    chance, content = random.Random(seed), bytearray(make_gguf(METADATA, TENSORS, 64))
    limit = read_header(write(tmp_path / "m.gguf", bytes(content))).num_bytes
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(limit)
        match chance.randrange(3):
            case 0:
                content[at] = chance.randrange(256)
            case 1:
                content[at : at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**63, 2**64 - 1]))
            case _:
                del content[at : at + chance.randint(1, 64)]
    path = write(tmp_path / "m.gguf", bytes(content))
    try:
        found = read_header(path)
    except ConfigError as error:
        assert str(path) in error.message and "\n" not in error.message
    else:
        assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in found.tensors.values())
