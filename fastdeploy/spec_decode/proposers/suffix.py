# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding (arXiv 2411.04975): the most frequent continuation of what was said before, here or by others."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.spec_decode.proposers.text_proposer import TextProposer


class SuffixProposer(TextProposer):
    """Follows the request's own prompt and output, or the finished outputs of requests of the same `cache_salt`."""

    name = "suffix"

    def __init__(self, rules: SuffixConfig) -> None:
        self._cache = SuffixCache(rules)
        super().__init__(self._cache, rules.max_tree_depth - rules.reach)
        self._num_drafts = self._num_shared_drafts = 0

    def _begin(self, slot: int, request: Request) -> None:
        self._cache.start(slot, request.cache_salt, request.token_ids)

    def _end(self, slot: int, request: Request) -> None:
        """Drop the request's own text; what it said is shared from now on, however it ended."""
        self._cache.finish(slot, request.output_token_ids)

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[Sequence[int]] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail."""
        drafts = super().extend(requests, caps, tails)
        self._num_drafts += sum(draft is not NO_DRAFT for draft in drafts)
        self._num_shared_drafts += self._batch.num_shared()
        return drafts

    def suffix_cache_stats(self) -> SuffixCacheStats:
        """Return memory, contents and hits."""
        usage = self._cache.usage()
        return SuffixCacheStats(
            live_bytes=usage.live_bytes,
            shared_bytes=usage.shared_bytes,
            num_outputs=usage.num_outputs,
            num_tokens=usage.num_tokens,
            num_evicted_outputs=usage.num_evicted_outputs,
            num_own_drafts=self._num_drafts - self._num_shared_drafts,
            num_shared_drafts=self._num_shared_drafts,
        )
