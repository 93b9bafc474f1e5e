# SPDX-License-Identifier: Apache-2.0
"""What may constrain a request's output beside its sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


class TokenConstraint(Protocol):
    """An automaton over the tokens that one choice emits. Only `push` moves it; it knows nothing of drafts refused.

    Attributes:
        error: why it can allow no token any more ("" while it can).
    """

    error: str

    def num_allowed(self, draft: Sequence[int]) -> int:
        """Return how many of the draft's first tokens may follow what was emitted, one after the other."""

    def forced_tokens(self, limit: int) -> list[int]:
        """Return tokens, `limit` at most, that are all but certain to follow; possibly none."""

    def fill_masks(self, draft: Sequence[int], masks: TokenArray) -> list[bool]:
        """Write the mask of each row of a verification, row i as if the first i tokens of the draft were emitted.

        Args:
            draft: [K] tokens.
            masks: [1 + K, words] int32, bit v % 32 of word v // 32 is 1 where id v may follow.

        Returns:
            For each row whether it is constrained; the mask of one that is not was left alone.
        """

    def push(self, token_id: int) -> str | None:
        """Take an emitted token; return `stop` or `length` if it must be the last one."""
