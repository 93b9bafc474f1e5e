# SPDX-License-Identifier: Apache-2.0
"""The two halves of a call over texts, each for itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy.ops.text_batch import IntArray, TextBatch
from fastdeploy.spec_decode.proposers.match_proposer import MatchIndex

Tokens = Sequence[int] | IntArray


def extend_batch(store: MatchIndex, slots: Sequence[int], added: Sequence[Tokens]) -> None:
    """Let texts grow."""
    batch = TextBatch()
    batch.fill(slots, [0] * len(slots), [np.asarray(tokens, np.int32) for tokens in added])
    store.draft_batch(batch)


def propose_batch(
    store: MatchIndex, slots: Sequence[int], caps: Sequence[int], tails: Sequence[IntArray] | None = None
) -> TextBatch:
    """Ask what follows texts."""
    batch = TextBatch()
    batch.fill(slots, caps, [np.empty(0, np.int32)] * len(slots), tails)
    store.draft_batch(batch)
    return batch
