# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: the continuation of the most recent earlier occurrence of the text's last few tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastdeploy.core.request import NO_DRAFT, Draft, Request, TokenArray
from fastdeploy.ops.host import NgramIndex
from fastdeploy.spec_decode.base import Proposer


class NgramProposer(Proposer):
    """Looks up the longest suffix of `max_ngram_size` .. `min_ngram_size` tokens in prompt and output together."""

    name = "ngram"

    def __init__(self, max_ngram_size: int, min_ngram_size: int) -> None:
        self._index = NgramIndex(min_ngram_size, max_ngram_size)
        self._slots: dict[tuple[str, int], int] = {}
        self._num_read: dict[tuple[str, int], int] = {}  # tokens that the index knows
        self._free_slots: list[int] = []

    def start(self, request: Request) -> None:
        """Index the prompt."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[request.key] = slot
        self._num_read[request.key] = request.num_tokens
        self._index.start(slot, request.token_ids)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Leave the tokens to the next `propose`: where drafts do not pay, nothing is spent on them."""

    def propose(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Look every request up in one native call."""
        return self.extend(requests, caps, None)

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[TokenArray] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail."""
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        self._read(requests, slots)
        tokens, counts, match_lens = self._index.propose_batch(slots, np.array(caps, np.int32), tails)
        return [
            Draft(row[:n].copy(), self.name, match_len=match_len) if n else NO_DRAFT
            for row, n, match_len in zip(tokens, counts.tolist(), match_lens.tolist())
        ]

    def _read(self, requests: Sequence[Request], slots: npt.NDArray[np.int32]) -> None:
        """Take in what was emitted since the last time."""
        unread = [r.token_ids[self._num_read[r.key] :] for r in requests]
        cu_tokens = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in unread], out=cu_tokens[1:])
        self._index.extend_batch(slots, cu_tokens, np.concatenate(unread))
        self._num_read.update((r.key, r.num_tokens) for r in requests)

    def finish(self, request: Request) -> None:
        """Drop the request's index."""
        slot = self._slots.pop(request.key)
        del self._num_read[request.key]
        self._index.finish(slot)
        self._free_slots.append(slot)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are indexed."""
        assert set(self._slots) == {request.key for request in requests}
        self._index.check_integrity()
