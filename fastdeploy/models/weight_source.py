# SPDX-License-Identifier: Apache-2.0
"""Where tensors come from: safetensors files, or a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import paddle
from paddle import Tensor
from safetensors import SafetensorError, safe_open

from fastdeploy.core.errors import ConfigError

_READABLE_DTYPES = ("BF16", "F16", "F32")
_FOREIGN_FORMATS = {
    "*.gguf": "GGUF",
    "*.bin": "PyTorch pickle (.bin)",
    "*.pth": "PyTorch pickle (.pth)",
    "*.pdparams": "Paddle pickle (.pdparams)",
}


class WeightSource(Protocol):
    """Named tensors, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor there is."""

    def read(self, name: str) -> Tensor:
        """Return one tensor on the CPU in the type it is stored in."""


class SafetensorsSource:
    """The safetensors files of a checkpoint directory, mapped into memory."""

    def __init__(self, directory: Path) -> None:
        """Open every file and read its header.

        Raises:
            ConfigError: no safetensors, an incomplete or damaged file, a tensor type that cannot be read.
        """
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(directory):
            self._open(path)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor in the files."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return a tensor whose memory is the mapped file itself, in the stored type."""
        return self._files[name].get_tensor(name)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="paddle")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError("model", f"cannot read {path}: {error}") from None
        for name in names:
            header = file.get_slice(name)
            if header.get_dtype() not in _READABLE_DTYPES:
                raise ConfigError(
                    "model",
                    f"{path}: tensor {name} is stored as {header.get_dtype()}, expected one of {_READABLE_DTYPES}",
                )
            self._shapes[name] = tuple(header.get_shape())
            self._files[name] = file


class DummySource:
    """Random tensors of given shapes: a function of the seed and the name, not of the order of reading."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes that were asked for."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return float32 values: matrices scaled to keep magnitudes, norms near 1, biases near 0."""
        shape = self._shapes[name]
        generator = np.random.default_rng([self._seed, crc32(name.encode())])
        values = generator.random(shape, np.float32)
        values -= 0.5
        if len(shape) > 1:
            values *= np.float32((12.0 / shape[-1]) ** 0.5)
        else:
            values *= np.float32(0.2)
            values += np.float32("norm" in name)
        return paddle.to_tensor(values, place=paddle.CPUPlace())


def _weight_files(directory: Path) -> list[Path]:
    """Return the checkpoint's files: those of the index, else model.safetensors, else the only one there is."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    single = directory / "model.safetensors"
    found = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ConfigError("model", f"{directory} holds {len(found)} safetensors files but no {index.name}")
    for pattern, name in _FOREIGN_FORMATS.items():
        if any(directory.glob(pattern)):
            raise ConfigError("model", f"{directory}: {name} checkpoints are not supported, only safetensors")
    raise ConfigError("model", f"{directory} holds no *.safetensors")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError("model", f"cannot read {index}: {error!r}") from None
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        raise ConfigError("model", f"{index} names files that are not there: {', '.join(missing)}")
    return [index.parent / name for name in names]
