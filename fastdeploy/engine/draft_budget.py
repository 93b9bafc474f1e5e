# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step verifies: docs/speculation.md, "Adaptive length".

A draft token is worth a row while the tokens that it is expected to add come faster than without it. Verification is by
comparison, so what an unverified draft was worth is known too, as soon as the text has gone past it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdeploy.core.request import Draft, Request
from fastdeploy.core.stats import DraftBudgetStats
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.step_cost import StepCost
from fastdeploy.spec_decode.survival import Key, Survival

PROBE_SHARE = 0.01  # of the time: most that proposing may take where drafts do not pay
MIN_PROBE_INTERVAL = 4  # steps
COST_PROBE_INTERVAL = 256  # steps with drafts and without a verified one, after which one row is measured
IDLE_LEARNING_INTERVAL = 8  # steps
TRIAL = 4.0  # times the cost of asking that a new request is believed to gain: asked 13 times before it is given up
GAIN_RATE = 0.1  # of the running mean of what asking for a draft has brought
COST_RATE = 0.05  # of the running mean of what asking costs
MEAN_RATE = 0.05  # of the mean length in the metrics


class DraftBudget(Protocol):
    """Decides which requests are asked for drafts and how many drafts a step verifies."""

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Begin a step: cut the drafts of the requests that decode in it, beside `num_prompt_rows` rows of prompts."""

    def end_step(self, plan: StepPlan) -> None:
        """Learn that the step is computed."""

    def select(self, ready: Sequence[Request]) -> list[Request]:
        """Return the requests to propose for; the proposer starts now."""

    def proposed(self, asked: Sequence[Request]) -> None:
        """Learn that the proposer is done; the requests hold their drafts."""

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Learn the tokens that a step emitted."""

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that ended."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if state of requests other than the live `requests` is kept."""

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""


class AllDrafts:
    """Verifies whatever is proposed and learns nothing."""

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Cut nothing."""

    def end_step(self, plan: StepPlan) -> None:
        """Learn nothing."""

    def select(self, ready: Sequence[Request]) -> list[Request]:
        """Ask for all."""
        return list(ready)

    def proposed(self, asked: Sequence[Request]) -> None:
        """Learn nothing."""

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Learn nothing."""

    def forget(self, request: Request) -> None:
        """Have nothing to forget."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Keep nothing."""

    def stats(self) -> DraftBudgetStats:
        """Return zeros."""
        return DraftBudgetStats()


@dataclass
class _Track:
    """What is known of one request."""

    gain_s: float  # running mean of the seconds that asking once has saved
    draft: Draft | None = None  # the part of its last draft, uncut, that the text has not reached
    offset: int = 0  # tokens of that draft that came true


