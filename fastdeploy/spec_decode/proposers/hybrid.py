# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction together with a method that matches text."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.mtp import MTPProposer
from fastdeploy.spec_decode.proposers.text_proposer import TextProposer

SURE_MATCH = 4  # tokens of a match that is preferred to the layer's drafts where the quota does not say


class HybridProposer(Proposer):
    """Lets the layer draft and the matcher go on behind its drafts.

    A match that is long enough (`DraftQuota.min_match_len`) and fills the quota takes the place of the layer's drafts:
    it costs no draft pass.
    """

    name = "mtp"
    is_model = True

    def __init__(self, layer: MTPProposer, matcher: TextProposer) -> None:
        self._layer = layer
        self._matcher = matcher

    def start(self, request: Request) -> None:
        """Pass the prompt to the matcher."""
        self._matcher.start(request)

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Match the tokens of every request; let the layer draft for those without a match that fills the quota."""
        match_quotas = [quota._replace(min_match_len=quota.min_match_len or SURE_MATCH) for quota in quotas]
        drafts = self._matcher.propose(requests, match_quotas)
        rest = [
            i
            for i, (draft, quota) in enumerate(zip(drafts, quotas))
            if len(draft) < quota.max_drafts and quota.max_draft_passes > 0
        ]
        if rest:
            extended = self._extended([requests[i] for i in rest], [quotas[i] for i in rest])
            for i, draft in zip(rest, extended):
                drafts[i] = draft
        return drafts

    def finish(self, request: Request) -> None:
        """Drop the request's tokens."""
        self._matcher.finish(request)

    def suffix_cache_stats(self) -> SuffixCacheStats | None:
        """Return what the matcher keeps."""
        return self._matcher.suffix_cache_stats()

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check the matcher's state."""
        self._matcher.check_integrity(requests)

    def _extended(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        firsts = self._layer.propose(requests, quotas)
        room = [quota.max_drafts - len(first) for first, quota in zip(firsts, quotas)]
        if not any(room):
            return firsts
        extensions = self._matcher.extend(requests, room, [first.token_ids for first in firsts])
        return [_join(first, extension) for first, extension in zip(firsts, extensions)]


def _join(first: Draft, extension: Draft) -> Draft:
    if not len(first) or not len(extension):
        return first if len(first) else extension
    sources = (*first.source_of_each(), *extension.source_of_each())
    return Draft(first.token_ids + extension.token_ids, first.source, sources)
