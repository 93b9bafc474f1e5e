# SPDX-License-Identifier: Apache-2.0
"""The native state of suffix decoding: live texts, and cached outputs that requests of one salt share."""

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
MIN_CACHE_BYTES, MAX_CACHE_BYTES = 1 << 20, 1 << 34  # the maximum keeps token positions within 32 bits
_MESSAGE_BYTES = 256
_ALL = 2**62


@dataclass(frozen=True)
class SuffixConfig:
    """Limits of drafts and of the cache.

    Attributes:
        max_tree_depth: maximum tokens of a match and its continuation together, 2..255.
        max_drafts: maximum tokens of a draft, 1..64; never more than half of max_tree_depth.
        max_spec_factor: a match of m tokens drafts at most m * factor tokens.
        min_token_prob: drafts end where the probability of the path falls below this value.
        max_cached_requests: maximum number of cached outputs; -1: limited by bytes only, 0: none.
        max_cache_bytes: memory of the cached outputs, 1 MiB .. 16 GiB.
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
    def max_draft_len(self) -> int:
        """Maximum tokens of a draft; matches have at most max_tree_depth - max_draft_len tokens."""
        return min(self.max_drafts, self.max_tree_depth // 2)


class SuffixUsage(NamedTuple):
    """Bytes of live texts and of the cache, and the contents of the cache.

    num_waiting_tokens are not in the tree yet; num_evicted_outputs counts all evictions so far.
    """

    live_bytes: int
    shared_bytes: int
    num_outputs: int
    num_tokens: int
    num_waiting_tokens: int
    num_nodes: int
    num_evicted_outputs: int


class SuffixCache:
    """Drafts the continuation of live texts from what followed the same tokens before, in them or in cached outputs.

    A live text is identified by its slot, a small number that the caller chooses. The output of a request is cached
    when the request finishes. Later calls insert it into the tree, and remove evicted outputs, in bounded pieces.
    """

    def __init__(self, config: SuffixConfig) -> None:
        """Create an empty cache."""
        self._library = load_library()
        self._cache = self._library.fd_suffix_create(
            config.max_tree_depth,
            config.max_draft_len,
            config.max_spec_factor,
            config.min_token_prob,
            config.max_cached_requests,
            config.max_cache_bytes,
        )

    def __del__(self) -> None:
        if getattr(self, "_cache", None) is not None:
            self._library.fd_suffix_destroy(self._cache)

    def start(self, slot: int, salt: str, tokens: IntArray | Sequence[int]) -> None:
        """Add a live text, which shares cached outputs with texts of the same salt only.

        Raises:
            ValueError: the slot is negative or in use, or a token is outside [0, 2**24).
        """
        values, name = _int32_array(tokens), salt.encode()
        wrong = self._library.fd_suffix_start(self._cache, slot, name, len(name), values.ctypes.data, len(values))
        _check("start", wrong, f"slot: expected one that is not in use, got {slot}")

    def draft_batch(self, batch: TextBatch) -> None:
        """Append tokens to the texts and draft for each of them.

        Raises:
            ValueError: a slot is not in use, or a token is outside [0, 2**24).
        """
        wrong = self._library.fd_suffix_draft_batch(self._cache, batch.address)
        if wrong:
            _check("draft_batch", wrong, f"slots: expected live slots, got {batch.slot(wrong - 1)}")

    def finish(self, slot: int, output: IntArray | Sequence[int]) -> None:
        """Remove a live text and cache its output.

        Raises:
            ValueError: the slot is not in use, or a token is outside [0, 2**24).
        """
        values = _int32_array(output)
        wrong = self._library.fd_suffix_finish(self._cache, slot, values.ctypes.data, len(values))
        _check("finish", wrong, f"slot: expected a live slot, got {slot}")

    def flush(self) -> None:
        """Finish all pending insertions and evictions now."""
        self._library.fd_suffix_process(self._cache, _ALL)

    def usage(self) -> SuffixUsage:
        """Return bytes and counts."""
        values = np.zeros(len(SuffixUsage._fields), np.int64)
        self._library.fd_suffix_usage(self._cache, values.ctypes.data)
        return SuffixUsage(*values.tolist())

    def check_integrity(self) -> None:
        """Recount the tree, one suffix at a time.

        Raises:
            AssertionError: the tree is inconsistent; the message says how.
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
