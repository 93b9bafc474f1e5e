# SPDX-License-Identifier: Apache-2.0
"""Memory for packed weights and caches, in huge pages if the system has them.

With 4 KiB pages, page table walks halve the bandwidth at which a weight is read. Weights are placed next to each other
in slabs, because allocating memory from the system costs as much as packing a megabyte.
"""

import ctypes
import math
import mmap

import paddle

_HUGE_PAGE = 1 << 21  # bytes; x86-64 and arm64 with 4 KiB base pages
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


def release_pages(tensor: paddle.Tensor) -> None:
    """Give back the pages that lie wholly in a tensor of a mapped file; when they are used again, they are read again.

    Until then they count as memory of the process, as if it held a second copy of the weights that it has packed.
    """
    begin, page = tensor.data_ptr(), mmap.PAGESIZE
    first = -(-begin // page) * page
    size = (begin + int(tensor.size) * int(tensor.element_size())) // page * page - first
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), _MADV_DONTNEED)


def _allocate(count: int, dtype: str) -> tuple[paddle.Tensor, int]:
    """Return a tensor and the index of an element at the start of a huge page, with room for `count` elements."""
    item = _itemsize[dtype]
    tensor = paddle.empty([count + _HUGE_PAGE // item], dtype=dtype).cpu()
    skipped = -tensor.data_ptr() % _HUGE_PAGE
    size = (count * item) // _HUGE_PAGE * _HUGE_PAGE
    if size:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(tensor.data_ptr() + skipped), ctypes.c_size_t(size), _MADV_HUGEPAGE)
    return tensor, skipped // item
