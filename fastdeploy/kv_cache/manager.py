# SPDX-License-Identifier: Apache-2.0
"""Manages the blocks of each request: reserve before a step, commit after it, free at the end.

tokens   |<------------ num_tokens ------------>|<- draft ->|
cache    |<---- num_computed ---->|
blocks   [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ][ 6 ][ 7 ]            held: enough for the rows of the planned step
index    [ 0 ][ 1 ][ 2 ][ 3 ]                                published: full and committed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from fastdeploy.core.request import Request, TokenArray
from fastdeploy.kv_cache.block_pool import BlockMemory, BlockPool
from fastdeploy.kv_cache.hashes import block_hash, chain_start


class KVCacheManager:
    """Allocates blocks for requests and finds the cached blocks of their prefixes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        fingerprint: str = "",
        memory: BlockMemory | None = None,
    ) -> None:
        """Start with an empty cache.

        Args:
            num_blocks: number of blocks of the cache.
            block_size: tokens per block.
            enable_prefix_caching: whether blocks are published and prefixes looked up.
            fingerprint: everything except the tokens that changes cached values; part of every hash.
            memory: of the blocks, if they take it when they are first allocated.
        """
        self.pool = BlockPool(num_blocks, memory)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._fingerprint = fingerprint
        self._exported = Counter[int]()  # block -> number of copies to an arena that are not done
        self._imported: dict[str, list[int]] = {}  # request id -> blocks that a new request will begin with
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
        request.block_ids += self._hold_published(request.block_hashes[:max_blocks])
        if request.block_ids:
            self._held.setdefault(request.client_id, Counter()).update(request.block_ids)
        num_hit = len(request.block_ids) * self.block_size
        request.num_computed = num_hit
        request.num_published_blocks = len(request.block_ids)
        return num_hit

    def count_lookup(self, request: Request) -> None:
        """Count the prefix hits of a request that was admitted."""
        num_hit, metrics = request.num_computed, request.metrics
        if metrics.num_preemptions == 0:
            num_hit = metrics.num_cached_tokens = max(0, num_hit - metrics.num_transferred_tokens)
        self.num_lookup_tokens += request.num_tokens
        self.num_hit_tokens += num_hit

    def can_hold(self, request: Request) -> bool:
        """Return whether the free blocks suffice for all tokens of the request, and for its draft."""
        return self.num_missing(request, request.num_tokens + len(request.draft)) <= self.pool.num_free

    def can_ever_hold(self, request: Request) -> bool:
        """Return whether the whole cache suffices for all tokens of the request, and for its draft."""
        return self.num_blocks_for(request.num_tokens + len(request.draft)) <= self.pool.num_blocks

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

    def begin_import(
        self, request_id: str, token_ids: Sequence[int], cache_salt: str, num_tokens: int
    ) -> tuple[list[int], list[int]] | None:
        """Hold blocks for the first `num_tokens` tokens of a request that will be added.

        Returns:
            The blocks that are in the cache, which begin the text, and new ones to import the others to; None, and
            nothing is held, if too few are free.
        """
        hashes: list[bytes] = []
        if self.enable_prefix_caching:
            self._append_hashes(hashes, np.array(token_ids, np.int32), cache_salt, num_tokens // self.block_size)
        found = self._hold_published(hashes)
        new = self.pool.allocate(self.num_blocks_for(num_tokens) - len(found))
        if new is None:
            self.pool.release(found)
            return None
        self._imported[request_id] = found + new
        return found, new

    def imported_blocks(self, request_id: str) -> list[int]:
        """Return the blocks of an import."""
        return self._imported[request_id]

    def end_import(self, request_id: str, num_blocks: int = 0) -> None:
        """Keep the first blocks of an import and release the others."""
        blocks = self._imported.pop(request_id)
        self.pool.release(blocks[num_blocks:])
        if num_blocks:
            self._imported[request_id] = blocks[:num_blocks]

    def adopt(self, choices: Sequence[Request], num_tokens: int, publishes: bool = True) -> None:
        """Let the choices of a new request, which all wait, begin with its imported blocks.

        The first choice gets all of them. The others, whose text differs after the prompt, get the full blocks of the
        prompt. One token at least is left to compute.

        Args:
            num_tokens: of the first choice's text that the blocks hold.
            publishes: whether other requests may find the blocks.
        """
        first, *others = choices
        blocks = self._imported.pop(first.request_id)
        first.block_ids = blocks[: self.num_blocks_for(num_tokens)]
        first.num_computed = min(num_tokens, first.num_tokens - 1)
        for choice in others:
            num_shared = min(num_tokens, choice.num_prompt_tokens, choice.num_tokens - 1) // self.block_size
            choice.block_ids, choice.num_computed = blocks[:num_shared], num_shared * self.block_size
            for block_id in choice.block_ids:
                self.pool.retain(block_id)
        for choice in choices:
            if choice.block_ids:
                self._held.setdefault(choice.client_id, Counter()).update(choice.block_ids)
            if publishes:
                self.commit(choice)
            else:
                choice.num_published_blocks = len(choice.block_ids)
        self.pool.release(blocks[len(first.block_ids) :])

    def begin_export(self, block_ids: Sequence[int]) -> None:
        """Keep blocks of a request from being allocated again until `end_export`, whatever becomes of the request."""
        for block_id in block_ids:
            self.pool.retain(block_id)
        self._exported.update(block_ids)

    def end_export(self, block_ids: Sequence[int]) -> None:
        """Release blocks that have been copied."""
        self._exported.subtract(block_ids)
        self._exported += Counter()  # drops zeros
        self.pool.release(list(block_ids))

    def free(self, request: Request) -> None:
        """Release all blocks of a request; published ones can be found until they are allocated again."""
        self.pool.release(request.block_ids)
        self._let_go(request)
        request.reset_computed()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the held blocks are exactly those of `requests`, of each client too.

        Blocks of imports and exports that are under way count as held.
        """
        held: dict[str, Counter[int]] = {}
        for request in requests:
            if request.block_ids:
                held.setdefault(request.client_id, Counter()).update(request.block_ids)
        moving = Counter(chain.from_iterable(self._imported.values())) + self._exported
        self.pool.check_integrity(sum(held.values(), moving))
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

    def _hold_published(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold and return the blocks that are published under the first of these hashes, up to the first miss."""
        found = []
        for content_hash in hashes:
            block_id = self.pool.find(content_hash)
            if block_id is None:
                break
            self.pool.retain(block_id)
            found.append(block_id)
        return found

    def _extend_hashes(self, request: Request, count: int) -> None:
        self._append_hashes(request.block_hashes, request.token_ids, request.cache_salt, count)

    def _append_hashes(self, hashes: list[bytes], tokens: TokenArray, cache_salt: str, count: int) -> None:
        """Compute the hashes of the first `count` full blocks; a hash covers all tokens up to the end of its block."""
        previous = hashes[-1] if hashes else chain_start(self._fingerprint, cache_salt)
        for i in range(len(hashes), count):
            block = np.ascontiguousarray(tokens[i * self.block_size : (i + 1) * self.block_size])
            previous = block_hash(previous, block.tobytes())
            hashes.append(previous)
