# SPDX-License-Identifier: Apache-2.0
"""What the files of a checkpoint's weights tell beside config.json: their dtype, and whether the head is tied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.config.weight_files import StoredTensor, is_activation_scale, read_headers, unused_tensors

HEAD = "lm_head.weight"
_CODED_HEADS = ("lm_head.qweight", "lm_head.weight_packed")  # of AWQ and GPTQ, of compressed-tensors
_EMBEDDING = re.compile(r"\w+\.embed_tokens\.weight")
_DTYPES = {"BF16": "bfloat16", "U16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_NUMPY_TYPES = {"BF16": "<u2", "U16": "<u2", "F16": "<f2", "F32": "<f4", "F64": "<f8"}
_ROWS_COMPARED = 4096  # at a time, so that comparing needs little memory
_NUM_SHOWN = 4  # names of tensors that are not used


class StoredWeights:
    """The weights of a checkpoint, of which only heads and embeddings are read."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of the files; those that cannot be read tell nothing."""
        self._directory, self._headers = directory, read_headers(directory)

    @property
    def dtype(self) -> str:
        """Return the dtype of the first tensor of floats, as transformers takes it; float32 if there is none.

        Weights in FP8 are widened to bfloat16.
        """
        if any(tensor.dtype == "F8_E4M3" for tensor in self._headers.values()):
            return "bfloat16"
        found = (_DTYPES[tensor.dtype] for tensor in self._headers.values() if tensor.dtype in _DTYPES)
        return next(found, "float32")

    def find_own_head(self) -> StoredTensor | None:
        """Return the head if there are a head and an embedding whose values differ, which reads both.

        A head that is stored as codes differs from an embedding.
        """
        head = next((self._headers[name] for name in (HEAD, *_CODED_HEADS) if name in self._headers), None)
        embedding = next((tensor for name, tensor in self._headers.items() if _EMBEDDING.fullmatch(name)), None)
        return None if head is None or embedding is None or have_equal_values(head, embedding) else head

    def notes(self, num_layers: int) -> Iterator[str]:
        """Yield a line about each kind of tensors that are not used, if there are any."""
        if scales := [name for name in self._headers if is_activation_scale(name)]:
            what = "static scales of activations or of cached keys and values are not used"
            yield f"{self._directory}: {len(scales)} {what}: {_shown(scales)}"
        if unused := unused_tensors(self._headers, num_layers):
            yield f"{self._directory}: {len(unused)} tensors are not used: {_shown(unused)}"


def _shown(names: list[str]) -> str:
    return f"{', '.join(names[:_NUM_SHOWN]) + (', ...' if len(names) > _NUM_SHOWN else ''):.400}"


def _elements(tensor: StoredTensor) -> NDArray[Any]:
    """Return the elements in the mapped file; those of bfloat16 are integers."""
    return np.memmap(tensor.file, _NUMPY_TYPES[tensor.dtype], "r", tensor.begin, tensor.shape)


def have_equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two matrices have equal values; one may be stored as the transposed matrix of the other."""
    if one.dtype not in _NUMPY_TYPES or other.dtype not in _NUMPY_TYPES or len(one.shape) != 2 or not prod(one.shape):
        return False
    ways = [other.shape == one.shape, other.shape == one.shape[::-1]]
    matrices = [(_elements(one), _matrix(other, is_transposed)) for is_transposed, fits in enumerate(ways) if fits]
    return any(_are_equal(one, left, other, right) for left, right in matrices)


def _matrix(tensor: StoredTensor, is_transposed: int) -> NDArray[Any]:
    return _elements(tensor).T if is_transposed else _elements(tensor)


def _are_equal(one: StoredTensor, left: NDArray[Any], other: StoredTensor, right: NDArray[Any]) -> bool:
    for begin in range(0, left.shape[0], _ROWS_COMPARED):
        rows, other_rows = (matrix[begin : begin + _ROWS_COMPARED] for matrix in (left, right))
        if one.dtype != other.dtype:
            rows, other_rows = _values(rows, one.dtype), _values(other_rows, other.dtype)
        if not np.array_equal(rows, other_rows):
            return False
    return True


def _values(elements: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return elements as float64."""
    if dtype in ("BF16", "U16"):
        return (elements.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return elements.astype(np.float64)
