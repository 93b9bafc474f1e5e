# SPDX-License-Identifier: Apache-2.0
"""What proposers that draft from text alone share: which native slot holds a request's text, and how much of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fastdeploy.core.request import Draft, Request, TokenArray
from fastdeploy.spec_decode.base import Proposer

Slots = NDArray[np.int32]


class TextStore(Protocol):
    """Holds live texts by slot: ops.host.NgramIndex, ops.suffix_cache.SuffixCache."""

    def extend_batch(self, slots: Slots, cu_tokens: Slots, tokens: TokenArray) -> None:
        """Append tokens[cu_tokens[i]:cu_tokens[i + 1]] to the text of slots[i]."""

    def check_integrity(self) -> None:
        """Raise AssertionError with what is wrong."""


class TextProposer(Proposer):
    """Reads a request's new tokens when it is asked for a draft: where drafts do not pay, nothing is spent on them."""

    def __init__(self, store: TextStore) -> None:
        self._store = store
        self._slots: dict[tuple[str, int], int] = {}
        self._num_read: dict[tuple[str, int], int] = {}  # tokens that the store knows
        self._free_slots: list[int] = []

    @abstractmethod
    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[TokenArray] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail, in one native call."""

    @abstractmethod
    def _begin(self, slot: int, request: Request) -> None:
        """Put the prompt into a free slot of the store."""

    @abstractmethod
    def _end(self, slot: int, request: Request) -> None:
        """Free a slot of the store."""

    def start(self, request: Request) -> None:
        """Read the prompt."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[request.key] = slot
        self._num_read[request.key] = request.num_tokens
        self._begin(slot, request)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Leave the tokens to the next `propose`."""

    def propose(self, requests: Sequence[Request], caps: Sequence[int]) -> list[Draft]:
        """Guess what follows each request's text."""
        return self.extend(requests, caps, None)

    def finish(self, request: Request) -> None:
        """Drop the request's text."""
        slot = self._slots.pop(request.key)
        del self._num_read[request.key]
        self._end(slot, request)
        self._free_slots.append(slot)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are held, and what the store says of itself."""
        assert set(self._slots) == {request.key for request in requests}
        self._store.check_integrity()

    def _read(self, requests: Sequence[Request]) -> Slots:
        """Take in what was emitted since the last time; return the requests' slots [n] int32."""
        slots = np.array([self._slots[r.key] for r in requests], np.int32)
        unread = [r.token_ids[self._num_read[r.key] :] for r in requests]
        cu_tokens = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in unread], out=cu_tokens[1:])
        self._store.extend_batch(slots, cu_tokens, np.concatenate(unread))
        self._num_read.update((r.key, r.num_tokens) for r in requests)
        return slots
