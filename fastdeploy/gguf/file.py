# SPDX-License-Identifier: Apache-2.0
"""A model in GGUF format: one file, or several parts of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf.header import GGUFHeader, GGUFTensor, read_header, shown

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True)
class GGUFFile:
    """The metadata of the first part, and the tensors of all.

    Attributes:
        parts: the files in order.
        metadata: key -> number, text, bool, or a list of one of them.
        tensors: by name.
        digest: of the headers of all parts.
    """

    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    digest: str

    @property
    def path(self) -> Path:
        """Return the first part, as messages name the model."""
        return self.parts[0]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the headers of a file and of the parts that belong to it.

        Args:
            path: the only file, or the first part.

        Raises:
            ConfigError: a file cannot be read or is not valid, or parts are missing, repeated or of another model.
        """
        first = read_header(path)
        parts = _other_parts(path, first)
        headers = [first, *map(read_header, parts)]
        tensors: dict[str, GGUFTensor] = {}
        for index, (file, header) in enumerate(zip((path, *parts), headers, strict=True)):
            _check_part(file, header, index, len(headers))
            for name, tensor in header.tensors.items():
                if name in tensors:
                    raise ConfigError(
                        "model", f"tensor {shown(name)} is in both {tensors[name].file} and {tensor.file}"
                    )
                tensors[name] = tensor
        expected = first.metadata.get(_NUM_TENSORS, len(tensors))
        if parts and expected != len(tensors):
            raise ConfigError(
                "model", f"{path}: its parts have {len(tensors)} tensors, {_NUM_TENSORS} says {expected!r:.60}"
            )
        digest = blake2b(digest_size=16)
        for file, header in zip((path, *parts), headers):
            with file.open("rb") as stream:
                digest.update(stream.read(header.num_bytes))
        return cls((path, *parts), first.metadata, tensors, digest.hexdigest())


def part_number(name: str) -> tuple[str, int, int] | None:
    """Return stem, number (from 1) and count of a part by the name of its file, or None if it is no part."""
    match = _PART.fullmatch(name)
    return match and (match["stem"], int(match["number"]), int(match["count"]))


def part_name(stem: str, number: int, count: int) -> str:
    """Return the name of the file of a part."""
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def _other_parts(path: Path, first: GGUFHeader) -> list[Path]:
    """Return the files of the parts after the first one, which lie beside it."""
    count = first.metadata.get(_COUNT, 1)
    if type(count) is not int or not 1 <= count <= 99999:
        raise ConfigError("model", f"{path}: metadata {_COUNT}: expected 1 to 99999, got {count!r:.60}")
    if count == 1:
        return []
    named = part_number(path.name)
    if named is None or named[2] != count:
        expected = part_name("NAME", 1, count)
        raise ConfigError("model", f"{path}: is a part of {count}, whose file is expected to be called {expected}")
    stem, number, _ = named
    if number != 1:
        raise ConfigError(
            "model", f"{path}: is part {number} of {count}; give the first one, {part_name(stem, 1, count)}"
        )
    parts = [path.with_name(part_name(stem, other, count)) for other in range(2, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ConfigError("model", f"{path}: parts are missing: {', '.join(missing[:24])}")
    return parts


def _check_part(file: Path, header: GGUFHeader, index: int, count: int) -> None:
    """Compare the number and the count that a part says with those of its name."""
    number, said = header.metadata.get(_NUMBER), header.metadata.get(_COUNT)
    if count > 1 and (number, said) != (index, count):
        found = f"{number!r:.60} and {said!r:.60}"
        raise ConfigError("model", f"{file}: expected {_NUMBER} {index} and {_COUNT} {count}, got {found}")
