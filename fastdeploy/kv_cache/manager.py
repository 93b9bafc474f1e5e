# SPDX-License-Identifier: Apache-2.0
"""Manages the blocks of each request: reserve before a step, commit after it, free at the end.

tokens   |<------------ num_tokens ------------>|<- draft ->|
cache    |<---- num_computed ---->|
blocks   [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ]            held: enough for the rows of the planned step
index    [ 0 ][ 1 ][ 2 ][ 3 ]                                published: full and committed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from fastdeploy.core.request import Request
from fastdeploy.kv_cache.block_pool import BlockPool

HASH_BYTES = 16


class KVCacheManager:
    """Allocates blocks for requests and finds the cached blocks of their prefixes."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, fingerprint: str = "") -> None:
        """Start with an empty cache.

        Args:
            num_blocks: number of blocks of the cache.
            block_size: tokens per block.
            enable_prefix_caching: whether blocks are published and prefixes looked up.
            fingerprint: everything except the tokens that changes cached values; part of every hash.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._fingerprint = fingerprint.encode()
        self._held: dict[str, Counter[int]] = {}  # client -> block -> number of its requests with this block
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> int:
        """Add the published blocks of the request's longest cached prefix to its block table.

        At least one token is left to compute, for its logits. A request for log-probabilities of its prompt also
        computes every row whose log-probability none of its choices has computed yet.

        Returns:
            The number of tokens in these blocks.
        """
        if not self.enable_prefix_caching:
            return 0
        logprobs, max_hit = request.prompt_logprobs, request.num_tokens - 1
        if logprobs.num_missing:
            max_hit = len(logprobs.entries)
        max_blocks = max_hit // self.block_size
        self._extend_hashes(request, max_blocks)
        for content_hash in request.block_hashes[:max_blocks]:
            block_id = self.pool.find(content_hash)
            if block_id is None:
                break
            self.pool.retain(block_id)
            request.block_ids.append(block_id)
        if request.block_ids:
            self._held.setdefault(request.client_id, Counter()).update(request.block_ids)
        num_hit = len(request.block_ids) * self.block_size
        request.num_computed = num_hit
        request.num_published_blocks = len(request.block_ids)
        return num_hit

    def count_lookup(self, request: Request) -> None:
        """Count the prefix hits of a request that was admitted."""
        self.num_lookup_tokens += request.num_tokens
        self.num_hit_tokens += request.num_computed
        if request.metrics.num_preemptions == 0:
            request.metrics.num_cached_tokens = request.num_computed

    def can_hold(self, request: Request) -> bool:
        """Return whether the free blocks suffice for all tokens of the request."""
        return self.num_missing(request, request.num_tokens) <= self.pool.num_free

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Return how many more blocks the first `num_tokens` tokens of the request need; at most 0 if none."""
        return -(-num_tokens // self.block_size) - len(request.block_ids)

    def num_held(self, client_id: str) -> int:
        """Return how many blocks the requests of a client hold; shared ones count once."""
        return len(self._held.get(client_id, ()))

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens of the request; return False if too few are free."""
        missing = self.num_missing(request, num_tokens)
        if missing <= 0:
            return True
        block_ids = self.pool.allocate(missing)
        if block_ids is None:
            return False
        request.block_ids.extend(block_ids)
        self._held.setdefault(request.client_id, Counter()).update(block_ids)
        return True

    def commit(self, request: Request) -> None:
        """Publish the blocks that the request's computed tokens fill."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed // self.block_size
        if num_full <= request.num_published_blocks:
            return
        self._extend_hashes(request, num_full)
        for i in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_ids[i], request.block_hashes[i])
        request.num_published_blocks = num_full

    def free(self, request: Request) -> None:
        """Release all blocks of a request; published ones can be found until they are allocated again."""
        self.pool.release(request.block_ids)
        self._let_go(request)
        request.reset_computed()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the held blocks are exactly those of `requests`, of each client too."""
        held: dict[str, Counter[int]] = {}
        for request in requests:
            if request.block_ids:
                held.setdefault(request.client_id, Counter()).update(request.block_ids)
        self.pool.check_integrity(sum(held.values(), Counter()))
        assert self._held == held

    def _let_go(self, request: Request) -> None:
        if not request.block_ids:
            return
        held = self._held[request.client_id]
        for block_id in request.block_ids:
            held[block_id] -= 1
            if held[block_id] == 0:
                del held[block_id]
        if not held:
            del self._held[request.client_id]

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Compute the hashes of the first `count` full blocks; a hash covers all tokens up to the end of its block."""
        hashes = request.block_hashes
        tokens = request.token_ids
        previous = hashes[-1] if hashes else self._fingerprint + b"\0" + request.cache_salt.encode()
        for i in range(len(hashes), count):
            block = np.ascontiguousarray(tokens[i * self.block_size : (i + 1) * self.block_size])
            previous = blake2b(previous + block.tobytes(), digest_size=HASH_BYTES).digest()
            hashes.append(previous)
