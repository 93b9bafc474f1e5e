# SPDX-License-Identifier: Apache-2.0
"""The base class of proposers that draft what followed an earlier match of the context's last tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.ops.text_batch import TextBatch
from fastdeploy.spec_decode.proposers.base import Proposer

MAX_PROMPT_TOKENS = 8192  # of new prompts that a step indexes, beside the last one; suffix decoding takes 5 ms


class MatchIndex(Protocol):
    """An index over the tokens of running requests: ops.host.NgramIndex or ops.suffix_cache.SuffixCache."""

    def draft_batch(self, batch: TextBatch) -> None:
        """Append new tokens to sequences, and find a match and a draft for each."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the index is inconsistent."""


class MatchProposer(Proposer):
    """Finds earlier occurrences of a request's last tokens.

    In the index, a request has a sequence id; those of finished requests are used again. Tokens are indexed lazily, by
    the next call that drafts for the request: waiting requests need no memory in the index.

    Attributes:
        max_match_len: longest match length that the index reports, in tokens.
    """

    def __init__(self, index: MatchIndex, max_match_len: int) -> None:
        self.max_match_len = max_match_len
        self._match_index = index
        self._batch = TextBatch()
        self._sequence_ids: dict[tuple[str, int], int] = {}
        self._num_indexed: list[int] = []  # by sequence id: number of tokens in the index
        self._free_ids: list[int] = []

    def extend(
        self,
        requests: Sequence[Request],
        max_drafts: Sequence[int],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[Draft]:
        """Return what follows a match of each request's tokens, in one native call.

        Requests with new prompts get no draft while the step has indexed enough of other prompts.

        Args:
            requests: to draft for.
            max_drafts: maximum number of tokens to draft for each request.
            drafts: tokens that another proposer has drafted for each request; the match includes them.
        """
        batch, num_indexed = self._batch, self._num_indexed
        ids = [self._sequence_ids[request.key] for request in requests]
        if not all([num_indexed[i] for i in ids]) and not self._index_prompts(requests, ids):
            return self._extend_indexed(requests, max_drafts, drafts)
        batch.fill(ids, max_drafts, [r.tokens_since(num_indexed[i]) for r, i in zip(requests, ids)], drafts)
        self._match_index.draft_batch(batch)
        for request, i in zip(requests, ids):
            num_indexed[i] = request.num_tokens
        found = batch.proposals()
        return [
            Draft(token_ids, self.name, match_len=match_len) if token_ids else NO_DRAFT
            for token_ids, match_len in found
        ]

    @abstractmethod
    def _add_sequence(self, sequence_id: int, request: Request) -> None:
        """Add the prompt to the index."""

    @abstractmethod
    def _remove_sequence(self, sequence_id: int, request: Request) -> None:
        """Remove the request's tokens from the index."""

    def start(self, request: Request) -> None:
        """Give the request a sequence id."""
        if not self._free_ids:
            self._free_ids.append(len(self._num_indexed))
            self._num_indexed.append(0)
        sequence_id = self._sequence_ids[request.key] = self._free_ids.pop()
        self._num_indexed[sequence_id] = 0

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Draft for the requests whose match is at least `min_match_len` tokens long."""
        drafts = self.extend(requests, [quota.max_drafts for quota in quotas])
        return [
            draft if draft.match_len >= min(quota.min_match_len, self.max_match_len) else NO_DRAFT
            for draft, quota in zip(drafts, quotas)
        ]

    def finish(self, request: Request) -> None:
        """Remove the request from the index, after adding it if it has an output that the index may keep."""
        sequence_id = self._sequence_ids.pop(request.key)
        if self._num_indexed[sequence_id] == 0 and request.num_output_tokens:
            self._index_prompt(sequence_id, request)
        if self._num_indexed[sequence_id]:
            self._remove_sequence(sequence_id, request)
        self._free_ids.append(sequence_id)

    def _index_prompts(self, requests: Sequence[Request], ids: Sequence[int]) -> bool:
        """Index new prompts until they have MAX_PROMPT_TOKENS; return whether all are indexed now."""
        num_tokens = 0
        for request, i in zip(requests, ids):
            if self._num_indexed[i] == 0:
                if num_tokens >= MAX_PROMPT_TOKENS:
                    return False
                self._index_prompt(i, request)
                num_tokens += request.num_prompt_tokens
        return True

    def _extend_indexed(
        self, requests: Sequence[Request], max_drafts: Sequence[int], drafts: Sequence[Sequence[int]] | None
    ) -> list[Draft]:
        """Draft for the requests whose prompts are indexed, and return no draft for the others."""
        found = [NO_DRAFT] * len(requests)
        ready = [k for k, request in enumerate(requests) if self._num_indexed[self._sequence_ids[request.key]]]
        some = MatchProposer.extend(
            self,
            [requests[k] for k in ready],
            [max_drafts[k] for k in ready],
            None if drafts is None else [drafts[k] for k in ready],
        )
        for k, draft in zip(ready, some):
            found[k] = draft
        return found

    def _index_prompt(self, sequence_id: int, request: Request) -> None:
        self._add_sequence(sequence_id, request)
        self._num_indexed[sequence_id] = request.num_prompt_tokens

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the index holds exactly the unfinished requests and is consistent."""
        assert set(self._sequence_ids) == {request.key for request in requests}
        self._match_index.check_integrity()
