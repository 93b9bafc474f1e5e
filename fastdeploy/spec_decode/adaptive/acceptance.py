# SPDX-License-Identifier: Apache-2.0
"""Estimates how likely draft tokens are to be accepted from the outcomes of earlier drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from fastdeploy.core.request import Draft, Request, RequestStatus

INITIAL_RATE = 0.7  # acceptance rate of a source without outcomes: high enough for its drafts to be verified
PRIOR_WEIGHT = 4.0  # tokens: weight of a prior, so that the outcomes of a few drafts outweigh it
MAX_DEPTH = 16  # tokens: larger depths share one estimate, as there are few outcomes for each of them
DECAY = 0.97  # factor of all outcomes per update: estimates follow the last 30 updates, since texts change


class AcceptanceModel:
    """The probability that a draft token is accepted, given that the tokens before it are.

    It is the share of accepted tokens of the same source and depth. The depth of a token is its position in the draft
    plus the match length, because longer matches are followed by better drafts. The rate at the previous depth is the
    prior. The rejection rates of a request are scaled by its number of rejections over their expected number.
    """

    def __init__(self) -> None:
        self._outcomes: defaultdict[str, _Outcomes] = defaultdict(_Outcomes)  # by source
        self.rejections: dict[tuple[str, int], tuple[float, float]] = {}  # by request: actual and expected number

    def acceptance(self, request: Request, draft: Draft) -> list[float]:
        """Return, for each token of the draft, the probability that it and all tokens before it are accepted."""
        actual, expected = self.rejections.get(request.key, (0.0, 0.0))
        factor, product = (actual + PRIOR_WEIGHT) / (expected + PRIOR_WEIGHT), 1.0
        return [product := product * max(0.0, 1.0 - factor * rate) for rate in self._rejection_rates(draft)]

    def expected_accepted(self, source: str, num_drafts: int) -> list[float]:
        """Return the expected number of accepted tokens of drafts of 1, 2, ... `num_drafts` tokens of any request."""
        rates = self._outcomes[source].rejection_rates
        probabilities = accumulate((1.0 - rates[min(depth, MAX_DEPTH)] for depth in range(num_drafts)), mul)
        return list(accumulate(probabilities))

    def update(self, proposed: Sequence[tuple[Request, Draft, int]]) -> int:
        """Compare drafts, verified or not, with the tokens that were emitted since; return how many were accepted.

        Each entry is a request, its draft, and its number of tokens when that was proposed.
        """
        num_accepted, updated = 0, set[_Outcomes]()
        for request, draft, num_tokens in proposed:
            emitted = request.tokens_since(num_tokens)
            num_accepted += max(0, len(emitted) - 1)
            actual, expected = (DECAY * count for count in self.rejections.get(request.key, (0.0, 0.0)))
            for i, (token, sampled, rate) in enumerate(zip(draft.token_ids, emitted, self._rejection_rates(draft))):
                outcomes = self._outcomes[draft.sources[i] if draft.sources else draft.source]
                outcomes.record(min(draft.match_len + i, MAX_DEPTH), token == sampled)
                updated.add(outcomes)
                expected += rate
                if token != sampled:
                    actual += 1.0
                    break
            if request.status is not RequestStatus.FINISHED:
                self.rejections[request.key] = actual, expected
        for outcomes in updated:
            outcomes.decay(DECAY)
        return num_accepted

    def limit_evidence(self) -> None:
        """Reduce the weight of all outcomes to that of a prior, so that a change of the acceptance is soon noticed."""
        for outcomes in self._outcomes.values():
            outcomes.decay(PRIOR_WEIGHT / max(PRIOR_WEIGHT, *outcomes.num_compared))
        self.rejections.clear()

    def _rejection_rates(self, draft: Draft) -> list[float]:
        depths = [min(depth, MAX_DEPTH) for depth in range(draft.match_len, draft.match_len + len(draft))]
        if draft.sources:
            return [self._outcomes[name].rejection_rates[depth] for name, depth in zip(draft.sources, depths)]
        rates = self._outcomes[draft.source].rejection_rates
        return [rates[depth] for depth in depths]


class _Outcomes:
    """How many tokens of a source were compared with the emitted ones and how many were accepted, by depth."""

    def __init__(self) -> None:
        self.rejection_rates = [1.0 - INITIAL_RATE] * (MAX_DEPTH + 1)
        self._num_accepted, self.num_compared = [0.0] * (MAX_DEPTH + 1), [0.0] * (MAX_DEPTH + 1)

    def record(self, depth: int, is_accepted: bool) -> None:
        self._num_accepted[depth] += is_accepted
        self.num_compared[depth] += 1.0

    def decay(self, factor: float) -> None:
        """Compute the rates, then multiply the counts by `factor`."""
        rate = INITIAL_RATE
        for depth, (accepted, compared) in enumerate(zip(self._num_accepted, self.num_compared)):
            rate = (accepted + PRIOR_WEIGHT * rate) / (compared + PRIOR_WEIGHT)
            self.rejection_rates[depth] = 1.0 - rate
            self._num_accepted[depth], self.num_compared[depth] = factor * accepted, factor * compared
