# SPDX-License-Identifier: Apache-2.0
"""Files of packed weights as tensors."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import paddle

from fastdeploy.config.packed_checkpoint import ITEM_BYTES

_MADV_HUGEPAGE = 14


class MappedFile:
    """A file that is mapped for reading, so that processes share its pages."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Map the first num_bytes bytes, of which there is at least one."""
        self._storage = paddle.MmapStorage(str(path), num_bytes)
        # By offset. Paddle aborts if two tensors of one address, which it did not make as views of one, are freed.
        self._tensors: dict[int, paddle.Tensor] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self._storage.get_slice(dtype="uint8", start=0, stop=1).data_ptr())
        size = ctypes.c_size_t(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        libc.madvise(address, size, _MADV_HUGEPAGE)  # it changes nothing where the file system has no huge pages
        if libc.mprotect(address, size, mmap.PROT_READ):
            raise OSError(ctypes.get_errno(), f"cannot make the mapping of {path} read-only")

    def tensor(self, dtype: str, shape: Sequence[int], offset: int) -> paddle.Tensor:
        """Return a tensor whose memory is the mapped file.

        Args:
            offset: of its first byte, a multiple of the size of an element.
        """
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if offset not in self._tensors:
            self._tensors[offset] = self._storage.get_slice(dtype="uint8", start=offset, stop=offset + num_bytes)
        flat = self._tensors[offset]
        assert flat.shape[0] == num_bytes, "tensors do not overlap"
        return flat.view(dtype).reshape(list(shape))
