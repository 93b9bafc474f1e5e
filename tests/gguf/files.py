# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files byte by byte, also such as no library would write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy.core.ggml_types import GGML_TYPES

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
Tensor = tuple[str, tuple[int, ...], str]  # name, shape in row-major order, type


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Return the type and the bytes of a value of metadata."""
    match item:
        case bool():
            return struct.pack("<IB", BOOL, item)
        case int():
            return struct.pack("<II", U32, item) if item < 2**32 else struct.pack("<IQ", U64, item)
        case float():
            return struct.pack("<If", F32, item)
        case str():
            return struct.pack("<I", STRING) + text(item)
        case [*items]:
            kind = value(items[0])[:4] if items else struct.pack("<I", U32)
            return (
                struct.pack("<I", ARRAY) + kind + struct.pack("<Q", len(items)) + b"".join(value(i)[4:] for i in items)
            )
    raise TypeError(item)


def num_bytes(shape: Sequence[int], kind: str) -> int:
    size = GGML_TYPES[kind].row_bytes(shape[-1])
    for count in shape[:-1]:
        size *= count
    return size


def info(name: str, shape: Sequence[int], type_id: int, offset: int) -> bytes:
    """Return the description of a tensor."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + dimensions + struct.pack("<IQ", type_id, offset)


def header(
    metadata: Mapping[str, Any], infos: Sequence[bytes], version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    num_tensors, num_keys = counts or (len(infos), len(metadata))
    start = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    return start + b"".join(text(key) + value(item) for key, item in metadata.items()) + b"".join(infos)


def aligned(content: bytes, alignment: int = 32) -> bytes:
    return content + bytes(-len(content) % alignment)


def make_gguf(metadata: Mapping[str, Any], tensors: Sequence[Tensor], alignment: int = 32) -> bytes:
    """Return a valid file whose tensors are zeros."""
    infos, data = [], b""
    for name, shape, kind in tensors:
        infos.append(info(name, shape, GGML_TYPES[kind].type_id, len(data)))
        data += aligned(bytes(num_bytes(shape, kind)), alignment)
    return aligned(header(metadata, infos), alignment) + data


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
