# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files with the values of other ones in other types, quantized by NumPy as llama.cpp does it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.core.ggml_types import GGML_TYPES
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.header import GGUFTensor
from fastdeploy.ops.ggml_blocks import widen_rows
from tests.gguf.files import aligned, header, info

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def rewrite(
    source: Path, path: Path, kind_of: Callable[[str], str], leaves_out: Collection[str] = (), **metadata: Any
) -> Path:
    """Write a file with the tensors of another one.

    Args:
        kind_of: the type of a matrix by its name; another one than Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, F16, BF16 and F32, or
            one whose blocks do not fill the rows, leaves the matrix as it is.
        leaves_out: names of tensors that the file does not get.
        metadata: replaced values.
    """
    file, contents = GGUFFile.open(source), {}
    for name, tensor in file.tensors.items():
        kind, rows = stored_as(name, tensor.shape, tensor.kind.name, kind_of(name)), stored_rows(tensor)
        if kind != tensor.kind.name:
            rows = encode(widen_rows(rows, tensor.kind.name, tensor.shape[-1], "float32"), kind)
        if name not in leaves_out:
            contents[name] = tensor.shape, kind, rows
    return _write(path, {**file.metadata, **metadata}, contents)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Floats], kind_of: Callable[[str], str]
) -> Path:
    """Write a file with these values; `kind_of` is as for `rewrite`, with F32 where its type does not fit."""
    contents = {}
    for name, values in tensors.items():
        kind = stored_as(name, values.shape, "F32", kind_of(name))
        contents[name] = values.shape, kind, encode(values.reshape(-1, values.shape[-1]), kind)
    return _write(path, metadata, contents)


def _write(path: Path, metadata: Mapping[str, Any], contents: Mapping[str, tuple[tuple[int, ...], str, Bytes]]) -> Path:
    """Write tensors, of which shape, type and rows are given."""
    infos, data = [], b""
    for name, (shape, kind, rows) in contents.items():
        infos.append(info(name, shape, GGML_TYPES[kind].type_id, len(data)))
        data += aligned(rows.tobytes())
    path.write_bytes(aligned(header(metadata, infos)) + data)
    return path


def stored_as(name: str, shape: Sequence[int], own: str, wanted: str) -> str:
    """Return the type of a tensor: `own` for norms, biases and routers, and where the type does not fit."""
    is_kept = len(shape) == 1 or "_norm" in name or "ffn_gate_inp" in name or not name.endswith(".weight")
    return own if is_kept or wanted not in ENCODERS or shape[-1] % GGML_TYPES[wanted].block_values else wanted


def stored_rows(tensor: GGUFTensor) -> Bytes:
    """Return the blocks of a tensor, [rows, bytes]."""
    data = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.offset)
    return data.reshape(-1, tensor.row_bytes)


def encode(values: Floats, kind: str) -> Bytes:
    """Return rows of values as rows of blocks."""
    blocks = ENCODERS[kind](values.reshape(-1, GGML_TYPES[kind].block_values))
    return np.ascontiguousarray(blocks).view(np.uint8).reshape(len(values), -1)


def _halves(values: Floats) -> Bytes:
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(len(values), -1)


def _bfloat16(values: Floats) -> Bytes:
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)


def _codes(values: Floats, scale: Floats, zero: Floats | float, largest: int) -> NDArray[np.int64]:
    """Return codes from 0 on: the integers nearest to (value - zero) / scale."""
    scale = scale.astype(np.float16).astype(np.float32)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint((values - zero) * inverse), 0, largest).astype(np.int64)


def _with_codes(parts: list[Floats], codes: NDArray[np.int64], bits: int) -> Bytes:
    """Return blocks of fp16 numbers, the fifth bits of codes that have five, and their low halves."""
    high = np.packbits(codes >> 4, axis=1, bitorder="little") if bits == 5 else np.empty((len(codes), 0), np.uint8)
    low = codes & 15
    nibbles = (low[:, :16] | low[:, 16:] << 4).astype(np.uint8)
    return np.concatenate([*map(_halves, parts), high, nibbles], axis=1)


def _symmetric(bits: int) -> Callable[[Floats], Bytes]:
    """Return the encoder of Q4_0 or Q5_0: the value of largest magnitude has the smallest code."""

    def encoder(values: Floats) -> Bytes:
        middle = 1 << (bits - 1)
        scale = np.take_along_axis(values, np.abs(values).argmax(1)[:, None], 1) / np.float32(-middle)
        zero = -middle * scale.astype(np.float16).astype(np.float32)
        return _with_codes([scale], _codes(values, scale, zero, 2 * middle - 1), bits)

    return encoder


def _with_minimum(bits: int) -> Callable[[Floats], Bytes]:
    """Return the encoder of Q4_1 or Q5_1."""

    def encoder(values: Floats) -> Bytes:
        largest = (1 << bits) - 1
        minimum = values.min(1, keepdims=True)
        scale = (values.max(1, keepdims=True) - minimum) / np.float32(largest)
        return _with_codes([scale, minimum], _codes(values, scale, minimum, largest), bits)

    return encoder


def _q8_0(values: Floats) -> Bytes:
    scale = np.abs(values).max(1, keepdims=True) / np.float32(127)
    zero = -127 * scale.astype(np.float16).astype(np.float32)
    codes = _codes(values, scale, zero, 254) - 127
    return np.concatenate([_halves(scale), codes.astype(np.int8).view(np.uint8)], axis=1)


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "F32": lambda values: np.ascontiguousarray(values).view(np.uint8),
    "F16": _halves,
    "BF16": _bfloat16,
    "Q4_0": _symmetric(4),
    "Q5_0": _symmetric(5),
    "Q4_1": _with_minimum(4),
    "Q5_1": _with_minimum(5),
    "Q8_0": _q8_0,
}
