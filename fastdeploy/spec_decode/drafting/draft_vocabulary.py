# SPDX-License-Identifier: Apache-2.0
"""Chooses how many of the first token ids drafts are sampled from.

Byte-pair tokenizers number their tokens in the order of the merges, frequent ones first. Text in the main languages of
the training data therefore uses few of the later ids. With a large vocabulary, the head takes most of the time of a
draft pass, and it can compute the logits of the first ids only. If the target samples another id, one draft is
rejected; the output does not change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.core.request import TokenArray

MIN_VOCAB_SIZE = 4096  # smaller heads cost little
DECAY = 0.999  # of the counts, per token
MAX_MISSED_FRACTION = 1 / 32  # of the tokens


class DraftVocabulary:
    """Finds the smallest number of first ids that covers nearly all recent tokens."""

    def __init__(self, vocab_sizes: Sequence[int]) -> None:
        """Start with the whole vocabulary.

        Args:
            vocab_sizes: the numbers of first ids to choose from, ascending; the last is the whole vocabulary.
        """
        self._bounds = np.array(vocab_sizes[:-1])
        self._counts = np.zeros(len(vocab_sizes))
        self._counts[-1] = 1.0

    def observe(self, token_ids: TokenArray | memoryview) -> None:
        """Count tokens that were drafted from or filled."""
        if len(self._bounds):
            buckets = np.searchsorted(self._bounds, np.asarray(token_ids), side="right")
            self._counts *= DECAY ** len(token_ids)
            self._counts += np.bincount(buckets, minlength=len(self._counts))

    def best_index(self) -> int:
        """Return the index in `vocab_sizes` of the size to sample from."""
        if not len(self._bounds):
            return 0
        missed = self._counts.sum() - self._counts.cumsum()
        return int(np.argmax(missed <= MAX_MISSED_FRACTION * self._counts.sum()))


def draft_vocab_sizes(vocab_size: int) -> list[int]:
    """Return an eighth, a quarter and half of the ids, each only if it is large enough, and the whole vocabulary."""
    fractions = (vocab_size // divisor // 64 * 64 for divisor in (8, 4, 2))
    return [*(size for size in fractions if size >= MIN_VOCAB_SIZE), vocab_size]
