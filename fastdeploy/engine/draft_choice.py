# SPDX-License-Identifier: Apache-2.0
"""Which drafts of which requests give the most tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

HURDLE = 1.03  # times the tokens per second of no drafts that drafts must promise


def most_profitable(
    products: Sequence[Sequence[float]],
    num_decoding: int,
    line: Sequence[float],
    draft_s: float = 0.0,
    first_s: Sequence[float] | None = None,
    right_s: float = 0.0,
) -> tuple[list[int], float]:
    """Return how many drafts of each request give the most tokens per second, and that rate.

    Products fall along a draft, so that the likeliest tokens of all are a beginning of each draft.

    Args:
        line: seconds of a step of 0, 1, ... drafts.
        draft_s: seconds that making them takes.
        first_s: of each request, seconds that its first draft adds to that.
        right_s: seconds that every draft that comes true adds, as whoever made it has to catch up with the text.
    """
    likeliest = sorted([(product, i) for i, row in enumerate(products) for product in row], reverse=True)
    emitted, best = float(num_decoding), 0
    best_rate = HURDLE * emitted / (line[0] + draft_s)
    begun: set[int] = set()
    for count, (product, i) in enumerate(likeliest, 1):
        emitted += product
        draft_s += right_s * product
        if first_s and i not in begun:
            draft_s += first_s[i]
            begun.add(i)
        if emitted > best_rate * (line[count] + draft_s):
            best, best_rate = count, emitted / (line[count] + draft_s)
    lengths = [0] * len(products)
    for _, i in likeliest[:best]:
        lengths[i] += 1
    return lengths, best_rate
