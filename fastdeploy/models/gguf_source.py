# SPDX-License-Identifier: Apache-2.0
"""The tensors of a GGUF file by the names of a Hugging Face checkpoint: as codes, or widened."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.run_dtype import DType
from fastdeploy.core.errors import ConfigError
from fastdeploy.core.ggml_types import PLAIN_TYPES
from fastdeploy.gguf.file import GGUFFile
from fastdeploy.gguf.header import GGUFTensor, shown
from fastdeploy.gguf.tensor_names import TensorPlace, tensor_names
from fastdeploy.models.finite import is_finite
from fastdeploy.models.weight_source import Fidelity, whole_matrix
from fastdeploy.ops.coded_piece import CodedPiece, StoredCodes
from fastdeploy.ops.ggml_blocks import code_bits, fidelity, find_bad_scale, has_minimum, split_rows, widen_rows
from fastdeploy.ops.linear import WeightPiece
from fastdeploy.ops.quantized_form import QuantizedForm
from fastdeploy.ops.registry import selected_backend

_GROUP = 32  # inputs of a scale, whatever the type
MAX_SCALE = 511.75
"""The largest fp16 number by 128: packed with a tensor that has minimums, one without gets minimums of -128 scales."""
_BEYOND_BFLOAT16 = ("F32", "F64")  # types with larger numbers than bfloat16 has
_EXACT_DTYPES: Mapping[str, DType] = {"BF16": "bfloat16"}  # of types of which no value needs float32
_STORED_AS: Mapping[tuple[str, str], type] = {("BF16", "bfloat16"): np.uint16, ("F32", "float32"): np.float32}


class GGUFSource:
    """The tensors of a GGUF file, mapped into memory.

    Attributes:
        header_formats: pt, since linear layers are [out, in].
    """

    def __init__(self, folder: Path, file: GGUFFile, dtype: DType) -> None:
        """Find where the tensors are, without reading any.

        Args:
            folder: holds the config.json that was made from the file.
            dtype: of the run, to which codes are widened.

        Raises:
            ConfigError: tensors are missing or unexpected, or a file cannot be read.
        """
        self.header_formats = {"pt"}
        self._file, self._dtype = file, dtype
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._places: dict[str, TensorPlace] = dict(tensor_names(config, file.tensors, str(file.path)))
        try:
            self._memory = {part: np.asarray(np.memmap(part, np.uint8, "r")) for part in file.parts}
        except OSError as error:
            raise ConfigError("model", f"cannot read {file.path}: {error.strerror or error}") from None
        self._shapes = {name: place.shape for name, place in self._places.items()}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor that is not left out."""
        return self._shapes

    def kind(self, name: str) -> str:
        """Return the name of a tensor's type."""
        return self._tensor(name).kind.name

    def fidelity(self, name: str) -> Fidelity:
        """Return what `coded` does to a weight."""
        kind = self.kind(name)
        return "plain" if kind in PLAIN_TYPES else fidelity(kind)

    def _tensor(self, name: str) -> GGUFTensor:
        return self._file.tensors[self._places[name].name]

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out tensors that belong to another part of the model."""
        for name in names:
            self._places.pop(name, None)
            self._shapes.pop(name, None)

    def rename(self, name: str, new_name: str) -> None:
        """Give a tensor another name."""
        if name in self._places:
            self._places[new_name], self._shapes[new_name] = self._places.pop(name), self._shapes.pop(name)

    def form(self, name: str) -> QuantizedForm | None:
        """Return the form that keeps the codes of a weight; None if its type is plain."""
        kind = self.kind(name)
        if kind in PLAIN_TYPES:
            return None
        return QuantizedForm("wint4" if code_bits(kind) == 4 else "wint8", _GROUP, has_minimum(kind))

    def coded(self, name: str) -> StoredCodes:
        """Return the codes of a weight that has a form, with its rows in the order of Hugging Face."""
        form, (num_outputs, num_inputs) = self.form(name), self._shapes[name]
        assert form is not None, f"{name} has codes"
        return StoredCodes(num_outputs, num_inputs, form.group_size, form.has_minimum, partial(self._split, name))

    def _split(self, name: str, begin: int, end: int) -> CodedPiece:
        """Return the codes of rows [begin, end)."""
        tensor, wrap = self._tensor(name), selected_backend().host_tensor
        rows, order = self._rows(name, begin, end)
        split = split_rows(rows, tensor.kind.name, tensor.shape[-1], order)
        if not _largest(split.scales) <= MAX_SCALE:
            raise self._bad_value(tensor, f"has a scale over {MAX_SCALE:g}")
        if split.minimums is not None and not np.isfinite(_largest(split.minimums)):
            raise self._bad_value(tensor, "has a minimum that is too large for fp16")
        minimums = None if split.minimums is None else wrap(split.minimums)
        return CodedPiece(wrap(split.codes), wrap(split.scales), minimums, split.group_size)

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype in which it is stored, or widened from codes.

        Its memory is the mapped file if the values are stored in this dtype and in order.

        Raises:
            ConfigError: a value or scale is not finite.
        """
        kind = self.kind(name)
        is_plain = kind in PLAIN_TYPES
        return self._widen(name, _EXACT_DTYPES.get(kind, "float32") if is_plain else self._dtype)

    def pieces(self, name: str, dtype: str) -> list[WeightPiece]:
        """Return the whole matrix in this dtype, rounded once; without a copy as `read` does."""
        return whole_matrix(self._widen(name, "float32" if dtype == "float32" else "bfloat16"))

    def prepare(self, names: Sequence[str]) -> None:
        """Do nothing: reading one tensor occupies all threads."""

    def release(self, name: str) -> None:
        """Give back the pages of the mapped file, which count as memory of the process while they are mapped."""
        rows = self._stored_rows(name)
        selected_backend().release_pages(rows.ctypes.data, rows.nbytes)

    def _widen(self, name: str, dtype: DType) -> Tensor:
        tensor, shape = self._tensor(name), self._shapes[name]
        is_matrix, kind = len(shape) > 1, tensor.kind.name
        rows, order = self._rows(name)
        if order is None and (kind, dtype) in _STORED_AS:
            values: NDArray[Any] = rows.view(_STORED_AS[kind, dtype])
        else:
            values = widen_rows(rows, kind, tensor.shape[-1], dtype, order)
        elements = None if is_matrix else self._order(name)
        values = values.reshape(shape) if elements is None else values[0, elements]
        wide = selected_backend().host_tensor(values)
        if kind in _BEYOND_BFLOAT16 and self._dtype == "bfloat16" and not is_finite(wide):
            raise self._bad_value(tensor, "has a value that is too large for bfloat16")
        return wide

    def _rows(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64] | None]:
        """Return blocks [rows, bytes] in the mapped file, and which of them are rows [begin, end); None for all.

        Raises:
            ConfigError: a value or scale is not finite.
        """
        rows, tensor = self._stored_rows(name), self._tensor(name)
        order = self._order(name) if len(self._shapes[name]) > 1 else None
        rows, order = (rows[begin:end], None) if order is None else (rows, order[begin:end])
        bad = find_bad_scale(rows, tensor.kind.name, tensor.shape[-1], order)
        if bad is not None:
            row = begin + bad if order is None else order[bad]
            raise self._bad_value(tensor, f"has a value in row {row} that is not finite")
        return rows, order

    def _bad_value(self, tensor: GGUFTensor, problem: str) -> ConfigError:
        return ConfigError("model", f"{tensor.file}: tensor {shown(tensor.name)} {problem}")

    def _stored_rows(self, name: str) -> NDArray[np.uint8]:
        place, tensor = self._places[name], self._tensor(name)
        memory = self._memory[tensor.file]
        rows = memory[tensor.offset : tensor.offset + tensor.num_bytes].reshape(-1, tensor.row_bytes)
        if place.expert is None:
            return rows
        count = self._shapes[name][0]
        return rows[place.expert * count : (place.expert + 1) * count]

    def _order(self, name: str) -> NDArray[np.int64] | None:
        """Return the place where each row, or element of a vector, is stored; None if they are in order."""
        heads = self._places[name].heads
        if heads is None:
            return None
        count = self._shapes[name][0]
        return np.arange(count).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _largest(values: NDArray[np.float16]) -> np.float16:
    """Return the largest magnitude, or NaN, by the bits, which takes a thirtieth of the time of NumPy's maximum."""
    bits: np.uint16 = (values.view(np.uint16) & np.uint16(0x7FFF)).max()
    return bits.view(np.float16)
