# SPDX-License-Identifier: Apache-2.0
"""The policy of adaptive length; docs/design/adaptive-length.md describes the method and the sequence of calls."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from fastdeploy.core.length_policy import Clock, LengthPolicy
from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request
from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.acceptance import MAX_DEPTH, AcceptanceModel
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes, most_profitable

TRIAL_BUDGET = 2.0  # plain steps (the time of a step without drafts): budget of a trial, enough for several drafts
MAX_BUDGET = 8.0  # plain steps: maximum of the budget, so that drafts that have become bad are paused soon
LOSS_SHARE = 0.01  # share of the time that trials may lose in the long run; smaller than differences between runs
NUM_TIMING_STEPS = 6  # plain steps in a row that measure their time; the caches are cold in the first one
TIMING_INTERVAL = 32  # steps with drafts before the first measurement, so that short outputs have none; then doubles
MATCH_INTERVAL = 4  # steps between searches for long matches during a pause; a search takes a twentieth of a short step
MEAN_WEIGHT = 0.1  # weight of a step in running means, which cover about ten steps: noise cancels, changes show
MAX_TIME_RATIO = 2.0  # measured / expected time: maximum that is believed, as steps are interrupted now and then
CATCH_UP_STEPS = 32  # steps that share the time of computing tokens that a drafting model had missed; all gain from it


class LossBudget:
    """The loss budget of batches of similar size, in plain steps, and the time of their plain steps."""

    def __init__(self, nearest: LossBudget | None = None) -> None:
        self.slowdown: float = nearest.slowdown if nearest else 1.0  # measured / predicted time of plain steps
        self.pause_left: int = min(nearest.pause_left, TIMING_INTERVAL) if nearest else NUM_TIMING_STEPS  # steps
        self.is_timing = nearest is None  # whether the pause only measures the time of plain steps
        self._budget, self._mean_gain, self._was_full = TRIAL_BUDGET, 0.0, False
        self._num_timed, self._steps_to_timing, self._interval = 0, TIMING_INTERVAL, TIMING_INTERVAL

    def record_plain_step(self, seconds: float, predicted_s: float) -> None:
        """Update the slowdown by the time of a plain step."""
        self._num_timed += 1
        ratio = min(seconds / predicted_s, MAX_TIME_RATIO * self.slowdown)
        self.slowdown += max(MEAN_WEIGHT, 1 / (1 + self._num_timed)) * (ratio - self.slowdown)
        self._steps_to_timing = self._interval

    def record_gain(self, gain: float, deferred: float) -> None:
        """Add what the drafts of a step gained (negative: lost); begin or end a pause. `deferred` costs are to come."""
        self._mean_gain += MEAN_WEIGHT * (gain - self._mean_gain)
        self._budget = min(self._budget + gain, MAX_BUDGET)
        self._was_full |= self._budget == MAX_BUDGET
        self._steps_to_timing -= 1
        if self.pause_left:
            if self._budget >= TRIAL_BUDGET and not self.is_timing:
                self.pause_left = 0  # drafts of long matches have gained enough for a trial
        elif self._budget < 0.0 and not self._was_full:
            self.pause_left = int((TRIAL_BUDGET + deferred - self._budget) / LOSS_SHARE)
        elif self._budget < 0.0 or self._steps_to_timing <= 0:  # drafts that gained are not paused by an old time
            self.pause_left, self.is_timing = NUM_TIMING_STEPS, True
            self._num_timed, self._was_full = 0, False
            cost = TRIAL_BUDGET + NUM_TIMING_STEPS * max(0.0, self._mean_gain)
            self._interval = min(2 * self._interval, int(cost / LOSS_SHARE))

    def advance_pause(self) -> bool:
        """Count a step of the pause; return whether a trial begins after it."""
        self.pause_left -= 1
        if self.pause_left:
            return False
        was_timing, self.is_timing, self._budget = self.is_timing, False, max(self._budget, TRIAL_BUDGET)
        return not was_timing


class AdaptiveLength(LengthPolicy):
    """Verifies as many drafts as raise the tokens per second of the batch, and pauses drafting while it loses time.

    Lengths follow from acceptance and predicted step times; whether to draft at all follows from measured time. A step
    with drafts, proposing included, is compared with plain steps for as many tokens. Losses use up a loss budget, which
    gains refill. Drafting is then paused until the loss is LOSS_SHARE of the time, except for matches of MAX_DEPTH.
    """

    is_adaptive = True

    def __init__(self, times: StepTimes, passes: DraftPasses | None, matches_text: bool, clock: Clock) -> None:
        """Start with `passes` if there is a drafting model, `matches_text` if the proposer drafts from matches."""
        self._times, self._passes, self._matches_text, self._clock = times, passes, matches_text, clock
        self._acceptance = AcceptanceModel()
        self._budgets: dict[int, LossBudget] = {}  # by the bit length of the batch size
        self._proposed: list[tuple[Request, Draft, int]] = []  # with the request's number of tokens at that time
        self._is_drafting = False  # whether the drafts of the current step were proposed outside of a pause
        self._was_plain = False  # whether the previous step had no drafts
        self._num_decoding = self._num_tokens = self._num_drafts = self._num_passes = 0
        self._step_start_s = self._propose_start_s = self._propose_s = self._deferred_s = 0.0
        self._paused_since: float | None = None
        self._stats = DraftLengthStats()

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Cut the drafts to the lengths that give the most tokens per second, possibly 0."""
        count, self._num_drafts = len(decoding), 0
        self._num_decoding, self._step_start_s = count, self._clock()
        self._num_tokens = sum([request.num_tokens for request in decoding])
        if drafted := [request for request in decoding if request.draft is not NO_DRAFT]:
            acceptance = [self._acceptance.acceptance(request, request.draft) for request in drafted]
            num_offered = sum(map(len, acceptance))
            sources = [request.draft.source for request in drafted]
            times = self._times.with_drafts(count, self._num_tokens, sources, num_offered, num_prefill_rows)
            lengths = most_profitable(acceptance, count, times)
            for request, length in zip(drafted, lengths):
                request.draft = request.draft.cut(length)
            self._num_drafts = sum(lengths)
            self._stats.num_zero_choices += not self._num_drafts
            self._stats.num_withheld_tokens += num_offered - self._num_drafts
        self._stats.num_rows = self._num_drafts
        self._stats.mean_length += MEAN_WEIGHT * (self._num_drafts / max(1, count) - self._stats.mean_length)

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Record the step; unless drafting is paused, allow the `ready` requests as many drafts as fit."""
        self._propose_start_s = self._clock()
        if self._num_decoding:
            self._record_step(plan, self._propose_start_s - self._step_start_s)
        self._propose_s, self._num_passes, self._stats.num_requests = 0.0, 0, len(ready)
        if not ready:
            return []
        budget = self._budget(len(ready))
        self._is_drafting = not budget.pause_left
        is_paused = not self._is_drafting and not budget.is_timing
        self._paused_since = (self._paused_since or time.monotonic()) if is_paused else None
        if self._is_drafting:
            self._num_passes = self._best_num_passes(len(ready))
            return [DraftQuota(request.draft_room, self._num_passes) for request in ready]
        if is_paused and self._matches_text and budget.pause_left % MATCH_INTERVAL == 0:
            return [DraftQuota(request.draft_room, 0, MAX_DEPTH) for request in ready]
        return []

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Store the drafts as they were proposed, and the time that proposing took."""
        self._proposed += [(r, r.draft, r.num_tokens) for r in requests if r.draft is not NO_DRAFT]
        self._propose_s = self._clock() - self._propose_start_s
        if self._passes and self._num_passes:
            max_s = MAX_TIME_RATIO * self._passes.seconds(len(requests), self._num_passes)
            self._deferred_s += max(0.0, self._propose_s - max_s)
            self._propose_s = min(self._propose_s, max_s)

    def finish_request(self, request: Request) -> None:
        """Drop the state of a request; the outcomes of its drafts still count for their sources."""
        self._acceptance.rejections.pop(request.key, None)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that there is no state of other requests."""
        assert self._acceptance.rejections.keys() <= {request.key for request in requests}

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        paused_s = 0.0 if self._paused_since is None else time.monotonic() - self._paused_since
        return replace(self._stats, is_paused=self._paused_since is not None, paused_s=paused_s)

    def _record_step(self, plan: StepPlan, step_s: float) -> None:
        """Compare a step with a plain step; the time of one with prefill rows is predicted instead of measured."""
        count, has_prefill = self._num_decoding, len(plan.requests) > self._num_decoding
        sources = [scheduled.draft.source for scheduled in plan.requests if scheduled.draft.token_ids]
        num_drafts = sum([len(scheduled.draft) for scheduled in plan.requests]) if sources else 0
        budget, num_accepted = self._budget(count), self._acceptance.update(self._proposed)
        self._proposed.clear()
        predicted_s = self._times.rows_s(count) + self._times.requests_s(count, self._num_tokens)
        if num_drafts or self._is_drafting:
            plain_s, extra_s = budget.slowdown * predicted_s, 0.0
            if num_drafts:
                extra_s = budget.slowdown * self._times.drafts_s(count, self._num_tokens, sources, num_drafts)
                if not has_prefill:
                    extra_s = min(step_s, MAX_TIME_RATIO * (plain_s + extra_s)) - plain_s
            spread_s = self._deferred_s / CATCH_UP_STEPS
            self._deferred_s -= spread_s
            gain = num_accepted / count - (extra_s + self._propose_s + spread_s) / plain_s
            budget.record_gain(gain, self._deferred_s / plain_s)
        if not num_drafts and not has_prefill and self._was_plain:  # caches are cold in the first one after drafts
            budget.record_plain_step(step_s, predicted_s)
        self._was_plain = not num_drafts
        if self._times.experts and not has_prefill and count + num_drafts > 1:
            self._times.experts.update(count, sources, num_drafts)
        if budget.pause_left and not self._is_drafting and budget.advance_pause():
            self._acceptance.limit_evidence()
            if self._times.experts:
                self._times.experts.limit_evidence()
            self._deferred_s = 0.0

    def _best_num_passes(self, count: int) -> int:
        """Return the number of draft passes that gives the most tokens per second."""
        if self._passes is None:
            return 0
        expected = self._acceptance.expected_accepted(self._passes.source, self._passes.max_passes)
        sources = [self._passes.source] * count
        times = self._times.with_drafts(count, self._num_tokens, sources, count * len(expected), 0)
        rates = [(1 + e) / (times[count * n] + self._passes.seconds(count, n)) for n, e in enumerate(expected, 1)]
        return 1 + rates.index(max(rates))

    def _budget(self, count: int) -> LossBudget:
        """Return the budget of a batch size; a new one starts with the state of the nearest."""
        size = count.bit_length()
        if size not in self._budgets:
            nearest = min(self._budgets, key=lambda other: abs(other - size), default=size)
            self._budgets[size] = LossBudget(self._budgets.get(nearest))
        return self._budgets[size]
