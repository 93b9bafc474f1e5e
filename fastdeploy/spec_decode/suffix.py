# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding (arXiv 2411.04975): the most frequent continuation of what was said before, here or by others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import NO_DRAFT, Draft, Request, TokenArray
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixDrafts, SuffixRules
from fastdeploy.spec_decode.base import Proposer
from fastdeploy.spec_decode.suffix_snapshot import (
    SALT_KEY_BYTES,
    ForeignFileError,
    Snapshot,
    UnusableSnapshotError,
    owner_of,
    read_snapshot,
    write_snapshot,
)

SNAPSHOT_FIELD = "speculative_config.suffix_decoding_snapshot_path"

logger = logging.getLogger("fastdeploy.engine")


class SuffixProposer(Proposer):
    """Follows the request's own prompt and output, or the finished outputs of requests of the same `cache_salt`.

    With `snapshot_path`, the outputs that one run ends with are there when the next one begins.
    """

    name = "suffix"

    def __init__(self, rules: SuffixRules, snapshot_path: str | None = None) -> None:
        self._rules = rules
        self._cache = SuffixCache(rules)
        self._path = None if snapshot_path is None else Path(snapshot_path)
        self._vocabulary = ""
        self._salt_key = os.urandom(SALT_KEY_BYTES)
        self._slots: dict[tuple[str, int], int] = {}
        self._num_read: dict[tuple[str, int], int] = {}  # tokens that the index knows
        self._free_slots: list[int] = []
        self._num_drafts = self._num_shared_drafts = 0

    def open(self, vocab_size: int, read_vocabulary: Callable[[], str]) -> None:
        """Take up the outputs of the run before.

        Raises:
            ConfigError: the snapshot could not be written, or the file is something else.
        """
        if self._path is None:
            return
        self._vocabulary = read_vocabulary()
        if not os.access(self._path.parent, os.W_OK):
            raise ConfigError(SNAPSHOT_FIELD, f"{self._path.parent} is no folder that can be written to")
        try:
            self._restore(read_snapshot(self._path, self._vocabulary, vocab_size, self._rules.max_cache_bytes))
        except FileNotFoundError:
            logger.info("no outputs of an earlier run in %s yet", self._path)
        except UnusableSnapshotError as error:
            logger.warning("the outputs of an earlier run in %s are not used: %s", self._path, error)
        except (ForeignFileError, OSError) as error:
            raise ConfigError(SNAPSHOT_FIELD, f"{self._path} cannot be used: {error}") from None

    def close(self) -> None:
        """Write the shared outputs for the next run."""
        if self._path is None:
            return
        try:
            write_snapshot(self._path, self._vocabulary, self._salt_key, self._cache.outputs())
        except OSError as error:
            logger.error("the outputs are not kept for the next run: %s", error)

    def _restore(self, snapshot: Snapshot) -> None:
        self._salt_key = snapshot.salt_key
        for owner, output in zip(snapshot.owners, snapshot.outputs):
            self._cache.restore(owner, output)
        self._cache.settle()
        logger.info("%d outputs of an earlier run taken from %s", self._cache.usage().num_outputs, self._path)

    def start(self, request: Request) -> None:
        """Read the prompt."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
        self._slots[request.key] = slot
        self._num_read[request.key] = request.num_tokens
        self._cache.start(slot, owner_of(request.cache_salt, self._salt_key), request.token_ids)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Leave the tokens to the next `propose`: where drafts do not pay, nothing is spent on them."""

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
        self._read(requests, slots)
        return self._cache.propose_batch(slots, np.array(caps, np.int32), tails)

    def _drafts(self, found: SuffixDrafts) -> list[Draft]:
        self._num_drafts += int(np.count_nonzero(found.counts))
        self._num_shared_drafts += int(found.is_shared.sum())
        found_of_each = zip(found.tokens, found.counts.tolist(), found.match_lens.tolist())
        return [
            Draft(row[:n].copy(), self.name, match_len=length) if n else NO_DRAFT for row, n, length in found_of_each
        ]

    def _read(self, requests: Sequence[Request], slots: npt.NDArray[np.int32]) -> None:
        """Take in what was emitted since the last time."""
        unread = [r.token_ids[self._num_read[r.key] :] for r in requests]
        cu_tokens = np.zeros(len(requests) + 1, np.int32)
        np.cumsum([len(tokens) for tokens in unread], out=cu_tokens[1:])
        self._cache.extend_batch(slots, cu_tokens, np.concatenate(unread))
        self._num_read.update((r.key, r.num_tokens) for r in requests)

    def finish(self, request: Request) -> None:
        """Drop the request's own text; what it said is shared from now on, however it ended."""
        slot = self._slots.pop(request.key)
        del self._num_read[request.key]
        self._cache.finish(slot, request.output_token_ids)
        self._free_slots.append(slot)

    def suffix_cache_stats(self) -> SuffixCacheStats:
        """Return memory, contents and hits."""
        usage = self._cache.usage()
        return SuffixCacheStats(
            live_bytes=usage.live_bytes,
            shared_bytes=usage.shared_bytes,
            num_outputs=usage.num_outputs,
            num_tokens=usage.num_tokens,
            num_evicted_outputs=usage.num_evicted_outputs,
            num_own_drafts=self._num_drafts - self._num_shared_drafts,
            num_shared_drafts=self._num_shared_drafts,
        )

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that the live requests, and no others, are read, and that all counts are right."""
        assert set(self._slots) == {request.key for request in requests}
        self._cache.check_integrity()
