# SPDX-License-Identifier: Apache-2.0
"""Copies of blocks between the device and slots of shared memory, through a staging buffer in pinned memory.

A kernel gathers the blocks of each region on the device, one copy brings them to the host, and the host fills the slots
and takes the checksums; imports go the other way. All of it happens in a stream of its own, beside the steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import finalize

import numpy as np

from fastdeploy.ops.backends.gpu.library import Address, DeviceLibrary
from fastdeploy.ops.block_moves import BlockRegion, BlockRegions, Checksums

STAGING_BYTES = 16 << 20  # at least one block of every region


class StagedBlockRegions(BlockRegions):
    """Regions in the memory of a device. Their addresses are multiples of 16 bytes, and so is the size of a block."""

    def __init__(self, library: DeviceLibrary, regions: Sequence[BlockRegion]) -> None:
        """Allocate the staging buffers on the host and on the device."""
        super().__init__(regions)
        self._device, self._regions_on_device = library, tuple(regions)
        self._capacity = max(1, STAGING_BYTES // self.slot_bytes)  # blocks of each region that are moved at a time
        self._stream = library.make("fd_device_stream_create")
        size, ids_size = self._capacity * self.slot_bytes, 4 * self._capacity
        self._host, self._host_ids = (library.make("fd_device_alloc_pinned", n) for n in (size, ids_size))
        self._staging, self._ids = (library.make("fd_device_alloc", n) for n in (size, ids_size))
        for name, address in (
            *(("fd_device_free_pinned", address) for address in (self._host, self._host_ids)),
            *(("fd_device_free", address) for address in (self._staging, self._ids)),
        ):
            finalize(self, library.call, name, address).atexit = False
        self._ids_array = np.ctypeslib.as_array((ctypes.c_int32 * self._capacity).from_address(self._host_ids))
        self._offsets = [0, *np.cumsum([r.block_bytes * self._capacity for r in regions[:-1]]).tolist()]
        self._staged = BlockRegions(
            [
                BlockRegion(self._host + offset, self._capacity, r.num_heads, r.head_bytes, r.first_checksum)
                for r, offset in zip(regions, self._offsets)
            ]
        )

    def _move(self, block_ids: Sequence[int], slots: Sequence[int], to_slots: bool) -> Checksums:
        self._check(block_ids, slots)
        self._device.call("fd_device_set", self._device.device)  # each thread has a device of its own
        checksums = np.empty((len(block_ids), self.num_checksums), np.uint32)
        for begin in range(0, len(block_ids), self._capacity):
            end = min(begin + self._capacity, len(block_ids))
            move = self._export if to_slots else self._import
            checksums[begin:end] = move(block_ids[begin:end], slots[begin:end])
        return checksums

    def _export(self, block_ids: Sequence[int], slots: Sequence[int]) -> Checksums:
        count = len(block_ids)
        self._send_ids(block_ids)
        for region, offset in zip(self._regions_on_device, self._offsets):
            source, staged = Address(region.address), Address(self._staging + offset)
            self._device.call(
                *("fd_gather_rows", source, region.num_blocks, self._ids, staged),
                *(None, count, region.block_bytes, self._stream),
            )
            self._copy(self._host + offset, staged, count * region.block_bytes)
        self._wait()
        return self._staged.export_blocks(range(count), slots)

    def _import(self, block_ids: Sequence[int], slots: Sequence[int]) -> Checksums:
        count = len(block_ids)
        checksums = self._staged.import_blocks(range(count), slots)
        self._send_ids(block_ids)
        for region, offset in zip(self._regions_on_device, self._offsets):
            staged, target = Address(self._staging + offset), Address(region.address)
            self._copy(staged, self._host + offset, count * region.block_bytes)
            self._device.call(
                *("fd_scatter_rows", staged, self._ids, target, region.num_blocks),
                *(None, count, region.block_bytes, self._stream),
            )
        self._wait()
        return checksums

    def _send_ids(self, block_ids: Sequence[int]) -> None:
        self._ids_array[: len(block_ids)] = block_ids
        self._copy(self._ids, self._host_ids, 4 * len(block_ids))

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        self._device.call("fd_device_copy_async", Address(to), Address(source), num_bytes, self._stream)

    def _wait(self) -> None:
        self._device.call("fd_device_stream_sync", self._stream)
