# SPDX-License-Identifier: Apache-2.0
"""The buffers of a call for many live texts, reused from call to call: taking an address costs half of a draft."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from typing_extensions import Buffer

IntArray = NDArray[np.int32]
MAX_TAIL = 16
_FIRST_TEXTS, _FIRST_DRAFTS, _FIRST_TOKENS = 16, 16, 1024


class _Layout(ctypes.Structure):
    """fd::TextBatch of custom_ops/host/text_batch.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_texts", "stride")),
        *((name, ctypes.c_void_p) for name in ("slots", "cu_tokens", "tokens", "caps", "cu_tails", "tails")),
        *((name, ctypes.c_void_p) for name in ("drafts", "counts", "match_lens", "is_shared")),
    ]


class TextBatch:
    """The inputs and outputs of one call of NgramIndex.draft_batch or SuffixCache.draft_batch."""

    def __init__(self) -> None:
        self._layout = _Layout()
        self.address = ctypes.addressof(self._layout)
        self._num_texts = 0
        self._reserve(_FIRST_TEXTS, _FIRST_DRAFTS)
        self._reserve_tokens(_FIRST_TOKENS)

    def __len__(self) -> int:
        return self._num_texts

    def slot(self, index: int) -> int:
        """Return the slot of a text."""
        return int(self._slots[index])

    def fill(
        self,
        slots: Sequence[int],
        caps: Sequence[int],
        added: Sequence[Buffer],
        tails: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Describe the next call.

        Args:
            slots: [n] slots of the texts.
            caps: [n] maximum number of drafts of each text; 0 or less for none.
            added: [n] int32 arrays of the tokens that are appended to each text.
            tails: [n] lists of up to MAX_TAIL tokens that count as the end of the texts in this call only.

        Raises:
            ValueError: lengths differ, or a tail is too long.
        """
        n = len(slots)
        if len(caps) != n or len(added) != n:
            raise ValueError(f"texts: expected {n} caps and {n} arrays of tokens, got {len(caps)} and {len(added)}")
        longest = max(caps, default=0)
        if n > self._room or longest > self._stride:
            self._reserve(max(self._room, 2 * n), max(self._stride, longest))
        self._num_texts = self._layout.num_texts = n
        for i in range(n):
            self._slots[i], self._caps[i] = slots[i], caps[i]
        self._add_tokens(added)
        self._add_tails(tails)

    def proposals(self) -> list[tuple[list[int], int]]:
        """Return the drafts of each text and its match length: how many of its last tokens occurred before."""
        starts = range(0, self._num_texts * self._stride, self._stride)
        return [
            (self._draft_memory[start : start + count].tolist(), match_len)
            for start, count, match_len in zip(starts, self._count_memory, self._match_len_memory)
        ]

    def num_shared(self) -> int:
        """Return how many drafts follow the cached output of another request (suffix decoding only)."""
        return sum(self._is_shared_memory[: self._num_texts])

    def _add_tokens(self, added: Sequence[Buffer]) -> None:
        texts: list[memoryview] = [memoryview(tokens) for tokens in added]
        num_tokens = sum(map(len, texts))
        if num_tokens > len(self._tokens):
            self._reserve_tokens(2 * num_tokens)
        at = 0
        for i, tokens in enumerate(texts, 1):
            self._tokens[at : at + len(tokens)] = tokens
            self._cu_tokens[i] = at = at + len(tokens)

    def _add_tails(self, tails: Sequence[Sequence[int]] | None) -> None:
        if tails is None:
            self._layout.cu_tails = None
            return
        lengths = [len(tail) for tail in tails]
        if len(tails) != len(self) or max(lengths, default=0) > MAX_TAIL:
            raise ValueError(f"tails: expected {len(self)} of at most {MAX_TAIL} tokens, got lengths {lengths}")
        for i, end in enumerate(accumulate(lengths), 1):
            self._cu_tails[i] = end
        for at, token_id in enumerate(chain.from_iterable(tails)):
            self._tails[at] = token_id
        self._layout.cu_tails = self._cu_tails_address

    def _reserve(self, num_texts: int, num_drafts: int) -> None:
        self._room, self._stride = num_texts, num_drafts
        slots, caps, cu_tokens, cu_tails = np.zeros((4, num_texts + 1), np.int32)
        tails = np.zeros(num_texts * MAX_TAIL, np.int32)
        self._counts, self._match_lens, self._is_shared = np.zeros((3, num_texts), np.int32)
        self._drafts = np.zeros((num_texts, num_drafts), np.int32)
        self._layout.stride = num_drafts
        self._cu_tails_address = cu_tails.ctypes.data
        for name, array in (("slots", slots), ("caps", caps), ("cu_tokens", cu_tokens), ("tails", tails)):
            setattr(self._layout, name, array.ctypes.data)
        for name in ("counts", "match_lens", "is_shared", "drafts"):
            setattr(self._layout, name, getattr(self, f"_{name}").ctypes.data)
        # Memoryviews of what every step accesses: faster than NumPy when the processor's caches hold a model's weights.
        self._slots, self._caps, self._cu_tokens, self._cu_tails = slots.data, caps.data, cu_tokens.data, cu_tails.data
        self._tails, self._draft_memory = tails.data, self._drafts.reshape(-1).data
        self._count_memory, self._match_len_memory = self._counts.data, self._match_lens.data
        self._is_shared_memory = self._is_shared.data

    def _reserve_tokens(self, num_tokens: int) -> None:
        tokens = np.zeros(num_tokens, np.int32)
        self._tokens, self._layout.tokens = tokens.data, tokens.ctypes.data
