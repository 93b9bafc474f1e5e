# SPDX-License-Identifier: Apache-2.0
"""Sources of weights: safetensors files, or a seeded generator."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Protocol
from zlib import crc32

import numpy as np
import paddle
from paddle import Tensor
from safetensors import SafetensorError, safe_open

from fastdeploy.config.foreign_formats import refuse_quantized_tensors
from fastdeploy.config.torch_files import list_torch_files
from fastdeploy.config.weight_files import find_weight_files, is_activation_scale, is_buffer, usual_name
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.finite import find_not_finite, is_finite
from fastdeploy.ops.coded_piece import Codes
from fastdeploy.ops.linear import WeightPiece
from fastdeploy.ops.quantized_form import QuantizedForm
from fastdeploy.ops.registry import selected_backend

_READABLE_DTYPES = ("BF16", "F16", "F32", "F64", "U16")  # U16: PaddleNLP's spelling of bfloat16, read as such
HEAD_DTYPES = ("I64", "I32", "U8", "BOOL")  # of lists of token ids, which draft heads have beside their weights
CODE_DTYPES = ("I64", "I32", "I16", "I8", "U8", "F8_E4M3")  # of codes, packed or not, and of what belongs to them
_DIGESTED_BYTES = 1 << 16  # at the start and at the end of each weight file
_NAMES_SHOWN = 24
_NAME_LENGTH = 120  # characters of a name that are shown
ROUTER_WEIGHT, ROUTER_BIAS = "mlp.gate.weight", "e_score_correction_bias"  # how the names of these tensors end


class WeightSource(Protocol):
    """Named tensors, read one at a time.

    The weight of a linear layer may be stored as codes. It then has a form, and can be read in two ways: as codes, and
    widened to floating-point numbers.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor."""

    def read(self, name: str) -> Tensor:
        """Return one tensor in the dtype in which it is stored."""

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return a linear layer's weight, converted to this dtype, as pieces in order."""

    def form(self, name: str) -> QuantizedForm | None:
        """Return the form that keeps the codes of a weight, with inputs of 16 bits; None if it has no codes."""

    def coded(self, name: str) -> Codes:
        """Return the codes of a weight that has a form."""

    def prepare(self, names: Sequence[str]) -> None:
        """Announce that small tensors will be read next, so that what takes time is done for several at once."""

    def release(self, name: str) -> None:
        """Give back the memory of a tensor, which is not read again."""


class WithoutCodes:
    """The part of a source that says that no tensor is stored as codes."""

    def form(self, name: str) -> QuantizedForm | None:
        """Return None."""
        return None

    def coded(self, name: str) -> Codes:
        """Raise AssertionError."""
        raise AssertionError(f"{name} has no codes")


Fidelity = Literal["plain", "kept", "rounded", "converted", "widened"]
"""What becomes of the values of a weight when it is read as codes: it has none; every value stays; every code stays,
and scales and minimums are rounded to fp16; it gets new codes; it has codes for which there is no form."""


class StoredTensors(WeightSource, Protocol):
    """Tensors that files hold."""

    def kind(self, name: str) -> str:
        """Return the name of the type in which a tensor is stored."""

    def fidelity(self, name: str) -> Fidelity:
        """Return what becomes of a weight that is read as codes."""


