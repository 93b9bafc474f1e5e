# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding (arXiv 2411.04975): the most frequent continuation of the context's last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixConfig
from fastdeploy.spec_decode.proposers.match_proposer import MatchProposer


class SuffixProposer(MatchProposer):
    """Matches the request's own prompt and output, and cached outputs of requests with the same `cache_salt`."""

    name = "suffix"

    def __init__(self, config: SuffixConfig) -> None:
        self._cache = SuffixCache(config)
        super().__init__(self._cache, config.max_tree_depth - config.max_draft_len)
        self._num_drafts = self._num_shared_drafts = 0

    def _add_sequence(self, sequence_id: int, request: Request) -> None:
        self._cache.start(sequence_id, request.cache_salt, request.prompt_token_ids)

    def _remove_sequence(self, sequence_id: int, request: Request) -> None:
        """Remove the request's tokens; its output, complete or aborted, becomes a cached output."""
        self._cache.finish(sequence_id, request.output_token_ids)

    def extend(
        self,
        requests: Sequence[Request],
        max_drafts: Sequence[int],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[Draft]:
        """Match as the base class does, and count the drafts."""
        found = super().extend(requests, max_drafts, drafts)
        self._num_drafts += sum(draft is not NO_DRAFT for draft in found)
        self._num_shared_drafts += self._batch.num_shared()
        return found

    def suffix_cache_stats(self) -> SuffixCacheStats:
        """Return memory, contents and the number of drafts from each kind of match."""
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
