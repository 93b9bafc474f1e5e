# SPDX-License-Identifier: Apache-2.0
"""Chooses how many of the first token ids drafts are sampled from.

Byte-pair tokenizers number their tokens in the order of the merges, frequent ones first. Text in the main languages of
the training data therefore uses few of the later ids. With a large vocabulary, the head takes most of the time of a
draft pass, and it can compute the logits of the first ids only. If the target samples another id, one draft is
rejected; the output does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle import Tensor

from fastdeploy.core.request import Request, TokenArray
from fastdeploy.ops.logits import scatter_logits

MIN_VOCAB_SIZE = 4096  # smaller heads cost little
DECAY = 0.999  # of the counts, per token
MAX_MISSED_FRACTION = 1 / 32  # of the tokens


class Vocabulary(Protocol):
    """Chooses the size of the vocabulary from which drafts are sampled."""

    def observe(self, token_ids: TokenArray | memoryview) -> None:
        """Count tokens that were drafted from or filled."""

    def best_index(self, requests: Sequence[Request]) -> int:
        """Return the index of the size from which these requests get drafts."""


class MappedVocabulary:
    """The two ways of sampling with a head that drafts some ids only.

    The most probable id is found among the head's own (index 0) and then replaced by the target's. Noise belongs to the
    target's ids, so that for random sampling the logits are written to their places among those (index 1).
    """

    def observe(self, token_ids: TokenArray | memoryview) -> None:
        """Do nothing."""

    def best_index(self, requests: Sequence[Request]) -> int:
        """Return 0 if no request samples at random."""
        return int(not all(request.params.is_greedy for request in requests))


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

    def best_index(self, requests: Sequence[Request]) -> int:
        """Return the index in `vocab_sizes` of the smallest size that covers the text of all requests."""
        if not len(self._bounds):
            return 0
        missed = self._counts.sum() - self._counts.cumsum()
        return int(np.argmax(missed <= MAX_MISSED_FRACTION * self._counts.sum()))


def draft_vocab_sizes(vocab_size: int) -> list[int]:
    """Return an eighth, a quarter and half of the ids, each only if it is large enough, and the whole vocabulary."""
    fractions = (vocab_size // divisor // 64 * 64 for divisor in (8, 4, 2))
    return [*(size for size in fractions if size >= MIN_VOCAB_SIZE), vocab_size]


LogitsFunction = Callable[[Tensor, int, Tensor], None]


def spread_logits(compute: LogitsFunction, ids: NDArray[np.int32], own: Tensor) -> LogitsFunction:
    """Return what computes the logits of a head's own ids, or writes them to the places of the target's ids.

    Args:
        compute: computes the logits of the head's own ids.
        ids: the target's id of each of them.
        own: [max_rows, number of these ids] float32, scratch, which several functions may share.
    """
    places = paddle.to_tensor(ids)

    def compute_logits(states: Tensor, num_rows: int, out: Tensor) -> None:
        is_spread = out.shape[1] > len(ids)
        compute(states, num_rows, own if is_spread else out)
        if is_spread:
            scatter_logits(own, places, out, num_rows)

    return compute_logits
