# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The format is described in ggml's docs/gguf.md. A file is made by others: nothing is allocated by a count before the
file's size has borne it out, and whatever is not as the format says is refused with one ConfigError.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import TYPES_BY_ID, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**28  # the largest headers, of vocabularies of 256,000 tokens, take less than a tenth
MAX_LENGTH = 2**22  # of an array of metadata
MAX_KEY_LENGTH = 2**16 - 1
MAX_NAME_LENGTH = 64  # of a tensor, in bytes
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_SHOWN = 80  # characters of a name in messages


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file.

    Attributes:
        name: as the file spells it.
        kind: the type of its blocks.
        shape: in row-major order, as in PyTorch: the last dimension is the one that is contiguous.
        file: where it is.
        offset: of its first byte in the file.
    """

    name: str
    kind: GGMLType
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self.kind.row_bytes(self.shape[-1])

    @property
    def num_bytes(self) -> int:
        """Return its size in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """What a file says before its data.

    Attributes:
        metadata: key -> number, text, bool, or a list of one of them.
        tensors: by name.
        num_bytes: of the header.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    num_bytes: int


def read_header(file: Path) -> GGUFHeader:
    """Read the header of one file.

    Raises:
        ConfigError: the file cannot be read, is no GGUF file, is incomplete, or is not as the format says.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Parser(file, content).parse()
    except OSError as error:
        raise ConfigError("model", f"cannot read {file}: {error.strerror or error}") from None
    except ValueError:  # of mmap
        raise ConfigError("model", f"{file}: is empty") from None


