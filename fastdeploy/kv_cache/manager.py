# SPDX-License-Identifier: Apache-2.0
"""Which blocks a request holds: reserve before a step, commit after it, free at the end.

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
    """Gives requests their blocks and finds the blocks of prefixes computed before."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool, numerics: str = "") -> None:
        """Make an empty cache.

        Args:
            num_blocks, block_size: size of the cache, and tokens per block.
            numerics: everything besides the tokens that changes cached values; part of every hash.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._numerics = numerics.encode()
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> int:
        """Hold the published blocks of the request's longest known prefix and return how many tokens they hold.

        At least one token is left to compute, for its logits. A request that wants log-probabilities of its prompt
        needs every row and finds nothing.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return 0
        most = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, most)
        for content_hash in request.block_hashes[:most]:
            block_id = self.pool.find(content_hash)
            if block_id is None:
                break
            self.pool.retain(block_id)
            request.block_ids.append(block_id)
        num_hit = len(request.block_ids) * self.block_size
        request.num_computed = num_hit
        request.num_published_blocks = len(request.block_ids)
        return num_hit

    def count_lookup(self, request: Request) -> None:
        """Enter an admitted request's prefix match into the counters."""
        self.num_lookup_tokens += request.num_tokens
        self.num_hit_tokens += request.num_computed
        if request.metrics.num_preemptions == 0:
            request.metrics.num_cached_tokens = request.num_computed

    def can_hold(self, request: Request) -> bool:
        """True if all the request's known tokens fit beside what others hold."""
        return self.num_blocks_for(request.num_tokens) - len(request.block_ids) <= self.pool.num_free

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Let the request hold blocks for its first `num_tokens` tokens; False if they are not free."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        block_ids = self.pool.allocate(missing)
        if block_ids is None:
            return False
        request.block_ids.extend(block_ids)
        return True

    def commit(self, request: Request) -> None:
        """Publish the blocks that the request's computed tokens have filled."""
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
        """Take back all blocks of a request; published ones stay findable until they are reused."""
        self.pool.release(request.block_ids)
        request.reset_computed()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the blocks held are exactly those of `requests`."""
        self.pool.check_integrity(Counter(block_id for request in requests for block_id in request.block_ids))

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Chain hashes of the request's full blocks up to `count`: each covers all tokens up to its block's end."""
        hashes = request.block_hashes
        tokens = request.token_ids
        previous = hashes[-1] if hashes else self._numerics + b"\0" + request.cache_salt.encode()
        for i in range(len(hashes), count):
            block = np.ascontiguousarray(tokens[i * self.block_size : (i + 1) * self.block_size])
            previous = blake2b(previous + block.tobytes(), digest_size=HASH_BYTES).digest()
            hashes.append(previous)
