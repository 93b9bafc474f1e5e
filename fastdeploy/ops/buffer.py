# SPDX-License-Identifier: Apache-2.0
"""Memory that host and device exchange in every step.

On the CPU both use the same memory, and copies between them do nothing.
"""

import ctypes

import numpy as np
import paddle
from numpy.typing import DTypeLike, NDArray

from fastdeploy.ops.registry import selected_backend


class HostBuffer:
    """An array of the host, `array`, and what operators take, `tensor`; both are initially zero.

    If host and device share their memory, writing `array[...]` changes the tensor with no copy and no call into Paddle.
    Otherwise the array is pinned memory: what the host has written reaches the tensor by `upload`, and what operators
    have written reaches the array by `download`. `memory`, a memoryview, is for the few numbers that every step writes
    and reads: when the processor's caches hold a model's weights, the first assignment takes 20 to 50 us through NumPy
    but 10 us through a memoryview. The memory lives as long as the tensor, the array or a view of either.
    """

    __slots__ = ("_mirror", "array", "memory", "tensor")

    def __init__(self, shape: tuple[int, ...] | int, dtype: DTypeLike) -> None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        self._mirror = selected_backend().make_mirror(sizes, kind)
        if self._mirror is None:
            self.tensor, self.array = _shared_memory(sizes, kind)
        else:
            self.tensor, self.array = self._mirror.tensor, self._mirror.array
        self.memory: memoryview = self.array.data

    def upload(self, end: int, begin: int = 0) -> None:
        """Copy rows [begin, end) to the device, before the operators that are called next."""
        if self._mirror is not None:
            self._mirror.upload(begin, end)

    def download(self, end: int, begin: int = 0) -> None:
        """Copy rows [begin, end) to the host; they are there after `Backend.synchronize`."""
        if self._mirror is not None:
            self._mirror.download(begin, end)


def _shared_memory(shape: tuple[int, ...], kind: np.dtype) -> tuple[paddle.Tensor, NDArray]:
    """Return a tensor on the host and a writable array of the same memory."""
    tensor: paddle.Tensor = paddle.zeros(list(shape), dtype=kind.name).cpu()
    count = int(np.prod(shape))
    memory = (ctypes.c_byte * (count * kind.itemsize)).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the array's base keeps the tensor alive
    return tensor, np.frombuffer(memoryview(memory), dtype=kind, count=count).reshape(shape)
