# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding's native state: live texts, and finished outputs shared by the requests of one salt."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastdeploy.ops.host import load_library
from fastdeploy.ops.text_batch import IntArray, TextBatch

MAX_TREE_DEPTH = 255
MAX_REACH = 64
MIN_CACHE_BYTES, MAX_CACHE_BYTES = 1 << 20, 1 << 34  # the last so that tokens can be numbered in 32 bits
_MESSAGE_BYTES = 256
_ALL = 2**62


@dataclass(frozen=True)
class SuffixConfig:
    """How far drafts go and how much is kept.

    Attributes:
        max_tree_depth: tokens of a match and its continuation together, 2..255.
        max_drafts: most tokens of a draft, 1..64; drafts stay within half the depth whatever is said here.
        max_spec_factor: a match of m tokens drafts at most m * factor.
        min_token_prob: a path whose probability falls below is not followed.
        max_cached_requests: finished outputs kept; -1 bounded by bytes only, 0 none.
        max_cache_bytes: memory of the finished outputs, 1 MiB .. 16 GiB.
    """

    max_tree_depth: int = 64
    max_drafts: int = 16
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    max_cached_requests: int = -1
    max_cache_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if not 2 <= self.max_tree_depth <= MAX_TREE_DEPTH:
            raise ValueError(f"max_tree_depth: expected 2 .. {MAX_TREE_DEPTH}, got {self.max_tree_depth}")
        if not 1 <= self.max_drafts <= MAX_REACH:
            raise ValueError(f"max_drafts: expected 1 .. {MAX_REACH}, got {self.max_drafts}")
        if self.max_cached_requests < -1:
            raise ValueError(f"max_cached_requests: expected -1 or more, got {self.max_cached_requests}")
        if self.max_cached_requests and not MIN_CACHE_BYTES <= self.max_cache_bytes <= MAX_CACHE_BYTES:
            raise ValueError(
                f"max_cache_bytes: expected {MIN_CACHE_BYTES} .. {MAX_CACHE_BYTES}, got {self.max_cache_bytes}"
            )

    @property
    def reach(self) -> int:
        """Most tokens of a draft; matches of up to max_tree_depth - reach tokens are looked for."""
        return min(self.max_drafts, self.max_tree_depth // 2)


class SuffixUsage(NamedTuple):
    """Memory and contents: live texts, then the finished outputs with those that wait to be counted, and those gone."""

    live_bytes: int
    shared_bytes: int
    num_outputs: int
    num_tokens: int
    num_waiting_tokens: int
    num_nodes: int
    num_evicted_outputs: int


class SuffixCache:
    """Guesses the continuation of live texts from what followed the same tokens before, in them or in shared outputs.

    A live text is known by its slot, a small number of the caller's choice. An output is shared from its request's end
    on; it is counted, and an evicted one removed, in bounded pieces that later calls do.
    """

    def __init__(self, rules: SuffixConfig) -> None:
        """Create an empty cache."""
        self._library = load_library()
        self._cache = self._library.fd_suffix_create(
            rules.max_tree_depth,
            rules.reach,
            rules.max_spec_factor,
            rules.min_token_prob,
            rules.max_cached_requests,
            rules.max_cache_bytes,
        )

    def __del__(self) -> None:
        if getattr(self, "_cache", None) is not None:
            self._library.fd_suffix_destroy(self._cache)

    def start(self, slot: int, salt: str, tokens: IntArray | Sequence[int]) -> None:
        """Meet a text; it shares outputs with those of the same salt only.

        Raises:
            ValueError: the slot is negative or in use, or a token is outside [0, 2**24).
        """
        values, name = _int32_array(tokens), salt.encode()
        wrong = self._library.fd_suffix_start(self._cache, slot, name, len(name), values.ctypes.data, len(values))
        _check("start", wrong, f"slot: expected one that is not in use, got {slot}")

    def draft_batch(self, batch: TextBatch) -> None:
        """Take in what the texts have grown by, and draft for every one.

        Raises:
            ValueError: a slot is not in use, or a token is outside [0, 2**24).
        """
        wrong = self._library.fd_suffix_draft_batch(self._cache, batch.address)
        if wrong:
            _check("draft_batch", wrong, f"slots: expected live slots, got {batch.slot(wrong - 1)}")

    def finish(self, slot: int, output: IntArray | Sequence[int]) -> None:
        """Forget a text and share its output.

        Raises:
            ValueError: the slot is not in use, or a token is outside [0, 2**24).
        """
        values = _int32_array(output)
        wrong = self._library.fd_suffix_finish(self._cache, slot, values.ctypes.data, len(values))
        _check("finish", wrong, f"slot: expected a live slot, got {slot}")

    def flush(self) -> None:
        """Finish all pending insertions and evictions now."""
        self._library.fd_suffix_work(self._cache, _ALL)

    def usage(self) -> SuffixUsage:
        """Return bytes and counts."""
        values = np.zeros(len(SuffixUsage._fields), np.int64)
        self._library.fd_suffix_usage(self._cache, values.ctypes.data)
        return SuffixUsage(*values.tolist())

    def check_integrity(self) -> None:
        """Count everything again, one suffix at a time.

        Raises:
            AssertionError: with what is wrong.
        """
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._library.fd_suffix_check_integrity(self._cache, message, _MESSAGE_BYTES)
        if message.value:
            raise AssertionError(f"SuffixCache: {message.value.decode()}")


def _check(operator: str, wrong: int, slot_message: str) -> None:
    if wrong < 0:
        raise ValueError(f"SuffixCache.{operator}: tokens: expected ids in [0, 2**24)")
    if wrong:
        raise ValueError(f"SuffixCache.{operator}: {slot_message}")


def _int32_array(values: IntArray | Sequence[int]) -> IntArray:
    return np.ascontiguousarray(values, dtype=np.int32)