class CheckpointFiles(StoredTensors, Protocol):
    """The tensors that the files of a checkpoint hold, of which some may belong to another part of the model.

    Attributes:
        header_formats: values of `format` in the headers of the files: pt, np, ...
    """

    header_formats: set[str]

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out tensors that belong to another part of the model."""

    def rename(self, name: str, new_name: str) -> None:
        """Give a tensor another name."""


class HeadFiles(CheckpointFiles, Protocol):
    """The tensors of a draft head, of which some are lists of token ids."""

    def stored(self, name: str) -> Tensor:
        """Return a tensor in the dtype in which it is stored, whose values are not checked."""


class MappedFiles(WithoutCodes, ABC):
    """Tensors of files that are mapped into memory, of which a subclass knows the format.

    Tensors have their usual names, also in files of a bare decoder.

    Attributes:
        header_formats: values of `format` in the files' headers: pt, np, ...
        directory: where the files are.
    """

    def __init__(self, directory: Path) -> None:
        self._stored: dict[str, Any] = {}  # what a subclass keeps of a tensor; Paddle cannot create empty tensors
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_names: dict[str, str] = {}
        self._kinds: dict[str, str] = {}
        self._checked: set[str] = set()  # whose values are finite
        self.header_formats: set[str] = set()
        self.directory = directory

    @abstractmethod
    def _tensor(self, name: str) -> Tensor:
        """Return a tensor, whose memory is the mapped file if it is stored in order."""

    @abstractmethod
    def _mapped_range(self, name: str) -> tuple[int, int]:
        """Return the address and the number of bytes of a tensor in the mapped file."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor in the files that is not left out."""
        return self._shapes

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out tensors that belong to another part of the model."""
        for name in names:
            self._stored.pop(name, None)
            self._shapes.pop(name, None)

    def rename(self, name: str, new_name: str) -> None:
        """Give a tensor another name."""
        if name in self._shapes:
            by_names: tuple[dict[str, Any], ...] = self._shapes, self._file_names, self._kinds
            for by_name in by_names:
                by_name[new_name] = by_name.pop(name)
        if name in self._stored:
            self._stored[new_name] = self._stored.pop(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor as `stored` does.

        Raises:
            ConfigError: it has no elements, or a value that is not finite.
        """
        tensor = self.stored(name)
        if name not in self._checked:
            if not is_finite(tensor):
                raise self._not_finite(name)
            self._checked.add(name)
        return tensor

    def stored(self, name: str) -> Tensor:
        """Return a tensor in the stored dtype, whose memory is the mapped file; its values are not checked.

        Raises:
            ConfigError: it has no elements.
        """
        if name not in self._stored:
            raise ConfigError("model", f"{self.where(name)} is empty")
        return self._tensor(name)

    def where(self, name: str) -> str:
        """Return the file and the name of a tensor, as messages begin."""
        return f"{self.directory}/{self._file_names[name]}: tensor {name:.{_NAME_LENGTH}}"

    def kind(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors spells it."""
        return self._kinds[name]

    def fidelity(self, name: str) -> Fidelity:
        """Return that tensors have no codes."""
        return "plain"

    def prepare(self, names: Sequence[str]) -> None:
        """Check several tensors at once, which also brings them into memory.

        Raises:
            ConfigError: one has a value that is not finite.
        """
        wrong = find_not_finite({name: self._tensor(name) for name in names if name in self._stored})
        if wrong is not None:
            raise self._not_finite(wrong)
        self._checked.update(names)

    def _not_finite(self, name: str) -> ConfigError:
        return ConfigError("model", f"{self.where(name)} has values that are not finite")

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return the whole matrix, without a copy if the file holds this dtype."""
        return whole_matrix(self.read(name).astype(dtype))

    def release(self, name: str) -> None:
        """Give back the pages of the mapped file, which count as memory of the process while they are mapped."""
        address, num_bytes = self._mapped_range(name)
        del self._stored[name]
        selected_backend().release_pages(address, num_bytes)

    def _add(self, name: str, path: Path, dtype: str, shape: Iterable[int]) -> None:
        """Remember what a file's header says about a tensor.

        Raises:
            ConfigError: another file holds it too.
        """
        if name in self._shapes:
            raise ConfigError("model", f"tensor {name} is in both {self._file_names[name]} and {path}")
        self._shapes[name], self._kinds[name], self._file_names[name] = tuple(shape), dtype, path.name


class SafetensorsSource(MappedFiles):
    """The safetensors files of a checkpoint directory."""

    def __init__(self, directory: Path, is_quantized: bool = False, more_dtypes: Sequence[str] = ()) -> None:
        """Open every file and read its header.

        Args:
            is_quantized: whether config.json says that weights are stored as codes.
            more_dtypes: dtypes that a tensor may have besides those of weights.

        Raises:
            ConfigError: there is no safetensors file, a file is incomplete or damaged, tensors are quantized, or a
                dtype is not supported.
        """
        super().__init__(directory)
        # All tensors are created at once: between packing steps, when the caches are cold, it takes five times as long.
        self._is_quantized = is_quantized
        self._dtypes = (*_READABLE_DTYPES, *(CODE_DTYPES if is_quantized else ()), *more_dtypes)
        for path in find_weight_files(directory):
            self._open(path)

    def _tensor(self, name: str) -> Tensor:
        return self._stored[name]

    def _mapped_range(self, name: str) -> tuple[int, int]:
        tensor = self._tensor(name)
        return tensor.data_ptr(), int(tensor.size) * int(tensor.element_size())

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="paddle")
            names = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError("model", f"cannot read {path}: {error!s:.300}") from None
        if not self._is_quantized:
            refuse_quantized_tensors(names, path)
        self.header_formats.update(filter(None, [(file.metadata() or {}).get("format")]))
        for stored_name in names:
            name, header = usual_name(stored_name), file.get_slice(stored_name)
            if is_buffer(name) or is_activation_scale(name):
                continue
            if header.get_dtype() not in self._dtypes:
                raise ConfigError(
                    "model",
                    f"{path}: tensor {name} is stored as {header.get_dtype()}, expected one of {self._dtypes}",
                )
            self._add(name, path, header.get_dtype(), header.get_shape())
            if 0 not in self._shapes[name]:
                self._stored[name] = file.get_tensor(stored_name)


