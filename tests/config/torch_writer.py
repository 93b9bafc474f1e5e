# SPDX-License-Identifier: Apache-2.0
"""Writes PyTorch files without torch: the opcodes of torch.save, in parts that tests can put together wrongly."""

from __future__ import annotations

import random
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

from fastdeploy.config.torch_files import read_torch_file
from fastdeploy.core.errors import ConfigError

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "torch_files"

STORAGES = {
    "BF16": "BFloat16Storage",
    "F16": "HalfStorage",
    "F32": "FloatStorage",
    "I64": "LongStorage",
    "BOOL": "BoolStorage",
}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "BOOL": 1}
ALIGNMENT = 64


@dataclass(frozen=True)
class Stored:
    """A tensor in a storage of its own: its bytes, or their number if they are zeros; contiguous without strides."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None
    strides: tuple[int, ...] | None = None


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def name(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def integers(values: tuple[int, ...]) -> bytes:
    return tuple_of(*map(integer, values))


ORDERED_DICT = name("collections", "OrderedDict") + b")R"
REBUILD_TENSOR = name("torch._utils", "_rebuild_tensor_v2")
FALSE = b"\x89"


def storage(dtype: str, key: str, num_elements: int) -> bytes:
    identifier = text("storage"), name("torch", STORAGES[dtype]), text(key), text("cpu"), integer(num_elements)
    return tuple_of(*identifier) + b"Q"


def tensor(stored: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    arguments = stored, integer(offset), integers(shape), integers(strides), FALSE, ORDERED_DICT
    return REBUILD_TENSOR + tuple_of(*arguments) + b"R"


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def pickle_of(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


def write_container(path: Path, members: Mapping[str, bytes | int], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write the members `head/NAME`, aligned as torch.save aligns them; a number stands for as many zeros.

    The zeros take no place on the disk.
    """
    with path.open("wb") as file, zipfile.ZipFile(file, "w", compression) as archive:
        for member, content in members.items():
            info = zipfile.ZipInfo(f"head/{member}")
            info.compress_type = compression
            begin = file.tell() + 30 + len(info.filename) + 4
            padding = -begin % ALIGNMENT
            info.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
            if isinstance(content, int):
                _write_zeros(archive, info, content)
            else:
                archive.writestr(info, content)
    return path


def _write_zeros(archive: zipfile.ZipFile, info: zipfile.ZipInfo, num_bytes: int) -> None:
    archive.writestr(info, b"")
    file = archive.fp
    assert file is not None
    file.seek(num_bytes, 1)
    archive.start_dir = file.tell()  # type: ignore[attr-defined]
    info.file_size = info.compress_size = num_bytes


def write_torch_file(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """Write tensors as torch.save writes a dictionary of them."""
    items: dict[str, bytes] = {}
    members: dict[str, bytes | int] = {"data.pkl": b"", "byteorder": b"little"}
    for index, (key, stored) in enumerate(tensors.items()):
        num_elements = prod(stored.shape)
        strides = contiguous(stored.shape) if stored.strides is None else stored.strides
        items[key] = tensor(storage(stored.dtype, str(index), num_elements), 0, stored.shape, strides)
        num_bytes = num_elements * ITEM_BYTES[stored.dtype]
        members[f"data/{index}"] = num_bytes if stored.content is None else stored.content
    return write_container(path, members | {"data.pkl": pickle_of(dictionary(items))})


def mutate(chance: random.Random, content: bytes) -> bytes:
    """Change one to three places: a byte, a bit, a part removed, doubled or taken from elsewhere."""
    for _ in range(chance.choice((1, 1, 1, 2))):
        at, size = chance.randrange(len(content)), chance.choice((1, 1, 2, 5, 20))
        kept, rest = content[:at], content[at:]
        source = chance.randrange(len(content))
        content = (
            chance.choice(
                (
                    kept + bytes([chance.randrange(256)]) + rest[1:],
                    kept + bytes([rest[0] ^ 1 << chance.randrange(8)]) + rest[1:],
                    kept + rest[size:],
                    kept + rest[:size] + rest,
                    kept + content[source : source + size] + rest[size:],
                    kept + chance.choice((b"cos\nsystem\n", b"R", b"b", b"Q", b"\x82\x01", b"\x93", b"t", b"(")) + rest,
                )
            )
            or b"."
        )
    return content


def write_pickle(folder: Path, pickled: bytes) -> Path:
    """Write a file with this pickle and a storage of six float32 numbers."""
    return write_container(folder / "pytorch_model.bin", {"data.pkl": pickled, "data/0": bytes(24)})


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_torch_file(file)
    message = str(caught.value)
    assert caught.value.field == "model" and "\n" not in message and len(message) < 600
    return message


SIX = storage("F32", "0", 6)
WEIGHT = tensor(SIX, 0, (2, 3), (3, 1))
