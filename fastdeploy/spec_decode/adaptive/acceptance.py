# SPDX-License-Identifier: Apache-2.0
"""How likely draft tokens are to be accepted, estimated from the outcome of earlier drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from fastdeploy.core.request import Draft, Request, RequestStatus

FIRST_GUESS = 0.7  # acceptance rate of a source that nothing is known about: high enough that it is tried
PRIOR_WEIGHT = 4.0  # tokens that a prior counts for
MAX_DEPTH = 16  # tokens; deeper positions, and matches longer than this, share one estimate
FADE = 0.97  # weight that old outcomes keep with every new draft: a memory of about 30 drafts


class AcceptanceModel:
    """The probability that a draft token is accepted, given that those before it are.

    It is the share of accepted tokens of the same source and depth. The depth of a token is its position in the draft
    plus the length of the match before it, because a longer match predicts better; the rate at the depth before serves
    as the prior. A request's rejection rates are scaled by the rejections that it had over those expected of it.
    """

    def __init__(self) -> None:
        self._sources: defaultdict[str, _Source] = defaultdict(_Source)
        self.requests: dict[tuple[str, int], tuple[float, float]] = {}  # rejections: seen, expected

    def acceptance(self, request: Request, draft: Draft) -> list[float]:
        """Return, for each token of the draft, the probability that it and all tokens before it are accepted."""
        seen, expected = self.requests.get(request.key, (0.0, 0.0))
        factor, product = (seen + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT), 1.0
        return [product := product * max(0.0, 1.0 - factor * rate) for rate in self._rejection_rates(draft)]

    def expected_accepted(self, source: str, num_drafts: int) -> list[float]:
        """Return the expected number of accepted tokens of drafts of 1, 2, ... `num_drafts` tokens of any request."""
        rates = self._sources[source].rejection_rates
        kept = (1.0 - rates[min(depth, MAX_DEPTH)] for depth in range(num_drafts))
        return list(accumulate(accumulate(kept, mul)))

    def update(self, proposed: Sequence[tuple[Request, Draft, int]]) -> int:
        """Compare drafts, verified or not, with the tokens that were emitted since; return how many were accepted.

        Each entry is a request, its draft, and its number of tokens when that was proposed.
        """
        num_accepted, touched = 0, set[_Source]()
        for request, draft, num_tokens in proposed:
            emitted = request.tokens_since(num_tokens)
            num_accepted += max(0, len(emitted) - 1)
            seen, expected = (FADE * count for count in self.requests.get(request.key, (0.0, 0.0)))
            for i, (token, actual, rate) in enumerate(zip(draft.token_ids, emitted, self._rejection_rates(draft))):
                source = self._sources[draft.sources[i] if draft.sources else draft.source]
                source.count(min(draft.match_len + i, MAX_DEPTH), token == actual)
                touched.add(source)
                expected += rate
                if token != actual:
                    seen += 1.0
                    break
            if request.status is not RequestStatus.FINISHED:
                self.requests[request.key] = seen, expected
        for source in touched:
            source.scale(FADE)
        return num_accepted

    def limit_evidence(self) -> None:
        """Let what was seen weigh no more than a prior, so that drafts that have become better are soon recognized."""
        for source in self._sources.values():
            source.scale(PRIOR_WEIGHT / max(PRIOR_WEIGHT, *source.seen))
        self.requests.clear()

    def _rejection_rates(self, draft: Draft) -> list[float]:
        depths = [min(depth, MAX_DEPTH) for depth in range(draft.match_len, draft.match_len + len(draft))]
        if draft.sources:
            return [self._sources[name].rejection_rates[depth] for name, depth in zip(draft.sources, depths)]
        rates = self._sources[draft.source].rejection_rates
        return [rates[depth] for depth in depths]


class _Source:
    """Tokens of one source by depth: how many were compared and how many accepted. Old outcomes fade."""

    def __init__(self) -> None:
        self.rejection_rates = [1.0 - FIRST_GUESS] * (MAX_DEPTH + 1)
        self._accepted, self.seen = [0.0] * (MAX_DEPTH + 1), [0.0] * (MAX_DEPTH + 1)

    def count(self, depth: int, is_accepted: bool) -> None:
        self._accepted[depth] += is_accepted
        self.seen[depth] += 1.0

    def scale(self, weight: float) -> None:
        """Compute the rates, then let the counts fade."""
        rate = FIRST_GUESS
        for depth, (accepted, seen) in enumerate(zip(self._accepted, self.seen)):
            rate = (accepted + PRIOR_WEIGHT * rate) / (seen + PRIOR_WEIGHT)
            self.rejection_rates[depth] = 1.0 - rate
            self._accepted[depth], self.seen[depth] = weight * accepted, weight * seen
