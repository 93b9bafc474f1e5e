# SPDX-License-Identifier: Apache-2.0
"""How likely a draft's tokens are to be kept, estimated from what became of earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdeploy.core.request import Draft

Key = tuple[str, int]

FIRST_GUESS = 0.7  # hopeful: a method that nobody has tried is tried
FIRST_WEIGHT = 2.0  # tokens that the guess counts for
MOST_DEPTH = 16  # longer matches are all the same
OWN_WEIGHT = 4.0  # refutations, seen and expected, that a request starts with
METHOD_MEMORY = 0.995  # weight that counts keep with every new one
FADING = 0.02  # of the weight of what a token's counts say, when a draft that ended before it is kept
REQUEST_MEMORY = 0.9


class _Method:
    """Tokens of one source by depth: how many were kept, how many there were, and the share refuted; the past fades."""

    __slots__ = ("kept", "misses", "seen")

    def __init__(self) -> None:
        self.kept = [FIRST_GUESS * FIRST_WEIGHT] * (MOST_DEPTH + 1)
        self.seen = [FIRST_WEIGHT] * (MOST_DEPTH + 1)
        self.misses = [1.0 - FIRST_GUESS] * (MOST_DEPTH + 1)

    def learn(self, depth: int, is_kept: bool) -> None:
        kept = self.kept[depth] = METHOD_MEMORY * self.kept[depth] + is_kept
        seen = self.seen[depth] = METHOD_MEMORY * self.seen[depth] + 1.0
        self.misses[depth] = 1.0 - kept / seen

    def hope(self, depth: int) -> None:
        """Take in that a draft that ended before `depth` was kept: what was seen there gives way to a guess.

        The guess is that such a token is as good as the one before it.
        """
        guess = FIRST_WEIGHT * self.kept[depth - 1] / self.seen[depth - 1]
        if guess * self.seen[depth] > FIRST_WEIGHT * self.kept[depth]:
            self.kept[depth] += FADING * (guess - self.kept[depth])
            self.seen[depth] += FADING * (FIRST_WEIGHT - self.seen[depth])
            self.misses[depth] = 1.0 - self.kept[depth] / self.seen[depth]


@dataclass(slots=True)
class _Own:
    """A request's tokens that were refuted, and that were expected to be; the past fades."""

    refuted: float = 0.0
    expected: float = 0.0


class Survival:
    """The probability that a draft's token is kept if those before it are.

    It is the share kept of all requests' tokens of the same source and depth. The depth of token i is the length of the
    draft's match + i: a match grows with every token of it that comes true, and is worth more the longer it is. A
    request's drafts may be better or worse than others': the probability of refutation is scaled by the refutations
    that it has met over those expected of it.
    """

    def __init__(self) -> None:
        self._methods: dict[str, _Method] = {}
        self._own: dict[Key, _Own] = {}

    def products(self, key: Key, draft: Draft) -> list[float]:
        """Return, for each of the draft's tokens, the probability that it and all before it are kept."""
        return self._products(key, self._misses(draft))

    def hopes(self, key: Key, source: str, count: int) -> list[float]:
        """Return the same for `count` tokens that a source has yet to draft, without a match."""
        return self._products(key, self._method(source).misses[:count])

    def mean_hopes(self, source: str, count: int) -> list[float]:
        """Return the same for a request of which nothing is known."""
        product = 1.0
        return [product := product * (1.0 - miss) for miss in self._method(source).misses[:count]]

    def learn(self, key: Key, draft: Draft, first: int, num_kept: int, is_refuted: bool) -> None:
        """Take in that tokens first .. first + num_kept - 1 came true, and that the next one did not (`is_refuted`)."""
        own = self._own.get(key)
        if own is None:
            own = self._own[key] = _Own()
        end = first + num_kept + is_refuted
        fading = REQUEST_MEMORY ** (end - first)
        own.refuted = fading * own.refuted + is_refuted
        own.expected = fading * own.expected + sum(self._misses(draft)[first:end])
        for position in range(first, end):
            source = draft.sources[position] if draft.sources else draft.source
            self._method(source).learn(min(draft.match_len + position, MOST_DEPTH), position < first + num_kept)
        if end == len(draft) and not is_refuted and 0 < (depth := draft.match_len + end) <= MOST_DEPTH:
            self._method(draft.sources[-1] if draft.sources else draft.source).hope(depth)

    def forget(self, key: Key) -> None:
        """Drop a request's own counts."""
        self._own.pop(key, None)

    def keys(self) -> set[Key]:
        """Return the requests that have counts."""
        return set(self._own)

    def _products(self, key: Key, misses: Sequence[float]) -> list[float]:
        own = self._own.get(key)
        factor = (own.refuted + OWN_WEIGHT) / (own.expected + OWN_WEIGHT) if own else 1.0
        product = 1.0
        return [product := product * max(0.0, 1.0 - factor * miss) for miss in misses]

    def _misses(self, draft: Draft) -> list[float]:
        """Return the share refuted of each token's kind."""
        first, count = draft.match_len, len(draft)
        if draft.sources:
            depths = (min(first + i, MOST_DEPTH) for i in range(count))
            return [self._method(source).misses[depth] for source, depth in zip(draft.sources, depths)]
        misses = self._method(draft.source).misses
        return misses[first : first + count] + [misses[-1]] * min(count, first + count - MOST_DEPTH - 1)

    def _method(self, source: str) -> _Method:
        method = self._methods.get(source)
        if method is None:
            method = self._methods[source] = _Method()
        return method
