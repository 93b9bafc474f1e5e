# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step verifies: docs/speculation.md, "Adaptive length".

A draft token is worth a row while the tokens that it is expected to add come faster than without it. Verification is by
comparison, so what an unverified draft was worth is known too, as soon as the text has gone past it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import DraftBudgetStats
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.step_cost import StepCost
from fastdeploy.spec_decode.survival import Key, Survival

HURDLE = 1.03  # times the tokens per second of no drafts that drafts must promise
PROBE_SHARE = 0.005  # of the time: most that asking may take where drafts do not pay
MIN_PROBE_INTERVAL, MAX_PROBE_INTERVAL = 4, 64  # steps
IDLE_LEARNING_INTERVAL = 8  # steps without drafts, of which one is timed
ASK_HURDLE = 2.0  # times what asking costs that it must have saved lately
TRIAL = 5.0  # times the cost of asking that a new request is believed to gain: asked 9 times before it is given up
GAIN_RATE = 0.1  # of the running mean of what asking for a draft has brought
MODEL_TRIALS = 4  # drafts that a new request gets of a model, one per step, whatever others' were worth
FIRST_ASKS = 8  # of an engine, the fastest of which is believed: the first calls do what only first calls do
COST_RATE = 0.05  # of the running mean of what asking costs
COST_OUTLIER = 2.0  # times that mean that one asking counts for at most
MEAN_RATE = 0.05  # of the mean length in the metrics


class DraftBudget:
    """Decides who is asked for how many drafts and how many a step verifies: here everyone and all."""

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Begin a step: cut the drafts of the requests that decode in it, beside `num_prompt_rows` rows of prompts."""

    def end_step(self, plan: StepPlan) -> None:
        """Learn that the step is computed and its tokens are handed out."""

    def caps(self, ready: Sequence[Request]) -> list[int]:
        """Return how many drafts to ask of each request; the proposer starts now."""
        return [request.draft_room for request in ready]

    def proposed(self, asked: Sequence[Request], caps: Sequence[int]) -> None:
        """Learn that the proposer is done; the requests hold their drafts."""

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Learn the tokens that a step emitted."""

    def forget(self, request: Request) -> None:
        """Drop what is known of a request that ended."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if state of requests other than the live `requests` is kept."""

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""
        return DraftBudgetStats()


@dataclass
class _Track:
    """What is known of one request."""

    gain_s: float  # running mean of the seconds that asking once has saved
    num_asks: int = 0
    draft: Draft = NO_DRAFT  # its last one, uncut, while the text has neither refuted nor passed it
    num_right: int = 0  # tokens of that draft that came true


