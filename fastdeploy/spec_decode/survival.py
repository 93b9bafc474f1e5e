# SPDX-License-Identifier: Apache-2.0
"""How likely a draft's tokens are to be kept, estimated from what became of earlier ones."""

from __future__ import annotations

from collections import defaultdict

Key = tuple[str, int]

FIRST_GUESS = 0.7  # hopeful: a method that nobody has tried is tried
PRIOR_WEIGHT = 2.0  # tokens that the broader estimate counts for beside the narrower one's own
REQUEST_MEMORY = 0.9  # weight that a request's counts keep with every new one
METHOD_MEMORY = 0.99


class _Rate:
    """Tokens kept of those that were reached, fading with time."""

    __slots__ = ("kept", "reached")

    def __init__(self) -> None:
        self.kept = 0.0
        self.reached = 0.0

    def learn(self, kept: bool, memory: float) -> None:
        self.kept = memory * self.kept + kept
        self.reached = memory * self.reached + 1.0

    def estimate(self, prior: float) -> float:
        return (self.kept + PRIOR_WEIGHT * prior) / (self.reached + PRIOR_WEIGHT)


Rates = defaultdict[int, _Rate]  # by position in the draft


def _new_rates() -> Rates:
    return defaultdict(_Rate)


class Survival:
    """Per source and position: the share of draft tokens kept, given that those before them were.

    A request's own counts are weighed against those of all requests of the same source, and a position's against the
    position before it.
    """

    def __init__(self) -> None:
        self._methods: defaultdict[str, Rates] = defaultdict(_new_rates)
        self._requests: dict[Key, defaultdict[str, Rates]] = {}

    def products(self, key: Key, source: str, length: int) -> list[float]:
        """Return, for each of a draft's first `length` tokens, the probability that it and all before it are kept."""
        everyone, own = self._methods[source], self._own(key)[source]
        prior, product, products = FIRST_GUESS, 1.0, []
        for position in range(length):
            prior = everyone[position].estimate(prior)
            product *= own[position].estimate(prior)
            products.append(product)
        return products

    def learn(self, key: Key, source: str, first: int, num_kept: int, is_refuted: bool) -> None:
        """Take in that tokens first .. first + num_kept - 1 came true, and that the next one did not (`is_refuted`)."""
        everyone, own = self._methods[source], self._own(key)[source]
        for position in range(first, first + num_kept + is_refuted):
            kept = position < first + num_kept
            everyone[position].learn(kept, METHOD_MEMORY)
            own[position].learn(kept, REQUEST_MEMORY)

    def forget(self, key: Key) -> None:
        """Drop a request's own counts."""
        self._requests.pop(key, None)

    def keys(self) -> set[Key]:
        """Return the requests that have counts."""
        return set(self._requests)

    def _own(self, key: Key) -> defaultdict[str, Rates]:
        if key not in self._requests:
            self._requests[key] = defaultdict(_new_rates)
        return self._requests[key]
