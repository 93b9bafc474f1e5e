# SPDX-License-Identifier: Apache-2.0
"""Checksums of memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from fastdeploy.ops.block_moves import BlockRegion, BlockRegions, Checksums

_CHUNK = 1 << 20  # bytes; a core's cache holds the copy that taking a checksum makes
_THREADS = 4  # enough to read memory, or a disk, as fast as it can be read


def digest_memory(address: int, num_bytes: int) -> str:
    """Return 16 hexadecimal digits over the CRC-32C of each MiB.

    Args:
        address: of the first byte.
    """
    num_chunks = num_bytes // _CHUNK
    bounds = [num_chunks * part // _THREADS for part in range(_THREADS + 1)]
    rest = num_bytes - num_chunks * _CHUNK
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [
            pool.submit(_checksums, address + begin * _CHUNK, end - begin, _CHUNK)
            for begin, end in pairwise(bounds)
            if begin < end
        ]
        if rest:
            jobs.append(pool.submit(_checksums, address + num_chunks * _CHUNK, 1, rest))
        digest = blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)
        for job in jobs:
            digest.update(job.result().tobytes())
    return digest.hexdigest()


def _checksums(address: int, count: int, num_bytes: int) -> Checksums:
    """Return the checksums of `count` pieces of memory, one after the other, of num_bytes each."""
    scratch = np.empty(num_bytes, np.uint8)
    regions = BlockRegions([BlockRegion(scratch.ctypes.data, 1, 1, num_bytes, 0)])
    return regions.import_blocks([0] * count, [address + index * num_bytes for index in range(count)])
