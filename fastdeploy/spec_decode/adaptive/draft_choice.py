# SPDX-License-Identifier: Apache-2.0
"""Which drafts of which requests give the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

HURDLE = 1.03  # times the tokens per second of no drafts that drafts must promise


def most_profitable(products: Sequence[Sequence[float]], num_decoding: int, line: Sequence[float]) -> list[int]:
    """Return how many drafts of each request give the most tokens per second.

    Products fall along a draft, so that the likeliest tokens of all are a beginning of each draft.

    Args:
        products: of each draft's tokens, the probability that it and all before it are kept.
        line: seconds of a step of 0, 1, ... drafts.
    """
    likeliest = sorted([(product, i) for i, row in enumerate(products) for product in row], reverse=True)
    emitted, best = float(num_decoding), 0
    best_rate = HURDLE * emitted / line[0]
    for count, (product, _) in enumerate(likeliest, 1):
        emitted += product
        if emitted > best_rate * line[count]:
            best, best_rate = count, emitted / line[count]
    lengths = [0] * len(products)
    for _, i in likeliest[:best]:
        lengths[i] += 1
    return lengths
