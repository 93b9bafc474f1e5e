# SPDX-License-Identifier: Apache-2.0
"""The tensors of a draft head's PyTorch files, mapped into memory and read without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.config.foreign_formats import refuse_quantized_tensors
from fastdeploy.config.torch_files import StridedTensor, read_torch_headers
from fastdeploy.core.errors import ConfigError
from fastdeploy.models.weight_source import MappedFiles
from fastdeploy.ops.registry import selected_backend

_NUMPY_TYPES: dict[str, type[np.generic]] = {
    "BF16": np.uint16,  # stands for bfloat16 where arrays become tensors
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class TorchSource(MappedFiles):
    """The PyTorch files of a draft head.

    A tensor is only copied where it is read and its elements are not stored in order, such as those of a transposed
    matrix.

    Attributes:
        header_formats: pt, since linear layers are [out, in].
    """

    def __init__(self, directory: Path) -> None:
        """Find where the tensors are, without reading any.

        Raises:
            ConfigError: a file is not valid, or tensors are quantized.
        """
        super().__init__(directory)
        self.header_formats = {"pt"}
        self._memory: dict[Path, NDArray[np.uint8]] = {}
        for name, tensor in read_torch_headers(directory).items():
            self._add(name, tensor.file, tensor.dtype, tensor.shape)
            if tensor.file not in self._memory:
                self._memory[tensor.file] = _map(tensor.file)
            if tensor.span:
                self._stored[name] = tensor
        for file in self._memory:
            refuse_quantized_tensors(self._shapes, file)

    def _tensor(self, name: str) -> Tensor:
        tensor: StridedTensor = self._stored[name]
        dtype = np.dtype(_NUMPY_TYPES[tensor.dtype])
        strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
        # NumPy refuses what would lie beyond the end of the file.
        values: NDArray[Any] = np.ndarray(tensor.shape, dtype, self._memory[tensor.file], tensor.begin, strides)
        return selected_backend().host_tensor(np.require(values, requirements=["C", "A"]))

    def _mapped_range(self, name: str) -> tuple[int, int]:
        tensor: StridedTensor = self._stored[name]
        return self._memory[tensor.file].ctypes.data + tensor.begin, tensor.num_bytes


def _map(file: Path) -> NDArray[np.uint8]:
    try:
        return np.asarray(np.memmap(file, np.uint8, "r"))
    except OSError as error:
        raise ConfigError("model", f"cannot read {file}: {error.strerror or error}") from None
