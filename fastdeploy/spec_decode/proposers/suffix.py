# SPDX-License-Identifier: Apache-2.0
"""SuffixDecoding (arXiv 2411.04975): the most frequent continuation of what was said before, here or by others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fastdeploy.core.errors import ConfigError
from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import SuffixCacheStats
from fastdeploy.ops.suffix_cache import SuffixCache, SuffixRules
from fastdeploy.spec_decode.proposers.suffix_snapshot import (
    SALT_KEY_BYTES,
    ForeignFileError,
    Snapshot,
    UnusableSnapshotError,
    owner_of,
    read_snapshot,
    write_snapshot,
)
from fastdeploy.spec_decode.proposers.text_proposer import TextProposer

SNAPSHOT_FIELD = "speculative_config.suffix_decoding_snapshot_path"

logger = logging.getLogger("fastdeploy.engine")


class SuffixProposer(TextProposer):
    """Follows the request's own prompt and output, or the finished outputs of requests of the same `cache_salt`.

    With `snapshot_path`, the outputs that one run ends with are there when the next one begins.
    """

    name = "suffix"

    def __init__(self, rules: SuffixRules, snapshot_path: str | None = None) -> None:
        self._rules = rules
        self._cache = SuffixCache(rules)
        super().__init__(self._cache, rules.max_tree_depth - rules.reach)
        self._path = None if snapshot_path is None else Path(snapshot_path)
        self._vocabulary = ""
        self._salt_key = os.urandom(SALT_KEY_BYTES)
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

    def _begin(self, slot: int, request: Request) -> None:
        self._cache.start(slot, owner_of(request.cache_salt, self._salt_key), request.token_ids)

    def _end(self, slot: int, request: Request) -> None:
        """Drop the request's own text; what it said is shared from now on, however it ended."""
        self._cache.finish(slot, request.output_token_ids)

    def extend(
        self, requests: Sequence[Request], caps: Sequence[int], tails: Sequence[Sequence[int]] | None
    ) -> list[Draft]:
        """Guess what follows each request's text and its tail."""
        drafts = super().extend(requests, caps, tails)
        self._num_drafts += sum(draft is not NO_DRAFT for draft in drafts)
        self._num_shared_drafts += self._batch.num_shared()
        return drafts

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
