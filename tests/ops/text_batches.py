# SPDX-License-Identifier: Apache-2.0
"""Calls that only append to texts, and calls that only draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.ops.text_batch import IntArray, TextBatch
from fastdeploy.spec_decode.proposers.match_proposer import MatchIndex

Tokens = Sequence[int] | IntArray


def extend_batch(store: MatchIndex, slots: Sequence[int], added: Sequence[Tokens]) -> None:
    """Append tokens to texts."""
    batch = TextBatch()
    batch.fill(slots, [0] * len(slots), [np.asarray(tokens, np.int32) for tokens in added])
    store.draft_batch(batch)


def propose_batch(
    store: MatchIndex, slots: Sequence[int], caps: Sequence[int], tails: Sequence[IntArray] | None = None
) -> TextBatch:
    """Draft for texts."""
    batch = TextBatch()
    batch.fill(slots, caps, [np.empty(0, np.int32)] * len(slots), tails)
    store.draft_batch(batch)
    return batch
