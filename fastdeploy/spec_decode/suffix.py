# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding (arXiv 2411.04975): the most frequent continuation of what was said before, here or by others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.core.request import NO_DRAFT, Draft, Request, TokenArray
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixDrafts, SuffixRules
from fastdeploy.spec_decode.base import Proposer


class SuffixProposer(Proposer):
    """Follows the request's own prompt and output, or the finished outputs of requests of the same `cache_salt`."""

    name = "suffix"

    def __init__(self, rules: SuffixRules) -> None:
        self._cache = SuffixCache(rules)
        self._slots: dict[tuple[str, int], int] = {}
        self._free_slots: list[int] = []

    def start(self, request: Request) -> None:
        """Read the prompt."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[request.key] = slot
        self._cache.start(slot, request.cache_salt, request.token_ids)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Read the emitted tokens."""
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        cu_tokens = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in emitted], out=cu_tokens[1:])
        flat = np.array([token for tokens in emitted for token in tokens], np.int32)
        self._cache.extend_batch(slots, cu_tokens, flat)

    def propose(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Draft for all requests in one native call."""
        return self.extend(requests, caps, None)

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[TokenArray] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail."""
        return self._drafts(self._match(requests, caps, tails))

    def propose_scored(self, requests: Sequence[Request], caps: Sequence[int]) -> list[tuple[Draft, float]]:
        """Draft as `propose` does; return the number of tokens that each draft is expected to have right, too."""
        found = self._match(requests, caps, None)
        return list(zip(self._drafts(found), found.scores.tolist()))

    def _match(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[TokenArray] | None
    ) -> SuffixDrafts:
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        return self._cache.propose_batch(slots, np.array(caps, np.int32), tails)

    def _drafts(self, found: SuffixDrafts) -> list[Draft]:
        pairs = zip(found.tokens, found.counts.tolist())
        return [Draft(row[:n].copy(), self.name) if n else NO_DRAFT for row, n in pairs]

    def finish(self, request: Request) -> None:
        """Drop the request's own text; what it said is shared from now on, however it ended."""
        slot = self._slots.pop(request.key)
        self._cache.finish(slot, request.output_token_ids)
        self._free_slots.append(slot)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are read, and that all counts are right."""
        assert set(self._slots) == {request.key for request in requests}
        self._cache.check_integrity()
