# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction together with n-gram or suffix matching."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.match_proposer import MatchProposer
from fastdeploy.spec_decode.proposers.mtp import MTPProposer

DEFAULT_MIN_MATCH_LEN = 4  # tokens of a match that replaces the layer's drafts, if the quota has no minimum


class HybridProposer(Proposer):
    """Drafts with an MTP layer and appends what followed an earlier match of the context and these drafts.

    If a match of the context alone is at least `DraftQuota.min_match_len` tokens long and fills the quota, it replaces
    the layer's drafts, which saves the draft passes.
    """

    name = "mtp"

    def __init__(self, layer: MTPProposer, matcher: MatchProposer) -> None:
        self._layer = layer
        self._matcher = matcher

    def start(self, request: Request) -> None:
        """Start the request in the matcher; the layer has no state per request."""
        self._matcher.start(request)

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Match the tokens of every request, then run the layer for those whose match does not fill the quota."""
        match_quotas = [quota._replace(min_match_len=quota.min_match_len or DEFAULT_MIN_MATCH_LEN) for quota in quotas]
        drafts = self._matcher.propose(requests, match_quotas)
        unfilled = [
            i
            for i, (draft, quota) in enumerate(zip(drafts, quotas))
            if len(draft) < quota.max_drafts and quota.max_draft_passes > 0
        ]
        if unfilled:
            layer_drafts = self._draft_and_extend([requests[i] for i in unfilled], [quotas[i] for i in unfilled])
            for i, draft in zip(unfilled, layer_drafts):
                drafts[i] = draft
        return drafts

    def finish(self, request: Request) -> None:
        """Finish the request in the matcher."""
        self._matcher.finish(request)

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return the matcher's counters."""
        return self._matcher.suffix_cache_stats()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check the matcher's state."""
        self._matcher.check_integrity(requests)

    def _draft_and_extend(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Run the layer, and fill the rest of each quota with matches of the context and the layer's drafts."""
        drafts = self._layer.propose(requests, quotas)
        room = [quota.max_drafts - len(draft) for draft, quota in zip(drafts, quotas)]
        if not any(room):
            return drafts
        extensions = self._matcher.extend(requests, room, [draft.token_ids for draft in drafts])
        return [_join(draft, extension) for draft, extension in zip(drafts, extensions)]


def _join(first: Draft, second: Draft) -> Draft:
    if not len(first) or not len(second):
        return first if len(first) else second
    sources = (*first.source_of_each(), *second.source_of_each())
    return Draft(first.token_ids + second.token_ids, first.source, sources)
