# SPDX-License-Identifier: Apache-2.0
"""What proposers that draft from text alone share: which native slot holds a request's text, and how much of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.ops.text_batch import TextBatch
from fastdeploy.spec_decode.proposers.base import Proposer


class TextStore(Protocol):
    """Holds live texts by slot: ops.host.NgramIndex, ops.suffix_cache.SuffixCache."""

    def draft_batch(self, batch: TextBatch) -> None:
        """Take in what texts have grown by, and guess what follows them."""

    def check_integrity(self) -> None:
        """Raise AssertionError with what is wrong."""


class TextProposer(Proposer):
    """Finds earlier occurrences of a request's last tokens. New tokens are read when a draft is wanted, not before.

    Attributes:
        max_match_len: longest match that is reported, in tokens.
    """

    def __init__(self, store: TextStore, max_match_len: int) -> None:
        self.max_match_len = max_match_len
        self._store = store
        self._batch = TextBatch()
        self._slots: dict[tuple[str, int], int] = {}
        self._num_read: list[int] = []  # by slot: tokens that the store knows
        self._free_slots: list[int] = []

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[Sequence[int]] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail, in one native call."""
        batch, num_read = self._batch, self._num_read
        slots = [self._slots[request.key] for request in requests]
        batch.fill(slots, caps, [r.tokens_since(num_read[slot]) for r, slot in zip(requests, slots)], tails)
        self._store.draft_batch(batch)
        for request, slot in zip(requests, slots):
            num_read[slot] = request.num_tokens
        found = batch.proposals()
        return [Draft(ids, self.name, match_len=match_len) if ids else NO_DRAFT for ids, match_len in found]

    @abstractmethod
    def _begin(self, slot: int, request: Request) -> None:
        """Put the prompt into a free slot of the store."""

    @abstractmethod
    def _end(self, slot: int, request: Request) -> None:
        """Free a slot of the store."""

    def start(self, request: Request) -> None:
        """Read the prompt."""
        if not self._free_slots:
            self._free_slots.append(len(self._num_read))
            self._num_read.append(0)
        slot = self._slots[request.key] = self._free_slots.pop()
        self._num_read[slot] = request.num_tokens
        self._begin(slot, request)

    def propose(self, requests: Sequence[Request], quotas: Sequence[DraftQuota]) -> list[Draft]:
        """Guess what follows each request's tokens, where the match is long enough."""
        drafts = self.extend(requests, [quota.max_drafts for quota in quotas], None)
        return [
            draft if draft.match_len >= min(quota.min_match_len, self.max_match_len) else NO_DRAFT
            for draft, quota in zip(drafts, quotas)
        ]

    def finish(self, request: Request) -> None:
        """Drop the request's text."""
        slot = self._slots.pop(request.key)
        self._end(slot, request)
        self._free_slots.append(slot)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are held, and what the store says of itself."""
        assert set(self._slots) == {request.key for request in requests}
        self._store.check_integrity()
