# SPDX-License-Identifier: Apache-2.0
"""How likely a draft's tokens are to be kept, estimated from what became of earlier ones."""

from __future__ import annotations

from collections import defaultdict

from fastdeploy.core.request import Draft

Key = tuple[str, int]

FIRST_GUESS = 0.7  # hopeful: a method that nobody has tried is tried
FIRST_WEIGHT = 2.0  # tokens that the guess counts for
MOST_DEPTH = 16  # longer matches are all the same
OWN_WEIGHT = 2.0  # refutations, seen and expected, that a request starts with
METHOD_MEMORY = 0.995  # weight that counts keep with every new one
REQUEST_MEMORY = 0.9


class _Fading:
    """Two counts whose past fades."""

    __slots__ = ("part", "whole")

    def __init__(self, part: float, whole: float) -> None:
        self.part, self.whole = part, whole

    def add(self, part: float, whole: float, memory: float) -> None:
        self.part, self.whole = memory * self.part + part, memory * self.whole + whole


class Survival:
    """The probability that a draft's token is kept if those before it are.

    It is the share kept of all requests' tokens of the same source and depth. The depth of token i is the length of the
    draft's match + i: a match grows with every token of it that comes true, and is worth more the longer it is. A
    request's drafts may be better or worse than others': the probability of refutation is scaled by the refutations
    that it has met over those expected of it.
    """

    def __init__(self) -> None:
        self._kept: defaultdict[tuple[str, int], _Fading] = defaultdict(_first_guess)
        self._own: dict[Key, _Fading] = {}  # tokens refuted, and expected to be

    def products(self, key: Key, draft: Draft) -> list[float]:
        """Return, for each of the draft's tokens, the probability that it and all before it are kept."""
        own = self._own.get(key)
        factor = (own.part + OWN_WEIGHT) / (own.whole + OWN_WEIGHT) if own else 1.0
        product, products = 1.0, []
        for position in range(len(draft)):
            refuted = factor * (1.0 - self._share(draft, position))
            product *= max(0.0, 1.0 - refuted)
            products.append(product)
        return products

    def learn(self, key: Key, draft: Draft, first: int, num_kept: int, is_refuted: bool) -> None:
        """Take in that tokens first .. first + num_kept - 1 came true, and that the next one did not (`is_refuted`)."""
        own = self._own.setdefault(key, _Fading(0.0, 0.0))
        for position in range(first, first + num_kept + is_refuted):
            kept = position < first + num_kept
            own.add(not kept, 1.0 - self._share(draft, position), REQUEST_MEMORY)
            self._kept[_depth(draft, position)].add(kept, 1.0, METHOD_MEMORY)

    def forget(self, key: Key) -> None:
        """Drop a request's own counts."""
        self._own.pop(key, None)

    def keys(self) -> set[Key]:
        """Return the requests that have counts."""
        return set(self._own)

    def _share(self, draft: Draft, position: int) -> float:
        counts = self._kept[_depth(draft, position)]
        return counts.part / counts.whole


def _depth(draft: Draft, position: int) -> tuple[str, int]:
    source = draft.sources[position] if draft.sources else draft.source
    return source, min(draft.match_len + position, MOST_DEPTH)


def _first_guess() -> _Fading:
    return _Fading(FIRST_GUESS * FIRST_WEIGHT, FIRST_WEIGHT)
