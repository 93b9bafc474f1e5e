# SPDX-License-Identifier: Apache-2.0
"""Memory for packed weights and caches, in huge pages if the system has them.

Caches are fresh anonymous memory: a page takes memory when it is first written, and reads as zeros until then.

With 4 KiB pages, page table walks halve the bandwidth at which a weight is read. Weights are placed next to each other
in slabs, because allocating memory from the system costs as much as packing a megabyte.
"""

import ctypes
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

HUGE_PAGE = 1 << 21  # bytes; x86-64 and arm64 with 4 KiB base pages
_HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SLAB = 1 << 27  # bytes of a slab; tensors of a quarter of it or more are allocated separately
_LINE = 64  # bytes; every tensor is aligned to a cache line
_MADV_HUGEPAGE, _MADV_DONTNEED = 14, 4

_itemsize = {"uint8": 1, "int8": 1, "bfloat16": 2, "float32": 4}
_slabs: dict[str, tuple[paddle.Tensor, int]] = {}  # by dtype: the current slab and its first free element


def allocate_streamed(shape: list[int], dtype: str) -> paddle.Tensor:
    """Return an uninitialised tensor for data that is written once and read often.

    Args:
        shape: shape of the tensor.
        dtype: "uint8", "int8", "bfloat16" or "float32".
    """
    count, item = math.prod(shape), _itemsize[dtype]
    if count * item >= _SLAB // 4:
        whole, first = _allocate(count, dtype)
        return whole[first : first + count].reshape(shape)
    slab, first = _slabs.get(dtype, (None, 0))
    if slab is None or first + count > slab.shape[0]:
        slab, first = _allocate(_SLAB // item, dtype)
    _slabs[dtype] = (slab, first + -(-count * item // _LINE) * _LINE // item)
    return slab[first : first + count].reshape(shape)


def allocate_untouched(shape: list[int], dtype: str) -> paddle.Tensor:
    """Return a tensor of zeros in memory of its own, of which no page has been touched.

    Args:
        shape, dtype: as `allocate_streamed` takes them.

    Raises:
        OSError: the system does not allow the process so much address space.
    """
    num_bytes = math.prod(shape) * _itemsize[dtype]
    is_huge = num_bytes >= HUGE_PAGE
    room = num_bytes + HUGE_PAGE if is_huge else num_bytes
    memory = np.frombuffer(mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    first = -memory.ctypes.data % HUGE_PAGE if is_huge else 0
    if is_huge:
        _advise(memory.ctypes.data + first, num_bytes // HUGE_PAGE * HUGE_PAGE, _MADV_HUGEPAGE)
    return tensor_of(memory[first : first + num_bytes]).view(dtype).reshape(shape)


def tensor_of(memory: NDArray[Any]) -> paddle.Tensor:
    """Return a tensor in the memory of a contiguous array, which it keeps; uint16 stands for bfloat16.

    `paddle.utils.dlpack.from_dlpack` also gives one, but Paddle frees it under a lock that every `from_dlpack` takes.
    Python waits for its own lock while it unmaps memory: two threads, of which one frees a tensor and one makes
    another, would wait for each other.
    """
    place = paddle.CPUPlace()
    tensor: paddle.Tensor = paddle.base.core.eager.Tensor(
        value=memory, place=place, persistable=False, zero_copy=True, name="", stop_gradient=True
    )
    return tensor


def has_huge_pages() -> bool:
    """Return whether the system gives huge pages to memory for which they are advised."""
    try:
        return "[never]" not in _HUGE_PAGES_FILE.read_text()
    except OSError:  # a kernel without transparent huge pages
        return False


def release_range(address: int, num_bytes: int) -> None:
    """Give back the pages that lie wholly in a range; untouched memory is zero again, that of a file is read again."""
    page = mmap.PAGESIZE
    first = -(-address // page) * page
    size = (address + num_bytes) // page * page - first
    if size > 0:
        _advise(first, size, _MADV_DONTNEED)


def _advise(address: int, size: int, advice: int) -> None:
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


def _allocate(count: int, dtype: str) -> tuple[paddle.Tensor, int]:
    """Return a tensor and the index of an element at the start of a huge page, with room for `count` elements."""
    item = _itemsize[dtype]
    tensor = paddle.empty([count + HUGE_PAGE // item], dtype=dtype).cpu()
    skipped = -tensor.data_ptr() % HUGE_PAGE
    size = (count * item) // HUGE_PAGE * HUGE_PAGE
    if size:
        _advise(tensor.data_ptr() + skipped, size, _MADV_HUGEPAGE)
    return tensor, skipped // item
