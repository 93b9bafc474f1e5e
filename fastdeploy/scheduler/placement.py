# SPDX-License-Identifier: Apache-2.0
"""Where a request should begin: with the node that has its prompt cached, or on the owner's engine if that has room."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.stats import EngineStats
from fastdeploy.kv_cache.hashes import hash_blocks
from fastdeploy.scheduler.members import Members
from fastdeploy.scheduler.request_states import Role
from fastdeploy.scheduler.store import Store

MAX_LOOKUPS = 8  # prefixes per request, the longest ones
LOOKUP_S = 0.25  # after which a request begins without a hint
RESERVED_BLOCKS = 0.08  # of the cache, which running requests may soon need


class Hint(NamedTuple):
    """The node that has the first `num_cached` tokens of a prompt cached; "" if none is known."""

    node: str = ""
    num_cached: int = 0


class Placement:
    """Finds hints in Redis."""

    def __init__(self, store: Store, members: Members, group: str, block_size: int) -> None:
        """Look for prefixes of this group, among these nodes."""
        self._store, self._members = store, members
        self._group, self._block_size = group, block_size

    async def find_hint(self, request: GenerationRequest) -> Hint:
        """Return the node that has the longest prefix of a prompt cached, unless it is overloaded.

        What it has cached counts only if it can go on behind the prompt, which a prefill node leaves to others.

        Raises:
            StoreError: Redis does not answer.
        """
        if len(request.prompt_token_ids) < self._block_size or not self._members.has_others:
            return Hint()
        hashes = hash_blocks(self._group, request.cache_salt, request.prompt_token_ids, self._block_size)
        longest = hashes[: -MAX_LOOKUPS - 1 : -1]
        try:
            async with asyncio.timeout(LOOKUP_S):
                nodes = await self._store.find_prefixes(longest)
        except TimeoutError:
            return Hint()
        if (found := self._members.choose(nodes)) is None:
            return Hint()
        index, node = found
        is_prefill = self._members.records[node].role is Role.PREFILL
        return Hint(node, 0 if is_prefill else (len(hashes) - index) * self._block_size)


def local_room(stats: EngineStats, description: Mapping[str, Any], num_legs: int) -> int:
    """Return how many more requests an engine may take, given its latest counters and our own legs that it has."""
    if stats.num_free_blocks <= RESERVED_BLOCKS * stats.num_blocks:
        return 0
    return max(0, int(description["max_num_seqs"]) - max(stats.num_running + stats.num_waiting, num_legs))
