# SPDX-License-Identifier: Apache-2.0
"""Among how many ids a draft is looked for.

Tokenizers that merge pairs number their tokens in the order in which they were merged, frequent ones first: a text in
the languages that most of the training text was in uses few of the later ids. On a large vocabulary the head is most of
what a draft costs, and it can be asked for its first outputs alone. A token left out so is a draft missed, not a text
changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.core.request import TokenArray

LEAST_IDS = 4096  # below it a head costs little
MEMORY = 0.999  # of the counts, with every token
MOST_MISSED = 1 / 32  # of the text's tokens


class DraftVocabulary:
    """Finds the fewest first ids that nearly all tokens of late were among."""

    def __init__(self, vocab_sizes: Sequence[int]) -> None:
        """Start with all ids; `vocab_sizes` are the numbers of first ids to choose from, rising, all of them last."""
        self._bounds = np.array(vocab_sizes[:-1])
        self._counts = np.zeros(len(vocab_sizes))
        self._counts[-1] = 1.0

    def observe(self, token_ids: TokenArray | memoryview) -> None:
        """Take in a piece of text."""
        if len(self._bounds):
            kinds = np.searchsorted(self._bounds, np.asarray(token_ids), side="right")
            self._counts *= MEMORY ** len(token_ids)
            self._counts += np.bincount(kinds, minlength=len(self._counts))

    def choose(self) -> int:
        """Return which of the sizes to draft from."""
        if not len(self._bounds):
            return 0
        missed = self._counts.sum() - self._counts.cumsum()
        return int(np.argmax(missed <= MOST_MISSED * self._counts.sum()))


def draft_vocab_sizes(vocab_size: int) -> list[int]:
    """Return an eighth, a quarter and half of the ids, as far as that is many, and all."""
    parts = (vocab_size // share // 64 * 64 for share in (8, 4, 2))
    return [*(size for size in parts if size >= LEAST_IDS), vocab_size]