class _Parser:
    """Reads one value after the other."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file, self._content, self._file_bytes, self._at = file, content, len(content), 0
        self._limit = min(len(content), MAX_HEADER_BYTES)

    def parse(self) -> GGUFHeader:
        """Read the whole header."""
        num_tensors, num_keys = self._read_counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._read_text("the key of a metadata entry", MAX_KEY_LENGTH)
            if key in metadata:
                self._refuse(f"metadata {shown(key)} is there twice")
            metadata[key] = self._read_value(f"metadata {shown(key)}", self._number("I"))
        found = [self._read_tensor() for _ in range(num_tensors)]
        header_bytes = self._at
        alignment = self._alignment(metadata)
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, kind, shape, offset in found:
            if name in tensors:
                self._refuse(f"tensor {shown(name)} is there twice")
            if offset % alignment:
                self._refuse(
                    f"tensor {shown(name)} begins at {offset}, which is no multiple of the alignment {alignment}"
                )
            tensors[name] = GGUFTensor(name, kind, shape, self._file, start + offset)
        self._check_places(tensors)
        return GGUFHeader(metadata, tensors, header_bytes)

    def _read_counts(self) -> tuple[int, int]:
        if self._content[: len(MAGIC)] != MAGIC:
            self._refuse("is no GGUF file: it does not begin with GGUF")
        self._at = len(MAGIC)
        version = self._number("I")
        if version not in VERSIONS:
            if struct.unpack(">I", struct.pack("<I", version))[0] in (1, *VERSIONS):
                self._refuse("big-endian files are not supported")
            self._refuse(f"has version {version}, expected {' or '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        left = self._limit - self._at
        if num_tensors * 24 + num_keys * 13 > left:  # the fewest bytes of either
            self._refuse(f"{num_tensors} tensors and {num_keys} metadata entries do not fit into it")
        return num_tensors, num_keys

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or not 8 <= alignment <= 2**20:
            self._refuse(
                f"metadata general.alignment: expected a power of two from 8 to 1048576, got {alignment!r:.60}"
            )
        return alignment

    def _read_value(self, where: str, value_type: int) -> Any:
        if value_type == _STRING:
            return self._read_text(where)
        if value_type == _BOOL:
            return self._read_bool(where)
        if value_type == _ARRAY:
            return self._read_array(where)
        if value_type not in _NUMBERS:
            self._refuse(f"{where} has the unknown type {value_type}")
        return self._number(_NUMBERS[value_type])

    def _read_array(self, where: str) -> list[Any]:
        item_type, length = self._number("I"), self._number("Q")
        if item_type == _ARRAY:
            self._refuse(f"{where} is a list of lists, which no known key is")
        if length > MAX_LENGTH:
            self._refuse(f"{where} has {length} items, expected at most {MAX_LENGTH}")
        if item_type in _NUMBERS:
            code = _NUMBERS[item_type]
            items = struct.Struct(f"<{length}{code}")
            return list(items.unpack_from(self._content, self._advance(items.size)))
        if item_type == _STRING:
            return self._read_texts(where, length)
        if item_type != _BOOL:
            self._refuse(f"{where} is a list of items of the unknown type {item_type}")
        return [self._read_bool(where) for _ in range(length)]

    def _read_texts(self, where: str, length: int) -> list[Any]:
        """Read many short texts, which takes a third of the time of reading each alone."""
        texts, content, begin, limit, size = [], self._content, self._at, self._limit, struct.Struct("<Q")
        try:
            for _ in range(length):
                end = begin + 8 + size.unpack_from(content, begin)[0]
                if end > limit:
                    break
                texts.append(content[begin + 8 : end].decode())
                begin = end
        except UnicodeDecodeError:
            self._refuse(f"{where}, item {len(texts)} is not UTF-8")
        except struct.error:  # the length itself is incomplete
            pass
        if len(texts) < length:
            self._advance(limit)
        self._at = begin
        return texts

    def _read_bool(self, where: str) -> bool:
        value = self._number("B")
        if value > 1:
            self._refuse(f"{where}: expected 0 or 1 for a bool, got {value}")
        return bool(value)

    def _read_text(self, where: str, longest: int = MAX_HEADER_BYTES) -> str:
        length = self._number("Q")
        if length > longest:
            self._refuse(f"{where} has {length} bytes, expected at most {longest}")
        begin = self._advance(length)
        try:
            return self._content[begin : self._at].decode()
        except UnicodeDecodeError:
            self._refuse(f"{where} is not UTF-8")

    def _read_tensor(self) -> tuple[str, GGMLType, tuple[int, ...], int]:
        name = self._read_text("the name of a tensor", MAX_NAME_LENGTH)
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self._refuse(f"tensor {shown(name)} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        type_id, offset = self._number("I"), self._number("Q")
        kind = TYPES_BY_ID.get(type_id)
        if kind is None:
            self._refuse(f"tensor {shown(name)} has the type {type_id}, which is not supported")
        if 0 in shape or math.prod(shape) >= 2**60:
            self._refuse(f"tensor {shown(name)} has the shape {list(shape)}")
        if shape[-1] % kind.block_values:
            self._refuse(f"tensor {shown(name)} has rows of {shape[-1]} values, no multiple of {kind.block_values}")
        return name, kind, shape, offset

    def _check_places(self, tensors: Mapping[str, GGUFTensor]) -> None:
        """Refuse tensors that overlap, or end beyond the file."""
        end, last = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"tensors {shown(last)} and {shown(tensor.name)} overlap")
            end, last = tensor.offset + tensor.num_bytes, tensor.name
        if end > self._file_bytes:
            self._refuse(f"is incomplete: tensor {shown(last)} ends at byte {end}, and the file has {self._file_bytes}")

    def _number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self._content, self._advance(size))[0]

    def _advance(self, num_bytes: int) -> int:
        """Skip bytes; return where they begin."""
        begin = self._at
        if begin + num_bytes > self._limit:
            is_long = self._limit < self._file_bytes
            self._refuse(
                f"its header has more than {MAX_HEADER_BYTES} bytes" if is_long else "its header is incomplete"
            )
        self._at = begin + num_bytes
        return begin

    def _refuse(self, problem: str) -> NoReturn:
        raise ConfigError("model", f"{self._file}: {problem}")


def shown(name: str) -> str:
    """Return a name of the file as messages show it."""
    shown = name[:_SHOWN]
    return shown if shown.isprintable() else ascii(shown)
