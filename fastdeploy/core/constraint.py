# SPDX-License-Identifier: Apache-2.0
"""The interface of constraints: what a grammar or a reasoning budget allows at each position of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]


class TokenConstraint(Protocol):
    """An automaton over the emitted tokens of one choice. Only `accept_token` changes its state.

    Attributes:
        error: why no token is allowed; "" if some are.
    """

    error: str

    def num_valid_tokens(self, draft: Sequence[int]) -> int:
        """Return the length of the longest prefix of the draft that is allowed."""

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most `limit` tokens that the constraint forces to follow; possibly none."""

    def fill_bitmasks(self, draft: Sequence[int], bitmasks: TokenArray) -> list[bool]:
        """Write the bitmask of each verification row; row i assumes that the first i draft tokens are accepted.

        Args:
            draft: [K] tokens.
            bitmasks: [1 + K, words] int32; bit v % 32 of word v // 32 is 1 if id v is allowed.

        Returns:
            Whether each row is constrained; the bitmask of an unconstrained row is not written.
        """

    def accept_token(self, token_id: int) -> str | None:
        """Advance by an emitted token; return `stop` or `length` if no token may follow it."""
