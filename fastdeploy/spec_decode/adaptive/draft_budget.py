# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are asked for, how many, and which a step verifies: docs/guide/speculation.md, "Adaptive length".

What drafts bring is measured, not believed: the time of every step with drafts, and of asking for them, is held against
that of steps without. Beliefs only choose how many drafts of those that pay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastdeploy.core.request import NO_DRAFT, Draft, Request
from fastdeploy.core.stats import DraftBudgetStats
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.draft_account import COST_RATE, Account, Price
from fastdeploy.spec_decode.adaptive.draft_choice import most_profitable
from fastdeploy.spec_decode.adaptive.step_cost import MOST_RATE, CallCost, StepCost
from fastdeploy.spec_decode.adaptive.survival import Key, Survival

MATCH, MODEL = "match", "model"  # kinds of drafts
STEP_OUTLIER = 2.0  # a step counts for at most so many times one whose drafts are requests of their own
REST_TIMED = 32  # steps at rest of which one is timed
CONTROL_SHARE = 0.005  # of the time: most that steps without drafts give up, by which those with them are judged
CONTROL_STEPS = 8  # in a row: what drafting leaves in the caches slows the first ones
CONTROL_TIMED = 3  # of them, the last ones
CONTROL_REST = 48  # steps between them at least
FIRST_LOOKS = 16  # steps with drafts after which they must be known, unless drafts bring more than any error in them
MOST_MISSING = 16  # tokens: how far behind a cache is that was asked lately; how filled any other is, is not known
REVIEW = 8  # asks of a model, of which one chooses how deep it drafts
IDLE_RATE = 0.1  # of the mean of what steps take more for which no draft was found
IDLE_ERROR = 0.03  # that they are faster than those without, which must then be timed again
DOUBT_ERROR = 0.2  # that steps without drafts must take more than believed for drafts that lost all to go on
DOUBT_RATE = 0.5  # with which such a step counts then
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

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Begin a step: cut the drafts of the requests that decode in it, beside `num_prompt_rows` rows of prompts."""

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

    num_filled: int = 0  # tokens that the model has read
    draft: Draft = NO_DRAFT  # its last one, uncut, while the text has neither refuted nor passed it
    num_right: int = 0  # tokens of that draft that came true


@dataclass(slots=True)
class _Asked:
    """What was asked for since the last step, and what that took.

    Attributes:
        size: of the batch, which the drafts' accounts are those of.
        has_matches: text was to be matched.
        counts: calls of the model that were made for each request.
        call_s, other_s: seconds of the model's calls, and of all else.
        replaced_s: what matches promised that the model's drafts took the place of.
    """

    size: int
    has_matches: bool
    counts: dict[Key, int] = field(default_factory=dict)
    call_s: float = 0.0
    other_s: float = 0.0
    replaced_s: float = 0.0


class _Doubt(NamedTuple):
    """An account with nothing left by steps without drafts that were timed long ago, and what those took."""

    account: Account
    num_requests: int
    weight: float
    plain_s: float


class AdaptiveBudget(DraftBudget):
    """Asks for drafts while they pay.

    Matches and a model's drafts have accounts of their own, for every doubling of the requests, in which every step
    books what its drafts have really brought; a kind that has lost what it had rests. Among drafts that are asked for,
    as many are taken as are expected to give the most tokens per second of the batch.
    """

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
        self._clock = clock
        self._kinds = [MATCH] if matches_text or model is None else []
        self._kinds += [MODEL] if model else []
        self._survival = Survival()
        self._accounts: dict[tuple[str, int], Account] = {}
        self._tracks: dict[Key, _Track] = {}
        self._open: dict[Key, _Track] = {}  # those whose last draft is not decided
        self._mean_length = 0.0
        self._num_decoding = self._num_rows = self._num_zero_choices = self._num_withheld = 0
        self._weight = 0.0  # of the step now, for its cost
        self._began_s = self._ended_s = self._asked_s = 0.0
        self._is_timed = False
        self._asked: _Asked | None = None
        self._match = Price()
        self._num_requests = 0
        self._is_open = True  # the account of a kind of drafts, for so many requests
        self._depth = self._num_weighed = self._num_depth_asks = 0
        self._token_s = self._row_s = 0.0  # of the next step: what a token is worth, and what a row costs
        self._weighed: list[int] | None = None  # calls that were left to the model
        self._num_untimed = 0  # steps since one was timed
        self._num_rested = self._num_looked = 0  # steps in a row before which nobody was asked; others since such a row
        self._control_s = self._gain_s = 0.0  # saved for the next such row; what drafts bring a step
        self._idle_more = 0.0  # of a step without drafts: what one takes more for which no draft was found
        self._plain_s = 0.0  # that a step without drafts is believed to take
        self._doubts: list[_Doubt] = []
        self._is_known = False  # what steps without drafts take

    def choose(self, decoding: Sequence[Request], num_prompt_rows: int) -> None:
        """Cut every draft to the tokens that pay; none is a choice."""
        drafted = [request for request in decoding if request.draft is not NO_DRAFT]
        count = self._num_decoding = len(decoding)
        self._num_rested = 0 if self._asked else self._num_rested + 1
        self._num_rows = 0
        self._is_timed = count > 0 and (self._asked is not None or self._is_sample())
        if self._is_timed:
            self._began_s = self._clock()
        if drafted or self._is_timed:
            self._weight = self._cost.weight(count, sum([request.num_tokens for request in decoding]))
        if drafted and MATCH in self._kinds:
            self._cut(drafted, count, num_prompt_rows)
        elif drafted:
            self._num_rows = sum([len(request.draft) for request in drafted])
        self._mean_length += MEAN_RATE * (self._num_rows / max(1, count) - self._mean_length)

    def end_step(self, plan: StepPlan) -> None:
        """Book what drafts have brought; learn what the step took."""
        if not self._is_timed:
            self._num_untimed += self._num_decoding > 0
            return
        self._ended_s = self._clock()
        step_s, count, asked = self._ended_s - self._began_s, self._num_decoding, self._asked
        plain_s = self._plain_s = self._cost.seconds(count, self._weight)
        self._is_known = self._cost.is_known(count, self._weight)
        has_prompts = len(plan.requests) != count
        if asked:
            if has_prompts or not self._is_known:  # there is no step without drafts to hold it against
                extra_s = self._believed_s(plan)
            else:
                extra_s = min(step_s, STEP_OUTLIER * plain_s * (1 + self._num_rows / count)) - plain_s
            self._book(asked, plan, extra_s, plain_s)
            self._num_looked += 1
            if not has_prompts and not self._num_rows:
                self._idle_more += IDLE_RATE * (step_s / plain_s - 1 - self._idle_more)
        if not has_prompts:
            self._learn_step(step_s)
        self._save(plain_s)
        self._asked = None

    def wants_drafts(self, num_requests: int) -> bool:
        """Rest while no kind of drafts has anything to lose."""
        if num_requests != self._num_requests:
            self._num_requests = num_requests
            self._find_open()
        if not self._is_open or self._is_control_due():
            return False
        return self._is_open  # which the end of a control may have changed

    def ask(self, ready: Sequence[Request]) -> list[Ask]:
        """Ask for the drafts of the kinds that have something to lose."""
        if not ready:
            return []
        self._asked_s, size = self._clock(), self._num_requests
        if not self._is_timed:
            self._ended_s = self._asked_s
        asked = self._asked = _Asked(size, MATCH in self._kinds and self._account(MATCH, size).is_open)
        rooms = [request.draft_room for request in ready]
        steps = [0] * len(ready)
        matches = rooms if asked.has_matches else steps
        if self._model and self._account(MODEL, size).is_open:
            depth = self._choose_depth(self._model, ready, self._account(MODEL, size).is_on_trial)
            steps = [min(depth, room) for room in rooms]
        return [Ask(max(match, step), step) for match, step in zip(matches, steps)]

    def weigh(self, requests: Sequence[Request], matches: Sequence[Draft], steps: Sequence[int]) -> list[int]:
        """Return how many of its calls the model keeps for each request, now that its match is known.

        It keeps those of requests without a match, and those that bring more than the match, their price included.
        """
        if self._model is None or self._asked is None:
            return list(steps)
        call, gain_s, replaced_s = self._model.cost, 0.0, 0.0
        kept = [0 if len(match) else count for match, count in zip(matches, steps)]
        is_kept = any(kept)
        for i, (request, match, count) in enumerate(zip(requests, matches, steps)):
            if not count or not len(match):
                continue
            worth = self._survival.hopes(request.key, self._model.source, count)
            promises = self._survival.products(request.key, match)
            worth += [worth[-1] * promise for promise in promises[count:]]  # which go on behind the model's drafts
            promised_s = self._worth_s(promises)
            more_s = self._worth_s(worth) - promised_s - call.own_s - count * call.request_s
            if more_s > 0.0:
                kept[i] = count
                gain_s += more_s
                replaced_s += promised_s
        if is_kept or gain_s > max(kept) * call.call_s:
            self._weighed, self._asked.replaced_s = kept, replaced_s
        else:
            self._weighed = [0] * len(steps)
        return self._weighed

    def proposed(self, asked: Sequence[Request], asks: Sequence[Ask]) -> None:
        """Take the cost, and remember the drafts before they are cut."""
        assert self._asked is not None
        cost_s, fill_s = self._clock() - self._asked_s, 0.0
        counts = self._weighed or [self._num_calls(request, ask) for request, ask in zip(asked, asks)]
        self._weighed = None
        if self._model and any(counts):
            self._asked.call_s, fill_s = self._learn_calls(self._model.cost, self._asked, asked, counts, cost_s)
        else:
            self._match.learn(cost_s / len(asked))
        for request, count in zip(asked, counts):
            track = self._track(request)
            if count:
                self._asked.counts[request.key] = count
                track.num_filled = request.num_tokens
            if len(request.draft):
                track.draft, track.num_right = request.draft, 0
                self._open[request.key] = track
        self._asked.other_s = self._clock() - self._ended_s - self._asked.call_s - fill_s

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
        for state in (self._tracks, self._open):
            state.pop(request.key, None)
        self._survival.forget(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        live = {request.key for request in requests}
        assert self._tracks.keys() | self._open.keys() | self._survival.keys() <= live

    def stats(self) -> DraftBudgetStats:
        """Return counters and the state now."""
        return DraftBudgetStats(self._mean_length, self._num_rows, self._num_zero_choices, self._num_withheld)

    def _cut(self, drafted: Sequence[Request], num_decoding: int, num_prompt_rows: int) -> None:
        """Cut drafts to what gives the most tokens per second.

        Those of a model are taken: they are paid for, and their rows were weighed before.
        """
        products = [self._survival.products(request.key, request.draft) for request in drafted]
        num_offered = sum(map(len, products))
        line = self._line(num_decoding, num_offered, num_prompt_rows)
        lengths = most_profitable(products, num_decoding, line)
        if self._asked and self._asked.counts:
            lengths = [max(length, self._num_model_tokens(request.draft)) for request, length in zip(drafted, lengths)]
        for request, length in zip(drafted, lengths):
            request.draft = request.draft.cut(length)
        self._num_rows = sum(lengths)
        self._num_zero_choices += not self._num_rows
        self._num_withheld += num_offered - self._num_rows

    def _is_sample(self) -> bool:
        """Return True for a step at rest, or between steps with drafts, that is timed."""
        if self._num_looked or not self._is_known:
            return self._num_rested > CONTROL_STEPS - CONTROL_TIMED
        return self._num_rested % REST_TIMED == 0

    def _is_control_due(self) -> bool:
        """True where steps without drafts are wanted among those with them, and what they give up has been saved."""
        if not self._is_known:
            return self._num_looked >= FIRST_LOOKS and self._gain_s < self._plain_s
        if self._num_rested >= CONTROL_STEPS:
            self._control_s = self._idle_more = 0.0
            self._settle_doubts()
            return False
        if self._doubts or self._idle_more < -IDLE_ERROR:
            return True
        return self._num_looked >= CONTROL_REST and self._control_s >= CONTROL_STEPS * self._gain_s

    def _settle_doubts(self) -> None:
        """Shut the accounts in doubt, unless steps without drafts take longer than what they were held against."""
        for account, num_requests, weight, plain_s in self._doubts:
            now_s = self._cost.seconds(num_requests, weight)
            if now_s > (1 + DOUBT_ERROR) * plain_s:
                account.renew(now_s, num_requests)
            else:
                account.close()
        if self._doubts:
            self._doubts.clear()
            self._find_open()

    def _learn_step(self, step_s: float) -> None:
        """Take in a step without prompts; one without drafts stands for those before it that are not timed."""
        count = self._num_decoding
        if self._num_rows:
            self._cost.learn_drafted(count, self._num_rows, self._weight, step_s)
        elif not self._asked:
            most_rate = DOUBT_RATE if self._doubts else MOST_RATE
            self._cost.learn_plain(count, self._weight, step_s, self._num_looked or REST_TIMED, most_rate)
        if self._is_known and self._num_rested >= CONTROL_STEPS:
            self._num_looked = 0

    def _save(self, plain_s: float) -> None:
        """Let kinds of drafts that rest save for a trial, and those that are asked for, for steps without them."""
        seconds = plain_s * (1 + self._num_untimed)
        self._num_untimed = 0
        self._control_s += CONTROL_SHARE * seconds
        for kind in self._kinds:
            self._account(kind, self._num_requests).save(seconds, plain_s)
        self._find_open()

    def _book(self, asked: _Asked, plan: StepPlan, extra_s: float, plain_s: float) -> None:
        """Book what the drafts of a step brought, which took `extra_s` more than it would have without them."""
        kept = own_kept = own_rows = 0
        for request, start, rows in zip(plan.requests, plan.num_computed, plan.num_verify_rows):
            if rows > 1:
                right = request.num_tokens - start - 2
                own = min(rows - 1, asked.counts.get(request.key, 0))
                kept, own_kept, own_rows = kept + right, own_kept + min(own, right), own_rows + own
        token_s = plain_s / self._num_decoding
        gain_s = kept * token_s - extra_s - asked.call_s - asked.other_s
        self._gain_s += COST_RATE * (gain_s - self._gain_s)
        share = own_rows / self._num_rows if self._num_rows else 0.0 if asked.has_matches else 1.0
        if asked.has_matches:
            gain_s = (kept - own_kept) * token_s - (1 - share) * extra_s - asked.other_s + asked.replaced_s
            self._enter(self._account(MATCH, asked.size), gain_s, plain_s)
            asked.other_s = 0.0
        if asked.counts:
            own_s = own_kept * token_s - share * extra_s - asked.call_s - asked.other_s - asked.replaced_s
            self._enter(self._account(MODEL, asked.size), own_s, plain_s)

    def _enter(self, account: Account, gain_s: float, plain_s: float) -> None:
        """Book a gain; where nothing is left, that is doubted if steps without drafts were not timed lately."""
        is_sure = not self._is_known or self._num_looked < FIRST_LOOKS
        if not account.book(gain_s, plain_s, self._num_decoding, may_close=is_sure) and not is_sure:
            self._doubts.append(_Doubt(account, self._num_decoding, self._weight, plain_s))

    def _believed_s(self, plan: StepPlan) -> float:
        """Return what the drafts of a step are believed to add to it, whether prompts are read beside them or not."""
        num_prompt_rows = sum(plan.num_scheduled) - self._num_decoding - self._num_rows
        line = self._line(self._num_decoding, self._num_rows, num_prompt_rows)
        return line[self._num_rows] - line[0]

    def _choose_depth(self, model: DraftingModel, ready: Sequence[Request], is_on_trial: bool) -> int:
        """Return how many drafts of each request give the most tokens per second: all, while nothing else is known."""
        if is_on_trial:
            return model.num_steps
        count = len(ready)
        self._num_depth_asks += 1
        if self._num_depth_asks % REVIEW and count == self._num_weighed:
            return self._depth
        self._num_weighed = count
        most = count * model.num_steps
        line = self._line(count, most, 0)
        self._token_s, self._row_s = line[0] / count, (line[most] - line[0]) / most
        call, emitted, best_rate = model.cost, 1.0, 0.0
        for depth, product in enumerate(self._survival.mean_hopes(model.source, model.num_steps), 1):
            emitted += product
            calls_s = depth * call.call_s + count * (depth * call.request_s + call.own_s + (emitted - 1) * call.row_s)
            rate = emitted / (line[count * depth] + calls_s)
            if rate > best_rate:
                self._depth, best_rate = depth, rate
        return self._depth

    def _learn_calls(
        self, call: CallCost, look: _Asked, asked: Sequence[Request], counts: Sequence[int], cost_s: float
    ) -> tuple[float, float]:
        """Return what the model's calls took, and what catching up with texts did, which is owed; learn from it."""
        if look.has_matches:
            cost_s = max(0.0, cost_s - self._match.seconds * len(asked))
        missing = [request.num_tokens - self._track(request).num_filled - 1 for request, n in zip(asked, counts) if n]
        if max(missing) <= MOST_MISSING:
            call.learn(counts, sum(missing), cost_s)
            return cost_s, 0.0
        fill_s = max(0.0, cost_s - call.seconds(counts, 0))
        self._account(MODEL, look.size).owe(fill_s)
        return cost_s - fill_s, fill_s

    def _find_open(self) -> None:
        self._is_open = any([self._account(kind, self._num_requests).is_open for kind in self._kinds])

    def _account(self, kind: str, num_requests: int) -> Account:
        key = kind, num_requests.bit_length()
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account()
        return account

    def _num_model_tokens(self, draft: Draft) -> int:
        """Return how many of a draft's first tokens the model made."""
        name = self._model.source if self._model else None
        return draft.sources.count(name) if draft.sources else len(draft) * (draft.source == name)

    def _num_calls(self, request: Request, ask: Ask) -> int:
        """Return how many of the calls asked for the model made: none where a match took their place."""
        is_match = MATCH in self._kinds and len(request.draft) and not self._num_model_tokens(request.draft)
        return 0 if is_match else ask.num_steps

    def _line(self, num_decoding: int, num_drafts: int, num_prompt_rows: int) -> list[float]:
        """Return the time that decoding with 0 .. num_drafts drafts is charged, of `num_decoding` requests as now.

        Drafts cost what they add to the whole step, prompts their own.
        """
        line = self._cost.line(num_decoding, num_drafts, self._weight, num_prompt_rows)
        if not num_prompt_rows:
            return line
        own_s = self._cost.seconds(num_decoding, self._weight)
        return [own_s + seconds - line[0] for seconds in line]

    def _worth_s(self, products: Sequence[float]) -> float:
        """Return the seconds that a draft saves whose tokens come true with these probabilities."""
        return sum(max(0.0, product * self._token_s - self._row_s) for product in products)

    def _compare(self, key: Key, track: _Track, token_ids: Sequence[int]) -> None:
        expected, kept = track.draft.token_ids[track.num_right :], 0
        reached = min(len(expected), len(token_ids))
        while kept < reached and expected[kept] == token_ids[kept]:
            kept += 1
        self._survival.learn(key, track.draft, track.num_right, kept, kept < reached)
        track.num_right += kept
        if kept < reached or track.num_right == len(track.draft):
            del self._open[key]

    def _track(self, request: Request) -> _Track:
        track = self._tracks.get(request.key)
        if track is None:
            track = self._tracks[request.key] = _Track()
        return track
