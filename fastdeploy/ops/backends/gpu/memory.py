# SPDX-License-Identifier: Apache-2.0
"""Memory that the host and the device exchange: pinned on the host, with a mirror of the same shape on the device."""

from __future__ import annotations

import ctypes
from weakref import WeakSet, finalize

import numpy as np
import paddle
from numpy.typing import DTypeLike, NDArray
from paddle import Tensor

from fastdeploy.ops.backends.gpu.library import Address, DeviceLibrary


def zeros_on_device(library: DeviceLibrary, shape: list[int], dtype: str) -> Tensor:
    """Return a tensor of zeros that the device fills; paddle.zeros fills memory of the host and copies it.

    Args:
        dtype: such as "bfloat16", whose zeros are bytes of zero.
    """
    tensor: Tensor = paddle.empty(shape, dtype)
    library.call("fd_device_set_async", tensor, 0, int(tensor.size) * int(tensor.element_size()), None)
    library.call("fd_device_sync")  # the zeros are there before another stream reads them
    return tensor


class Mirror:
    """An array in pinned memory, and a tensor on the device.

    Attributes:
        array: the host's side.
        tensor: the device's side.
    """

    def __init__(self, library: DeviceLibrary, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        """Allocate both, filled with zeros."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        num_bytes = max(1, count * kind.itemsize)
        self._library, self._item_bytes = library, kind.itemsize
        self._address = library.make("fd_device_alloc_pinned", num_bytes)
        finalize(self, library.call, "fd_device_free_pinned", self._address).atexit = False
        memory = (ctypes.c_byte * num_bytes).from_address(self._address)
        memory.owner = self  # type: ignore[attr-defined]  # views of the array keep the memory
        self.array: NDArray = np.frombuffer(memoryview(memory), dtype=kind, count=count).reshape(shape)
        self.array[...] = 0
        self.tensor: Tensor = paddle.zeros(list(shape), dtype=kind.name)
        library.call("fd_device_sync")  # the zeros are there before another stream writes
        self._row_bytes = self.array[:1].nbytes if count else 0

    def upload(self, begin: int, end: int) -> None:
        """Copy rows [begin, end) to the device, in the order of the stream."""
        self._copy(self.tensor.data_ptr(), self._address, begin, end)

    def download(self, begin: int, end: int) -> None:
        """Copy rows [begin, end) to the host, in the order of the stream; they are there after `synchronize`."""
        self._copy(self._address, self.tensor.data_ptr(), begin, end)

    def _copy(self, to: int, source: int, begin: int, end: int) -> None:
        first, size = begin * self._row_bytes, (end - begin) * self._row_bytes
        if size > 0:
            library = self._library
            library.call("fd_device_copy_async", Address(to + first), Address(source + first), size, library.stream)


mirrors: WeakSet[Mirror] = WeakSet()
"""All that exist, for operators that run on the host."""