class AdaptiveBudget(DraftBudget):
    """Takes the set of draft tokens that maximises the expected tokens per second of the batch."""

    def __init__(
        self,
        cost: StepCost,
        drafting_model: str = "",
        num_model_steps: int = 0,
        clock: Callable[[], float] = time.thread_time,  # waiting for other jobs is no cost of a row
    ) -> None:
        """Start without experience of drafts.

        Args:
            drafting_model: source of the drafts if making each of them costs time; then asking for few is cheaper.
            num_model_steps: most drafts of such a model.
        """
        self._cost = cost
        self._model, self._num_model_steps = drafting_model, num_model_steps
        self._clock = clock
        self._survival = Survival()
        self._tracks: dict[Key, _Track] = {}
        self._mean_length = 0.0
        self._num_rows = self._num_zero_choices = self._num_withheld = 0
        self._began_s = 0.0
        self._ask_s = 0.0  # per request, or per draft of a model
        self._num_asks = self._num_rounds = self._next_probe = 0
        self._asked: set[Key] = set()  # since the last step

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Cut every draft to the tokens that pay; none is a choice."""
        self._began_s = self._clock()
        self._num_rows = num_offered = 0
        gains = [0.0] * len(decoding)
        if any(len(request.draft) for request in decoding):
            products = [self._survival.products(request.key, request.draft) for request in decoding]
            lengths = self._most_profitable(products, num_prompt_rows)
            gains = self._gains(products, lengths, num_prompt_rows)
            num_offered, self._num_rows = sum(map(len, products)), sum(lengths)
            for request, length in zip(decoding, lengths):
                request.draft = request.draft.cut(length)
        if self._asked:
            self._note_gains(decoding, gains)
        self._num_zero_choices += num_offered > 0 == self._num_rows
        self._num_withheld += num_offered - self._num_rows
        self._mean_length += MEAN_RATE * (self._num_rows / max(1, len(decoding)) - self._mean_length)

    def end_step(self, plan: StepPlan) -> None:
        """Take the time of a step in which every row verifies; where there are no drafts, of some steps only."""
        if not self._num_rows and self._num_rounds % IDLE_LEARNING_INTERVAL:
            return
        num_rows = int(plan.num_scheduled.sum())
        if num_rows == int(plan.num_verify_rows.sum()):
            self._cost.learn(num_rows, len(plan.requests), self._clock() - self._began_s)

    def caps(self, ready: Sequence[Request]) -> list[int]:
        """Ask where it saves more than it costs, and now and then everywhere."""
        self._began_s = self._clock()
        if not ready:
            return []
        rooms = super().caps(ready)
        if self._model:
            rooms = [min(room, self._num_model_steps) for room in rooms]
        self._num_rounds += 1
        if self._num_asks < FIRST_ASKS:
            return rooms
        if self._num_rounds >= self._next_probe:
            interval = self._price(rooms) / (PROBE_SHARE * self._cost.seconds(len(ready), len(ready)))
            self._next_probe = self._num_rounds + min(MAX_PROBE_INTERVAL, max(MIN_PROBE_INTERVAL, int(interval)))
            return rooms
        if self._model:
            drafts = (Draft(np.zeros(room, np.int32), self._model) for room in rooms)
            products = [self._survival.products(request.key, draft) for request, draft in zip(ready, drafts)]
            chosen = self._most_profitable(products, 0, self._ask_s)
            return [max(n, int(self._is_on_trial(r))) for r, n in zip(ready, chosen)]
        bar_s = ASK_HURDLE * self._ask_s
        return [room if self._track(r).gain_s > bar_s else 0 for r, room in zip(ready, rooms)]

    def proposed(self, asked: Sequence[Request], caps: Sequence[int]) -> None:
        """Take the cost, and remember the drafts before they are cut."""
        if not asked:
            return
        for request in asked:
            track = self._track(request)
            track.num_asks += 1
            self._asked.add(request.key)
            if len(request.draft):
                track.draft, track.num_right = request.draft, 0
        self._num_asks += 1
        cost_s = (self._clock() - self._began_s) / self._num_units(caps)
        if self._num_asks == 1:
            self._ask_s = cost_s
        elif self._num_asks <= FIRST_ASKS:
            self._ask_s = min(cost_s, self._ask_s)
        else:
            self._ask_s += COST_RATE * (min(cost_s, COST_OUTLIER * self._ask_s) - self._ask_s)

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Compare the last drafts with the text, whether they were verified or not."""
        for request, token_ids in zip(requests, emitted):
            track = self._tracks.get(request.key)
            if track is not None and len(track.draft):
                self._compare(request.key, track, token_ids)

    def forget(self, request: Request) -> None:
        """Drop a request; what it taught about its method stays."""
        self._tracks.pop(request.key, None)
        self._asked.discard(request.key)
        self._survival.forget(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        live = {request.key for request in requests}
        assert set(self._tracks) | self._asked | self._survival.keys() <= live

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""
        return DraftBudgetStats(self._mean_length, self._num_rows, self._num_zero_choices, self._num_withheld)

    def _most_profitable(
        self, products: Sequence[Sequence[float]], num_prompt_rows: int, draft_s: float = 0.0
    ) -> list[int]:
        """Return how many drafts of each request give the most tokens per second, if making one takes `draft_s`.

        Products fall along a draft, so that the likeliest tokens of all are a beginning of each draft.
        """
        num_decoding, lengths = len(products), [0] * len(products)
        likeliest = sorted(((product, i) for i, row in enumerate(products) for product in row), reverse=True)
        emitted, best = float(num_decoding), 0
        best_rate = HURDLE * emitted / self._seconds(num_decoding, 0, num_prompt_rows)
        for count, (product, _) in enumerate(likeliest, 1):
            emitted += product
            rate = emitted / (self._seconds(num_decoding, count, num_prompt_rows) + count * draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        for _, i in likeliest[:best]:
            lengths[i] += 1
        return lengths

    def _seconds(self, num_decoding: int, num_drafts: int, num_prompt_rows: int) -> float:
        """Return the time that decoding is charged: drafts cost what they add to the whole step, prompts their own."""
        if not num_prompt_rows:
            return self._cost.seconds(num_decoding + num_drafts, num_decoding)
        rows = num_decoding + num_prompt_rows
        added_s = self._cost.seconds(rows + num_drafts, num_decoding) - self._cost.seconds(rows, num_decoding)
        return self._cost.seconds(num_decoding, num_decoding) + added_s

    def _gains(self, products: Sequence[Sequence[float]], lengths: Sequence[int], num_prompt_rows: int) -> list[float]:
        """Return the seconds that each request's drafts save: the steps that they spare, less the rows they cost."""
        base_s = self._seconds(len(products), 0, num_prompt_rows)
        row_s = (self._seconds(len(products), sum(lengths), num_prompt_rows) - base_s) / max(1, sum(lengths))
        token_s = base_s / len(products)
        return [token_s * sum(row[:length]) - row_s * length for row, length in zip(products, lengths)]

    def _note_gains(self, decoding: Sequence[Request], gains: Sequence[float]) -> None:
        for request, gain_s in zip(decoding, gains):
            if request.key in self._asked:
                track = self._track(request)
                track.gain_s += GAIN_RATE * (gain_s - track.gain_s)
        self._asked.clear()

    def _compare(self, key: Key, track: _Track, token_ids: Sequence[int]) -> None:
        expected = track.draft.token_ids[track.num_right :].tolist()
        reached = min(len(expected), len(token_ids))
        kept = next((i for i in range(reached) if expected[i] != token_ids[i]), reached)
        self._survival.learn(key, track.draft, track.num_right, kept, kept < reached)
        track.num_right += kept
        if kept < reached or track.num_right == len(track.draft):
            track.draft = NO_DRAFT

    def _is_on_trial(self, request: Request) -> bool:
        return self._track(request).num_asks < MODEL_TRIALS

    def _num_units(self, caps: Sequence[int]) -> int:
        return sum(caps) if self._model else len(caps)

    def _price(self, caps: Sequence[int]) -> float:
        return self._ask_s * self._num_units(caps)

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request.key)
        if track is None:
            gain_s = TRIAL * self._ask_s if self._ask_s else self._cost.seconds(1, 1)
            track = self._tracks[request.key] = _Track(gain_s)
        return track
