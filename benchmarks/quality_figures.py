# SPDX-License-Identifier: Apache-2.0
"""How far are the probabilities of one numeric format from those of another, on the same texts?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Row

BLOCK_ROWS = 64
Logprobs = NDArray[np.float32]  # of all tokens after each token of a text, [tokens - 1, vocab_size]


def log_softmax(logits: NDArray[np.float32]) -> Logprobs:
    """Replace logits, [rows, vocab_size], by log-probabilities."""
    for block in _blocks(logits):
        block -= block.max(-1, keepdims=True)
        block -= np.log(np.exp(block).sum(-1, keepdims=True, dtype=np.float64))
    return logits


def divergences(reference: Logprobs, logprobs: Logprobs) -> NDArray[np.float64]:
    """Return the Kullback-Leibler divergence of each row from that of the reference, [rows]."""
    pairs = zip(_blocks(reference), _blocks(logprobs))
    return np.concatenate([(np.exp(first) * (first - other)).sum(-1, dtype=np.float64) for first, other in pairs])


def _blocks(rows: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Yield views of a few rows each, whose intermediate results are small enough to be allocated again quickly."""
    for start in range(0, len(rows), BLOCK_ROWS):
        yield rows[start : start + BLOCK_ROWS]


class Figures:
    """What a format changes, collected text by text."""

    def __init__(self) -> None:
        self._logprobs: list[NDArray[np.float32]] = []  # of the texts' tokens: this format's, and the reference's
        self._reference: list[NDArray[np.float32]] = []
        self._divergences: list[NDArray[np.float64]] = []
        self._same_token: list[NDArray[np.bool_]] = []

    def add(self, reference: Logprobs, logprobs: Logprobs, next_ids: NDArray[np.int64]) -> None:
        """Compare the log-probabilities of one text, whose tokens after the first are `next_ids`."""
        rows = np.arange(len(next_ids))
        self._logprobs.append(logprobs[rows, next_ids])
        self._reference.append(reference[rows, next_ids])
        self._divergences.append(divergences(reference, logprobs))
        self._same_token.append(reference.argmax(-1) == logprobs.argmax(-1))

    def row(self) -> Row:
        """Return the figures over all texts.

        Perplexity, its change over the reference in percent and that change's standard error, as if tokens were
        independent; the mean of the absolute change of a token's
        log-probability and its 99 % quantile; the mean Kullback-Leibler divergence from the reference; the share of
        positions at which the most likely token is the same.
        """
        own = np.concatenate(self._logprobs).astype(np.float64)
        reference = np.concatenate(self._reference).astype(np.float64)
        changes = np.abs(own - reference)
        return {
            "perplexity": math.exp(-own.mean()),
            "worse_%": 100 * math.expm1(reference.mean() - own.mean()),
            "error_%": 100 * float((own - reference).std()) / math.sqrt(len(own)),
            "change": float(changes.mean()),
            "change_99%": float(np.quantile(changes, 0.99)),
            "kl": float(np.concatenate(self._divergences).mean()),
            "same_token": float(np.concatenate(self._same_token).mean()),
        }
