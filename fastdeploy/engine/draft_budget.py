# SPDX-License-Identifier: Apache-2.0
"""How many drafts a step verifies: docs/speculation.md, "Adaptive length".

A draft token is worth a row while the tokens that it is expected to add come faster than without it. Verification is by
comparison, so what an unverified draft was worth is known too, as soon as the text has gone past it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import DraftBudgetStats
from fastdeploy.core.step import StepPlan
from fastdeploy.engine.draft_choice import HURDLE, most_profitable
from fastdeploy.engine.draft_purse import COST_RATE, Price, Purse
from fastdeploy.spec_decode.step_cost import CallCost, StepCost
from fastdeploy.spec_decode.survival import Key, Survival

RAGGED = 0.015  # more with every doubling of the requests, from a model's drafts: some then end before others
LOOK_SHARE = 0.003  # of the time: most that looks for drafts may take where they do not pay, matching among them
TRY_SHARE = 0.004  # the same of a model's tries
REST = 8  # steps without drafts, of which at most one looks for drafts again
REST_TIMED = 16  # of which one is timed, not the one after such a look
LONG_REST = 64  # after which it is looked again, though nothing has been learned nor saved for a try
CONTROL_SHARE = 0.0025  # of the time: most that steps without drafts give up, by which those with them are judged
CONTROL_STEPS = 8  # in a row, of which the last is timed: what drafting leaves in the caches slows the first ones
ASK_HURDLE = 2.0  # times what asking costs that it must have saved lately
TRIAL = 5.0  # times the cost of asking that a new request is believed to gain: asked 9 times before it is given up
GAIN_RATE = 0.1  # of the running mean of what asking for a draft has brought
FILL_ASKS = 32.0  # for a model's drafts, among which the time of catching up with a request's text is shared out
MOST_MISSING = 16  # tokens: how far behind a cache is that was asked lately; how filled any other is, is not known
MOST_TRIES = 8  # of a model in a row, while its drafts come true: enough to see whether they pay
MEAN_RATE = 0.05  # of the mean length in the metrics


class Ask(NamedTuple):
    """Most drafts wanted for a request, and most calls of a drafting model that it may take to make them."""

    num_drafts: int
    num_steps: int


@dataclass(frozen=True)
class DraftingModel:
    """A model that drafts: the source of its drafts, most of them, each of which takes a call, and what calls take."""

    source: str
    num_steps: int
    cost: CallCost


class DraftBudget:
    """Decides who is asked for how many drafts and how many a step verifies: here everyone and all."""

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int, has_waiting: bool = False) -> None:
        """Begin a step: cut the drafts of the requests that decode in it, beside `num_prompt_rows` rows of prompts.

        Args:
            has_waiting: requests wait that may begin in this step, too.
        """

    def end_step(self, plan: StepPlan) -> None:
        """Learn that the step is computed and its tokens are handed out."""

    def wants_drafts(self, num_requests: int) -> bool:
        """Return False in a step, of `num_requests` requests, after which nobody is asked anyhow."""
        return True

    def ask(self, ready: Sequence[Request]) -> list[Ask]:
        """Return what to ask the proposer for each request; it starts now."""
        return [Ask(request.draft_room, request.draft_room) for request in ready]

    def proposed(self, asked: Sequence[Request], asks: Sequence[Ask]) -> None:
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


@dataclass(slots=True)
class _Track:
    """What is known of one request."""

    gain_s: float  # running mean of the seconds that asking for a match has saved
    last_model_ask: int = 0
    is_model_right: bool = False  # the first token of the model's last draft came true
    num_tries: int = 0  # of the model in a row, without expecting them to pay
    num_filled: int = 0  # tokens that the model has read
    draft: Draft = NO_DRAFT  # its last one, uncut, while the text has neither refuted nor passed it
    num_right: int = 0  # tokens of that draft that came true


class AdaptiveBudget(DraftBudget):
    """Takes the set of draft tokens that maximises the expected tokens per second of the batch."""

    def __init__(
        self,
        cost: StepCost,
        model: DraftingModel | None = None,
        clock: Callable[[], float] = time.thread_time,  # waiting for other jobs is no cost of a row
        matches_text: bool | None = None,
    ) -> None:
        """Start without experience of drafts.

        Args:
            model: that drafts, if there is one.
            matches_text: whether drafts follow text (too); by default where there is no model.
        """
        self._cost, self._model = cost, model
        self._matches_text = model is None if matches_text is None else matches_text
        self._clock = clock
        self._survival = Survival()
        self._tracks: dict[Key, _Track] = {}
        self._open: dict[Key, _Track] = {}  # those whose last draft is not decided
        self._asked: dict[Key, _Track] = {}  # for matches, since the last step
        self._mean_length = 0.0
        self._num_decoding = self._num_rows = self._num_zero_choices = self._num_withheld = 0
        self._began_s = self._decided_s = self._decoding_s = 0.0  # the last one: of a step without prompts
        self._purse = Purse()
        self._match = Price()
        self._match_s = 0.0  # saved for asking for matches where it does not pay
        self._early_s = self._late_s = 0.0  # saved for trying the model beside a request's prompt, and later
        self._try_s = 0.0  # that the cheapest try of the model took when one was last looked for
        self._num_rounds = self._num_requests = self._num_probed = 0
        self._token_s = self._row_s = 0.0  # of the next step: what a token is worth, and what a row costs
        self._weighed: list[int] | None = None  # calls that were left to the model
        self._num_left_out = 0  # looks with matches in which the model still rests
        self._num_untimed = 0  # steps since one without prompts was timed
        self._num_plain = self._num_drafted = 0  # steps without drafts in a row; with them since one without was timed
        self._control_s = self._gain_s = 0.0  # saved for the next such steps; what drafts are expected to bring a step
        self._is_resting = self._is_timed = False

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int, has_waiting: bool = False) -> None:
        """Cut every draft to the tokens that pay; none is a choice."""
        drafted = [request for request in decoding if request.draft is not NO_DRAFT]
        self._num_decoding, self._num_rows = len(decoding), 0
        has_looked = bool(drafted or self._asked)
        is_control = self._num_drafted > 0 and self._num_plain + 1 >= CONTROL_STEPS
        has_prompts = num_prompt_rows > 0 or has_waiting
        self._is_timed = has_looked or is_control or has_prompts or self._num_rounds % REST_TIMED == REST // 2
        if self._is_timed:
            self._began_s = self._clock()
        if has_looked:
            gains = self._cut(drafted, decoding, num_prompt_rows) if drafted else {}
            for key, track in self._asked.items():
                track.gain_s += GAIN_RATE * (gains.get(key, 0.0) - track.gain_s)
            self._asked.clear()
        self._num_plain = 0 if self._num_rows else self._num_plain + 1
        self._mean_length += MEAN_RATE * (self._num_rows / max(1, len(decoding)) - self._mean_length)

    def end_step(self, plan: StepPlan) -> None:
        """Take the time of a step in which every row verifies; where there are no drafts, of some steps only."""
        has_prompts = len(plan.requests) != self._num_decoding
        if not self._is_timed:
            self._num_untimed += 1
            return
        step_s = self._clock() - self._began_s
        if has_prompts:
            decoding_s = min(step_s, self._decoding_s)
            self._is_resting = False  # someone may decode from now on
        else:
            self._decoding_s, decoding_s = step_s, step_s * (1 + self._num_untimed)
        self._purse.earn(LOOK_SHARE * decoding_s)
        self._match_s += LOOK_SHARE * decoding_s
        self._early_s += TRY_SHARE * (step_s if has_prompts else decoding_s)
        if not has_prompts:
            self._late_s += TRY_SHARE * decoding_s
            self._control_s += CONTROL_SHARE * decoding_s
            self._num_untimed = 0
            self._learn_step(plan, step_s)

    def wants_drafts(self, num_requests: int) -> bool:
        """Rest while nobody is worth asking, until a draft comes true, requests come or go, or a few steps are over."""
        self._num_rounds += 1
        is_news = num_requests != self._num_requests
        self._num_requests = num_requests
        if self._purse.is_empty or self._is_control_due():
            return False
        if is_news or not self._is_resting or self._num_rounds % LONG_REST == 0:
            return True
        return self._num_rounds % REST == 0 and self._can_try()

    def ask(self, ready: Sequence[Request]) -> list[Ask]:
        """Ask where it saves more than it costs, and now and then elsewhere."""
        if not ready:
            return []
        self._purse.begin_look()
        self._began_s, self._num_probed = self._clock(), 0
        rooms = [request.draft_room for request in ready]
        matches = self._matches(ready, rooms) if self._matches_text else [0] * len(ready)
        steps = self._steps(self._model, ready, rooms, any(matches)) if self._model else matches
        self._is_resting = not any(matches) and not any(steps)
        if self._matches_text and self._match_s >= self._match.seconds * len(ready):
            self._match_s = 0.0
            matches = rooms
        if self._model:
            self._try_model(self._model, ready, steps)
        asks = [Ask(match or step, step) for match, step in zip(matches, steps)]
        self._decided_s = self._clock()
        self._purse.spend(self._decided_s - self._began_s)
        return asks

    def weigh(self, requests: Sequence[Request], matches: Sequence[Draft], steps: Sequence[int]) -> list[int]:
        """Return how many of its calls the model keeps for each request, now that its match is known.

        It keeps those that bring more than the match, their price included.
        """
        if self._num_probed or self._model is None:
            return list(steps)
        call, gain_s = self._model.cost, 0.0
        kept = [0] * len(steps)
        for i, (request, match, count) in enumerate(zip(requests, matches, steps)):
            if not count:
                continue
            worth = self._survival.hopes(request.key, self._model.source, count)
            promises = self._survival.products(request.key, match) if len(match) else []
            worth += [worth[-1] * promise for promise in promises[count:]]  # which go on behind the model's drafts
            more_s = self._worth_s(worth) - self._worth_s(promises) - call.own_s - count * call.request_s
            if more_s > 0.0:
                kept[i] = count
                gain_s += more_s
        self._weighed = kept if gain_s > max(kept) * call.call_s else [0] * len(steps)
        self._num_left_out = 0 if any(self._weighed) else REST - 1
        return self._weighed

    def proposed(self, asked: Sequence[Request], asks: Sequence[Ask]) -> None:
        """Take the cost, and remember the drafts before they are cut."""
        counts = self._weighed or [self._num_calls(request, ask) for request, ask in zip(asked, asks)]
        self._weighed = None
        self._learn_price(asked, counts)
        for request, ask, count in zip(asked, asks, counts):
            track = self._track(request)
            if count:
                track.last_model_ask, track.is_model_right = self._num_rounds, False
                track.num_filled = request.num_tokens
            if ask.num_drafts > ask.num_steps or not self._model:
                self._asked[request.key] = track
            if len(request.draft):
                track.draft, track.num_right = request.draft, 0
                self._open[request.key] = track

    def observe(self, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Compare the last drafts with the text, whether they were verified or not."""
        if not self._open:
            return
        for request, token_ids in zip(requests, emitted):
            track = self._open.get(request.key)
            if track is not None:
                self._compare(request.key, track, token_ids)

    def forget(self, request: Request) -> None:
        """Drop a request; what it taught about its method stays."""
        for state in (self._tracks, self._open, self._asked):
            state.pop(request.key, None)
        self._survival.forget(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        live = {request.key for request in requests}
        assert self._tracks.keys() | self._open.keys() | self._asked.keys() | self._survival.keys() <= live

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""
        return DraftBudgetStats(self._mean_length, self._num_rows, self._num_zero_choices, self._num_withheld)

    def _cut(self, drafted: Sequence[Request], decoding: Sequence[Request], num_prompt_rows: int) -> dict[Key, float]:
        """Cut drafts; return the seconds that matches save: the steps that they spare, less the rows that they cost."""
        num_decoding = len(decoding)
        products = [self._survival.products(request.key, request.draft) for request in drafted]
        num_offered = sum(map(len, products))
        line = self._line(decoding, num_decoding, num_offered, num_prompt_rows)
        lengths, _ = most_profitable(products, num_decoding, line)
        num_rows = self._num_rows = sum(lengths)
        rows_s, token_s = line[num_rows] - line[0], line[0] / num_decoding
        row_s, gains = rows_s / max(1, num_rows), {}
        gain_s = token_s * sum(sum(row[:length]) for row, length in zip(products, lengths)) - rows_s
        self._gain_s += COST_RATE * (gain_s - self._gain_s)
        self._purse.earn(gain_s)
        for request, row, length in zip(drafted, products, lengths):
            first = self._num_model_tokens(request.draft)
            gains[request.key] = token_s * sum(row[first:length]) - row_s * max(0, length - first)
            request.draft = request.draft.cut(length)
        self._num_zero_choices += not num_rows
        self._num_withheld += num_offered - num_rows
        return gains

    def _learn_step(self, plan: StepPlan, step_s: float) -> None:
        """Take in a step without prompts; one without drafts stands for those with drafts before it, or for a rest."""
        num_alike = self._num_drafted or REST_TIMED
        if self._num_rows:
            self._num_drafted += 1
        elif self._num_plain < CONTROL_STEPS if self._num_drafted else self._num_rounds % REST_TIMED != REST // 2:
            return
        else:
            self._num_drafted = 0
        num_rows, weight = sum(plan.num_scheduled), self._cost.weight(len(plan.requests), sum(plan.num_computed))
        if self._num_rows:
            self._cost.learn_drafted(num_rows, weight, step_s)
        else:
            self._cost.learn_plain(num_rows, weight, step_s, num_alike)

    def _is_control_due(self) -> bool:
        """True where steps without drafts are wanted among those with them, and what they give up has been saved."""
        if self._num_plain >= CONTROL_STEPS:
            self._control_s = 0.0
            return False
        return self._num_drafted >= REST and self._control_s >= CONTROL_STEPS * self._gain_s

    def _num_model_tokens(self, draft: Draft) -> int:
        """Return how many of a draft's first tokens the model made."""
        name = self._model.source if self._model else None
        return draft.sources.count(name) if draft.sources else len(draft) * (draft.source == name)

    def _num_calls(self, request: Request, ask: Ask) -> int:
        """Return how many of the calls asked for the model made: none where a match took their place."""
        is_match = self._matches_text and len(request.draft) and not self._num_model_tokens(request.draft)
        return 0 if is_match else ask.num_steps

    def _line(
        self, requests: Sequence[Request], num_decoding: int, num_drafts: int, num_prompt_rows: int
    ) -> list[float]:
        """Return the time that decoding with 0 .. num_drafts drafts is charged, of `num_decoding` such requests.

        Drafts cost what they add to the whole step, prompts their own.
        """
        num_tokens = sum([request.num_tokens for request in requests]) * num_decoding // len(requests)
        weight = self._cost.weight(num_decoding, num_tokens)
        line = self._cost.line(num_decoding + num_prompt_rows, num_drafts, weight)
        if not num_prompt_rows:
            return line
        own_s = self._cost.seconds(num_decoding, weight)
        return [own_s + seconds - line[0] for seconds in line]

    def _matches(self, ready: Sequence[Request], rooms: Sequence[int]) -> list[int]:
        """Ask whoever's matches have lately saved more than asking costs."""
        if not self._match.is_known:
            return list(rooms)
        bar_s = ASK_HURDLE * self._match.seconds
        return [room if self._track(request).gain_s > bar_s else 0 for request, room in zip(ready, rooms)]

    def _steps(
        self, model: DraftingModel, ready: Sequence[Request], rooms: Sequence[int], has_matches: bool
    ) -> list[int]:
        """Let the model make as many drafts as pay for its calls, their own rows and the look that they take.

        Of the next step's requests not all are ready: some are about to end, others to begin. Beside matches that
        lately were worth more the model rests.
        """
        if has_matches and self._num_left_out:
            self._num_left_out -= 1
            return [0] * len(ready)
        look_s = 0.0 if has_matches else self._purse.look_s
        num_decoding = max(len(ready), self._num_requests)
        rooms = [min(room, model.num_steps) for room in rooms]
        products = [self._survival.hopes(request.key, model.source, room) for request, room in zip(ready, rooms)]
        line, call = self._line(ready, num_decoding, sum(rooms), 0), model.cost
        hurdle = HURDLE + RAGGED * math.log2(num_decoding)
        self._token_s, self._row_s = line[0] / num_decoding, (line[-1] - line[0]) / (len(line) - 1)
        steps, best_rate = [0] * len(ready), hurdle / self._token_s
        if sum(row[0] for row in products) < best_rate * (look_s + call.call_s):
            return steps  # not even for rows that cost nothing
        line = [seconds + count * call.request_s for count, seconds in enumerate(line)]
        first_s = [call.own_s + self._num_missing(request) * call.row_s / FILL_ASKS for request in ready]
        for depth in range(1, max(rooms) + 1):
            few = [row[:depth] for row in products]
            lengths, rate = most_profitable(few, num_decoding, line, look_s + depth * call.call_s, first_s, call.row_s)
            if rate > best_rate:
                steps, best_rate = lengths, rate
        return steps

    def _num_missing(self, request: Request) -> int:
        """Return how many tokens the model has to catch up with, beside the last one."""
        return request.num_tokens - self._track(request).num_filled - 1

    def _can_try(self) -> bool:
        """True where what a try takes has been saved, of matching or of the model's drafts."""
        if self._matches_text and self._match_s >= self._match.seconds * self._num_requests:
            return True
        return self._model is not None and self._late_s >= self._try_s

    def _try_model(self, model: DraftingModel, ready: Sequence[Request], steps: list[int]) -> None:
        """Let the model make a draft for a request for which none pays, and go on with it while they come true.

        A request is first tried when what that will take has been saved, catching up with its text included. Prompts
        add to what their own requests' first tokens may take.
        """
        idle = [i for i, count in enumerate(steps) if not count]
        tracks = [self._track(request) for request in ready]
        tried = [i for i in idle if tracks[i].is_model_right and tracks[i].num_tries < MOST_TRIES]
        if idle and not tried and max(self._early_s, self._late_s) >= model.cost.call_s:
            prices = [model.cost.seconds([1], self._num_missing(request)) for request in ready]
            self._try_s = min(prices[i] for i in idle)
            cheap = [i for i in idle if prices[i] <= (self._early_s if _is_early(ready[i]) else self._late_s)]
            tried = sorted(cheap, key=lambda i: tracks[i].last_model_ask)[:1]
            for i in tried:
                tracks[i].num_tries = 0
        for i in tried:
            steps[i] = 1
            tracks[i].num_tries += 1
        self._num_probed = len(tried)

    def _worth_s(self, products: Sequence[float]) -> float:
        """Return the seconds that a draft saves whose tokens come true with these probabilities."""
        return sum(max(0.0, product * self._token_s - self._row_s) for product in products)

    def _learn_price(self, asked: Sequence[Request], counts: Sequence[int]) -> None:
        """Take the time for that of matching, or, where `counts` of the model's calls were made, for theirs."""
        cost_s = self._clock() - self._decided_s
        if self._model is None or not any(counts):
            self._match.learn(cost_s / len(asked))
            self._purse.spend(cost_s)
            return
        missing = [self._num_missing(request) for request, count in zip(asked, counts) if count]
        if self._num_probed:
            price_s = cost_s * self._num_probed / len(missing)
            self._early_s -= price_s
            self._late_s -= price_s * (not any(_is_early(request) for request in asked))
            return
        self._early_s, self._late_s = min(0.0, self._early_s), min(0.0, self._late_s)
        self._purse.earn(-self._model.cost.seconds(counts, 0))  # out of what these drafts are about to bring
        if max(missing) <= MOST_MISSING:
            self._model.cost.learn(counts, sum(missing), cost_s)

    def _compare(self, key: Key, track: _Track, token_ids: Sequence[int]) -> None:
        expected, kept = track.draft.token_ids[track.num_right :], 0
        reached = min(len(expected), len(token_ids))
        while kept < reached and expected[kept] == token_ids[kept]:
            kept += 1
        self._survival.learn(key, track.draft, track.num_right, kept, kept < reached)
        track.num_right += kept
        if kept:
            self._is_resting = False
        if self._num_model_tokens(track.draft):
            track.is_model_right = track.num_right > 0
        if kept < reached:
            self._num_left_out = 0
        if kept < reached or track.num_right == len(track.draft):
            del self._open[key]

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request.key)
        if track is None:
            track = self._tracks[request.key] = _Track(TRIAL * self._match.seconds)
        return track


def _is_early(request: Request) -> bool:
    """True beside the first token, for which the prompt is read."""
    return request.num_output_tokens <= 1