class DummySource(WithoutCodes):
    """Random tensors of given shapes. Each depends on the seed and its name only, not on the order of reading."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
        self._shapes = shapes
        self._seed = seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the given shapes."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """Return float32 values: matrices that preserve magnitudes, norms near 1, biases near 0.

        Rows spread over the experts of a router: logits have a standard deviation of 2, and its bias is small.
        """
        shape = self._shapes[name]
        generator = np.random.default_rng([self._seed, crc32(name.encode())])
        values = generator.random(shape, np.float32)
        values -= 0.5
        if name.endswith(ROUTER_BIAS):
            values *= np.float32(0.02)
        elif len(shape) > 1:
            values *= np.float32((12.0 / shape[-1]) ** 0.5 * (2.0 if name.endswith(ROUTER_WEIGHT) else 1.0))
        else:
            values *= np.float32(0.2)
            values += np.float32("norm" in name)
        return paddle.to_tensor(values)

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return the values of `read` as one piece."""
        return whole_matrix(self.read(name).astype(dtype))

    def prepare(self, names: Sequence[str]) -> None:
        """Do nothing: the values are made when they are read."""

    def release(self, name: str) -> None:
        """Do nothing: the values are not kept."""


def digest_weight_files(directory: Path) -> str:
    """Digest the name, size, start and end of each weight file, which is fast and tells checkpoints apart."""
    digest = blake2b(digest_size=8)
    files = [*directory.glob("*.safetensors"), *directory.glob("*.gguf")] or list_torch_files(directory)
    for file in sorted(files):
        num_bytes = file.stat().st_size
        digest.update(f"{file.name}\0{num_bytes}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_DIGESTED_BYTES))
            stream.seek(-min(_DIGESTED_BYTES, num_bytes), os.SEEK_END)
            digest.update(stream.read(_DIGESTED_BYTES))
    return digest.hexdigest()


def whole_matrix(matrix: Tensor) -> list[WeightPiece]:
    """Return a matrix [out, in] as a single piece."""
    return [WeightPiece(matrix, 0, matrix.shape[0])]


def listed(names: list[str]) -> str:
    """Return the names for a message: the first ones and, if there are more, their number."""
    shown = ", ".join(name[:_NAME_LENGTH] for name in names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown}, and {len(names) - _NAMES_SHOWN} more"
