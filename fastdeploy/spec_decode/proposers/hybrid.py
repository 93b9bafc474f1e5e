# SPDX-License-Identifier: Apache-2.0
"""A drafting model together with n-gram or suffix matching."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import Draft, DraftQuota, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.spec_decode.proposers.base import Proposer
from fastdeploy.spec_decode.proposers.match_proposer import MatchProposer
from fastdeploy.spec_decode.proposers.model_proposer import ModelProposer

DEFAULT_MIN_MATCH_LEN = 4  # tokens of a match that replaces the model's drafts, if the quota has no minimum


class HybridProposer(Proposer):
    """Drafts with a model and appends what followed an earlier match of the context and these drafts.

    If a match of the context alone is at least `DraftQuota.min_match_len` tokens long and fills the quota, it replaces
    the model's drafts, which saves the draft passes.
    """

    def __init__(self, model: ModelProposer, matcher: MatchProposer) -> None:
        self.name, self._model = model.name, model
        self._matcher = matcher

    def start(self, request: Request) -> None:
        """Start the request in the matcher; the model has no state per request."""
        self._matcher.start(request)

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Match the tokens of every request, then run the model for those whose match does not fill the quota."""
        match_quotas = [quota._replace(min_match_len=quota.min_match_len or DEFAULT_MIN_MATCH_LEN) for quota in quotas]
        drafts = self._matcher.propose(requests, match_quotas)
        unfilled = [
            i
            for i, (draft, quota) in enumerate(zip(drafts, quotas))
            if len(draft) < quota.max_drafts and quota.max_draft_passes > 0
        ]
        if unfilled:
            model_drafts = self._draft_and_extend([requests[i] for i in unfilled], [quotas[i] for i in unfilled])
            for i, draft in zip(unfilled, model_drafts):
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
        """Run the model, and fill the rest of each quota with matches of the context and the model's drafts."""
        drafts = self._model.propose(requests, quotas)
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
