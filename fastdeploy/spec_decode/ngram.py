# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the continuation of the most recent earlier occurrence of the text's last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.core.request import NO_DRAFT, Draft, Request, TokenArray
from fastdeploy.ops.host import NgramIndex
from fastdeploy.spec_decode.base import Proposer


class NgramProposer(Proposer):
    """Looks up the longest suffix of `max_ngram_size` .. `min_ngram_size` tokens in prompt and output together."""

    name = "ngram"

    def __init__(self, max_ngram_size: int, min_ngram_size: int) -> None:
        self._index = NgramIndex(min_ngram_size, max_ngram_size)
        self._slots: dict[tuple[str, int], int] = {}
        self._free_slots: list[int] = []

    def start(self, request: Request) -> None:
        """Index the prompt."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[request.key] = slot
        self._index.start(slot, request.token_ids)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Index the emitted tokens."""
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        cu_tokens = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in emitted], out=cu_tokens[1:])
        flat = np.array([token for tokens in emitted for token in tokens], np.int32)
        self._index.extend_batch(slots, cu_tokens, flat)

    def propose(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Look every request up in one native call."""
        return self.extend(requests, caps, None)

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[TokenArray] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail."""
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        tokens, counts, _ = self._index.propose_batch(slots, np.array(caps, np.int32), tails)
        return [Draft(row[:n].copy(), self.name) if n else NO_DRAFT for row, n in zip(tokens, counts.tolist())]

    def finish(self, request: Request) -> None:
        """Drop the request's index."""
        slot = self._slots.pop(request.key)
        self._index.finish(slot)
        self._free_slots.append(slot)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are indexed."""
        assert set(self._slots) == {request.key for request in requests}
        self._index.check_integrity()
