# SPDX-License-Identifier: Apache-2.0
"""Hashes of the full blocks of a text, which chain: each one covers all tokens up to the end of its block.

Two texts have equal hashes if and only if they begin with the same tokens, for the same seed and salt. The seed stands
for everything else that changes cached values.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def chain_start(seed: str, cache_salt: str) -> bytes:
    """Return what stands in place of a hash before the first block."""
    return seed.encode() + b"\0" + cache_salt.encode()


def block_hash(previous: bytes, block: bytes) -> bytes:
    """Return the hash of a block, given that of the block before and the block's tokens as int32."""
    return blake2b(previous + block, digest_size=HASH_BYTES).digest()


def hash_blocks(seed: str, cache_salt: str, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hash of every full block of a text."""
    data = memoryview(array("i", token_ids)).cast("B")
    num_bytes = block_size * 4
    hashes, previous = [], chain_start(seed, cache_salt)
    for begin in range(0, len(data) - num_bytes + 1, num_bytes):
        previous = block_hash(previous, bytes(data[begin : begin + num_bytes]))
        hashes.append(previous)
    return hashes
