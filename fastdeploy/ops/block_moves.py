# SPDX-License-Identifier: Apache-2.0
"""Copies blocks of the KV caches to slots of shared memory and back, with checksums taken on the way."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastdeploy.ops.host import load_library

if TYPE_CHECKING:
    from paddle import Tensor

Checksums = NDArray[np.uint32]


@dataclass(frozen=True)
class BlockRegion:
    """One tensor of a cache, [num_blocks, num_heads, head_bytes] bytes without gaps.

    Attributes:
        address: of its first byte; the owner of the memory outlives the region.
        first_checksum: index of the checksum that covers head 0; head h has checksum first_checksum + h. Regions with
            equal indices share their checksums.
    """

    address: int
    num_blocks: int
    num_heads: int
    head_bytes: int
    first_checksum: int

    @classmethod
    def of_tensor(cls, tensor: Tensor, num_blocks: int, num_heads: int) -> BlockRegion:
        """Describe the first blocks of a tensor [all blocks, ...] whose blocks hold one head after the other."""
        block_bytes = int(tensor.size) * int(tensor.element_size()) // int(tensor.shape[0])
        return cls(tensor.data_ptr(), num_blocks, num_heads, block_bytes // num_heads, 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.num_heads * self.head_bytes


class _Move(ctypes.Structure):
    """The arguments of fd_move_blocks, custom_ops/host/move_blocks.cc."""

    _fields_ = [
        ("regions", ctypes.c_void_p),
        ("num_regions", ctypes.c_int64),
        ("block_ids", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("checksums", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("num_checksums", ctypes.c_int64),
        ("to_slots", ctypes.c_int64),
    ]


class BlockRegions:
    """All regions whose blocks travel together. A slot holds one block of each region, in order.

    Attributes:
        slot_bytes: bytes of a slot.
        num_checksums: checksums of a slot.
    """

    def __init__(self, regions: Sequence[BlockRegion]) -> None:
        """Describe the regions, of which there is at least one; all have the same number of blocks."""
        self.num_blocks = regions[0].num_blocks
        if any(region.num_blocks != self.num_blocks for region in regions):
            counts = sorted({region.num_blocks for region in regions})
            raise ValueError(f"BlockRegions: regions: expected one number of blocks, got {counts}")
        self.slot_bytes = sum(region.block_bytes for region in regions)
        self.num_checksums = max(region.first_checksum + region.num_heads for region in regions)
        self._library = load_library()
        self._num_regions = len(regions)
        fields = [(r.address, r.head_bytes, r.num_heads, r.first_checksum) for r in regions]
        self._regions = np.array(fields, np.int64)

    def export_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> Checksums:
        """Copy blocks to slots; return the checksums of the bytes, [n, num_checksums] uint32.

        Args:
            slots: [n] addresses of writable slots.

        Raises:
            ValueError: a block is not in the caches, or the numbers of blocks and slots differ.
        """
        return self._move(block_ids, slots, to_slots=True)

    def import_blocks(self, block_ids: Sequence[int], slots: Sequence[int]) -> Checksums:
        """Copy slots to blocks, which nobody else may hold; return the checksums of the bytes that were read.

        Raises:
            ValueError: as `export_blocks`.
        """
        return self._move(block_ids, slots, to_slots=False)

    def _move(self, block_ids: Sequence[int], slots: Sequence[int], to_slots: bool) -> Checksums:
        self._check(block_ids, slots)
        ids, addresses = np.array(block_ids, np.int64), np.array(slots, np.uint64)
        checksums = np.empty((len(ids), self.num_checksums), np.uint32)
        move = _Move(
            self._regions.ctypes.data,
            self._num_regions,
            ids.ctypes.data,
            addresses.ctypes.data,
            checksums.ctypes.data,
            len(ids),
            self.num_checksums,
            to_slots,
        )
        self._library.fd_move_blocks(ctypes.byref(move))
        return checksums

    def _check(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Raise ValueError if a block is not in the caches, or the numbers of blocks and slots differ."""
        if len(block_ids) != len(slots):
            raise ValueError(f"BlockRegions: slots: expected one per block, {len(block_ids)}, got {len(slots)}")
        if len(block_ids) and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise ValueError(f"BlockRegions: block_ids: expected ids in [0, {self.num_blocks - 1}], got {block_ids}")