class AdaptiveBudget:
    """Takes the set of draft tokens that maximises the expected tokens per second of the batch."""

    def __init__(self, cost: StepCost, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cost = cost
        self._clock = clock
        self._survival = Survival()
        self._tracks: dict[Key, _Track] = {}
        self._mean_length = 0.0
        self._num_rows = self._num_zero_choices = self._num_withheld = 0
        self._began_s = 0.0
        self._asked_s = 0.0
        self._ask_cost_s = 0.0  # per request
        self._num_asks = 0
        self._num_rounds = 0
        self._next_probe = 0
        self._num_idle = 0
        self._asked: list[_Track] = []  # since the last step

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Cut every draft to the tokens that pay; none is a choice."""
        self._began_s = self._clock()
        self._num_rows = 0
        for track in self._asked:
            track.gain_s *= 1 - GAIN_RATE
        self._asked.clear()
        drafting = [request for request in decoding if len(request.draft)]
        if drafting:
            self._cut(drafting, len(decoding), num_prompt_rows)
        self._mean_length += MEAN_RATE * (self._num_rows / max(1, len(decoding)) - self._mean_length)

    def end_step(self, plan: StepPlan) -> None:
        """Take the time of a step in which every row verifies; where there are no drafts, of some steps only."""
        if not self._num_rows and self._num_rounds % IDLE_LEARNING_INTERVAL:
            return
        num_rows = sum(plan.num_scheduled.tolist())
        if num_rows == sum(plan.num_verify_rows.tolist()):
            self._cost.learn(num_rows, self._clock() - self._began_s)

    def select(self, ready: Sequence[Request]) -> list[Request]:
        """Ask where it saves more than it costs, and now and then everywhere."""
        self._asked_s = self._clock()
        self._num_rounds += 1
        if self._num_rounds >= self._next_probe:
            self._next_probe = self._num_rounds + self._probe_interval(len(ready))
            return list(ready)
        return [r for r in ready if self._track(r).gain_s > self._ask_cost_s]

    def proposed(self, asked: Sequence[Request]) -> None:
        """Take the cost, and remember the drafts before they are cut."""
        for request in asked:
            track = self._track(request)
            self._asked.append(track)
            if len(request.draft):
                track.draft, track.offset = request.draft, 0
        if not asked:
            return
        cost = (self._clock() - self._asked_s) / len(asked)
        self._num_asks += 1
        self._ask_cost_s += max(COST_RATE, 1 / self._num_asks) * (cost - self._ask_cost_s)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Compare the last drafts with the text, whether they were verified or not."""
        for request, token_ids in zip(requests, emitted):
            track = self._tracks.get(request.key)
            if track is not None and track.draft is not None:
                self._compare(request.key, track, track.draft, token_ids)

    def _compare(self, key: Key, track: _Track, draft: Draft, token_ids: Sequence[int]) -> None:
        expected = draft.token_ids.tolist()
        reached = min(len(expected), len(token_ids))
        kept = next((i for i in range(reached) if expected[i] != token_ids[i]), reached)
        self._survival.learn(key, draft.source, track.offset, kept, kept < reached)
        is_open = kept == reached < len(expected)
        track.draft = Draft(draft.token_ids[kept:], draft.source) if is_open else None
        track.offset += kept

    def forget(self, request: Request) -> None:
        """Drop a request; what it taught about its method stays."""
        self._tracks.pop(request.key, None)
        self._survival.forget(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        live = {request.key for request in requests}
        assert set(self._tracks) <= live and self._survival.keys() <= live

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""
        return DraftBudgetStats(self._mean_length, self._num_rows, self._num_zero_choices, self._num_withheld)

    def _cut(self, drafting: Sequence[Request], num_decoding: int, num_prompt_rows: int) -> None:
        products = [self._survival.products(r.key, r.draft.source, len(r.draft)) for r in drafting]
        tokens = sorted(((product, i) for i, row in enumerate(products) for product in row), reverse=True)
        self._num_rows = self._most_profitable([product for product, _ in tokens], num_decoding, num_prompt_rows)
        lengths = [0] * len(drafting)
        for _, i in tokens[: self._num_rows]:
            lengths[i] += 1
        chosen = [row[:length] for row, length in zip(products, lengths)]
        self._note_gains(drafting, chosen, num_decoding, num_prompt_rows)
        for request, length in zip(drafting, lengths):
            request.draft = request.draft.cut(length)
        self._num_zero_choices += self._num_rows == 0
        self._num_withheld += len(tokens) - self._num_rows

    def _most_profitable(self, products: Sequence[float], num_decoding: int, num_prompt_rows: int) -> int:
        """Return how many of the likeliest tokens give the most tokens per second; one, rarely, to measure its cost."""
        if not products:
            return 0
        emitted, best = float(num_decoding), 0
        best_rate = emitted / self._seconds(num_decoding, 0, num_prompt_rows)
        for count, product in enumerate(products, 1):
            emitted += product
            rate = emitted / self._seconds(num_decoding, count, num_prompt_rows)
            if rate > best_rate:
                best, best_rate = count, rate
        self._num_idle = 0 if best else self._num_idle + 1
        if self._num_idle == COST_PROBE_INTERVAL:
            self._num_idle = 0
            return 1
        return best

    def _seconds(self, num_decoding: int, num_drafts: int, num_prompt_rows: int) -> float:
        """Return the time that decoding is charged: drafts cost what they add to the whole step, prompts their own."""
        rows = num_decoding + num_prompt_rows
        added = self._cost.seconds(rows + num_drafts) - self._cost.seconds(rows) if num_drafts else 0.0
        return self._cost.seconds(num_decoding) + added

    def _note_gains(
        self, drafting: Sequence[Request], chosen: Sequence[Sequence[float]], num_decoding: int, num_prompt_rows: int
    ) -> None:
        """Enter what the drafts are expected to save: the steps that their tokens spare, less the rows they cost."""
        base_s = self._seconds(num_decoding, 0, num_prompt_rows)
        row_s = (self._seconds(num_decoding, self._num_rows, num_prompt_rows) - base_s) / max(1, self._num_rows)
        for request, products in zip(drafting, chosen):
            gain_s = sum(products) * base_s / num_decoding - row_s * len(products)
            self._track(request).gain_s += GAIN_RATE * gain_s

    def _probe_interval(self, num_ready: int) -> int:
        step_s = self._cost.seconds(num_ready)
        return max(MIN_PROBE_INTERVAL, int(num_ready * self._ask_cost_s / (PROBE_SHARE * step_s)))

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request.key)
        if track is None:
            gain_s = TRIAL * self._ask_cost_s if self._num_asks else self._cost.seconds(1)
            track = self._tracks[request.key] = _Track(gain_s)
        return track
