# SPDX-License-Identifier: Apache-2.0
"""How likely draft tokens are to be accepted, estimated from the outcome of earlier drafts."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy.core.request import Draft

FIRST_GUESS = 0.7  # acceptance rate of a source that nothing is known about: high enough that it is tried
PRIOR_WEIGHT = 4.0  # tokens that a prior counts for
MAX_DEPTH = 16  # tokens; deeper positions, and matches longer than this, share one estimate
FADE = 0.97  # weight that old outcomes keep with every new draft: a memory of about 30 drafts


class AcceptanceModel:
    """The probability that a draft token is accepted, given that those before it are.

    It is the share of accepted tokens of the same source and depth over all requests. The depth of a token is its
    position in the draft plus the length of the match before it, because a longer match predicts better. Where little
    was seen at a depth, the rate at the depth before it serves as the prior. The drafts of one request may be better or
    worse than those of others: its rejection rates are scaled by the rejections it had over those expected of it.
    """

    def __init__(self) -> None:
        self._sources: dict[str, _SourceCounts] = {}
        self._requests: dict[tuple[str, int], tuple[float, float]] = {}  # rejections: seen, expected

    def acceptance(self, key: tuple[str, int], draft: Draft) -> list[float]:
        """Return, for each token of the draft, the probability that it and all tokens before it are accepted."""
        seen, expected = self._requests.get(key, (0.0, 0.0))
        factor = (seen + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT)
        product = 1.0
        return [product := product * max(0.0, 1.0 - factor * rate) for rate in self._rejection_rates(draft)]

    def expected_accepted(self, source: str, num_drafts: int, match_len: int = 0) -> list[float]:
        """Return the expected number of accepted tokens of drafts of 1, 2, ... `num_drafts` tokens of any request."""
        rates = self._source(source).rejection_rates
        product, total = 1.0, 0.0
        sums = []
        for depth in range(match_len, match_len + num_drafts):
            product *= 1.0 - rates[min(depth, MAX_DEPTH)]
            total += product
            sums.append(total)
        return sums

    def update(self, outcomes: Sequence[tuple[tuple[str, int], Draft, Sequence[int]]]) -> None:
        """Compare drafts with the tokens that were emitted in their place.

        A draft is compared as far as tokens were emitted, whether it was verified, trimmed or not verified at all.

        Args:
            outcomes: key of the request, its draft, and the emitted tokens.
        """
        touched: set[str] = set()
        for key, draft, emitted in outcomes:
            num_known, rates = min(len(draft), len(emitted)), self._rejection_rates(draft)
            seen, expected = self._requests.get(key, (0.0, 0.0))
            seen, expected = FADE * seen, FADE * expected
            for i in range(num_known):
                source = draft.sources[i] if draft.sources else draft.source
                is_accepted = draft.token_ids[i] == emitted[i]
                self._source(source).count(min(draft.match_len + i, MAX_DEPTH), is_accepted)
                touched.add(source)
                expected += rates[i]
                if not is_accepted:
                    seen += 1.0
                    break
            self._requests[key] = seen, expected
        for source in touched:
            self._sources[source].refresh()

    def reset(self) -> None:
        """Start again from the first guess, so that drafts that have become better are soon recognized."""
        self._sources.clear()
        self._requests.clear()

    def finish_request(self, key: tuple[str, int]) -> None:
        """Drop what is known of one request."""
        self._requests.pop(key, None)

    def keys(self) -> set[tuple[str, int]]:
        """Return the requests that something is known of."""
        return set(self._requests)

    def _rejection_rates(self, draft: Draft) -> list[float]:
        first = draft.match_len
        if draft.sources:
            depths = range(first, first + len(draft))
            return [self._source(s).rejection_rates[min(d, MAX_DEPTH)] for s, d in zip(draft.sources, depths)]
        rates = self._source(draft.source).rejection_rates
        return [rates[min(depth, MAX_DEPTH)] for depth in range(first, first + len(draft))]

    def _source(self, name: str) -> _SourceCounts:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = _SourceCounts()
        return source


class _SourceCounts:
    """Tokens of one source by depth: how many were compared and how many were accepted. Old outcomes fade."""

    def __init__(self) -> None:
        self.rejection_rates = [1.0 - FIRST_GUESS] * (MAX_DEPTH + 1)
        self._accepted = [0.0] * (MAX_DEPTH + 1)
        self._seen = [0.0] * (MAX_DEPTH + 1)

    def count(self, depth: int, is_accepted: bool) -> None:
        self._accepted[depth] += is_accepted
        self._seen[depth] += 1.0

    def refresh(self) -> None:
        rate = FIRST_GUESS
        for depth in range(MAX_DEPTH + 1):
            accepted, seen = self._accepted[depth], self._seen[depth]
            rate = (accepted + PRIOR_WEIGHT * rate) / (seen + PRIOR_WEIGHT)
            self.rejection_rates[depth] = 1.0 - rate
            self._accepted[depth], self._seen[depth] = FADE * accepted, FADE * seen
