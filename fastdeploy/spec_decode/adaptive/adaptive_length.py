# SPDX-License-Identifier: Apache-2.0
"""Adaptive length: how many drafts are verified, and when drafting is paused. See docs/design/adaptive-length.md."""

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

TRIAL_BUDGET = 2.0  # plain steps that drafts may lose in a trial before drafting is paused
MAX_BUDGET = 8.0  # plain steps: most that is kept of what drafts have gained, as a reserve against losses
LOSS_SHARE = 0.01  # of the time: most that trials may cost in the long run
PLAIN_STEPS = 6  # steps without drafts in a row that time plain steps while drafts are verified
FIRST_PLAIN = 32  # drafted steps before plain steps are timed for the first time; the distance then doubles
MEAN_RATE = 0.1  # weight of a step in running means
OUTLIER = 2.0  # times the expected seconds that a step counts for at most, such as one that was interrupted
CATCH_UP_STEPS = 32  # over which the time is spread that a drafting model takes for tokens it has missed


class LossBudget:
    """Loss budget and plain step time of batches of similar size. Gains and losses are counted in plain steps."""

    def __init__(self, nearest: LossBudget | None = None) -> None:
        self.slowdown: float = nearest.slowdown if nearest else 1.0  # of plain steps: measured / predicted time
        self.pause_left: int = min(nearest.pause_left, FIRST_PLAIN) if nearest else 0  # steps
        self.is_timing = False  # the pause is one of PLAIN_STEPS that time plain steps
        self._budget, self._mean_gain, self._has_gained = TRIAL_BUDGET, 0.0, False
        self._num_plain, self._steps_to_timing, self._distance = 0, FIRST_PLAIN, FIRST_PLAIN

    def time_plain_step(self, seconds: float, predicted_s: float) -> None:
        """Take in a step without drafts."""
        self._num_plain += 1
        ratio = min(seconds / predicted_s, OUTLIER * self.slowdown)
        self.slowdown += max(MEAN_RATE, 1 / (1 + self._num_plain)) * (ratio - self.slowdown)
        self._steps_to_timing = self._distance

    def record_gain(self, gain: float, deferred: float) -> None:
        """Take in what the drafts of a step gained, or lost (negative), and costs that are deferred to later steps."""
        self._mean_gain += MEAN_RATE * (gain - self._mean_gain)
        self._budget = min(self._budget + gain, MAX_BUDGET)
        self._has_gained |= self._budget == MAX_BUDGET
        self._steps_to_timing -= 1
        if self.pause_left:
            if self._budget >= TRIAL_BUDGET and not self.is_timing:
                self.pause_left = 0  # long matches have gained what a trial may lose
        elif self._budget < 0.0 and not self._has_gained:
            self.pause_left = int((TRIAL_BUDGET + deferred - self._budget) / LOSS_SHARE)
        elif self._budget < 0.0 or self._steps_to_timing <= 0:  # before drafts that had gained are paused, look again
            self.pause_left, self.is_timing = PLAIN_STEPS, True
            self._num_plain, self._has_gained = 0, False
            cost = TRIAL_BUDGET + PLAIN_STEPS * max(0.0, self._mean_gain)
            self._distance = min(2 * self._distance, int(cost / LOSS_SHARE))

    def advance_pause(self) -> bool:
        """Take in a step of a pause; return True if a trial of drafts begins."""
        self.pause_left -= 1
        if self.pause_left:
            return False
        was_timing, self.is_timing, self._budget = self.is_timing, False, max(self._budget, TRIAL_BUDGET)
        return not was_timing


class AdaptiveLength(LengthPolicy):
    """Verifies the drafts that raise the tokens per second of the batch; pauses drafting that loses time.

    Lengths follow from acceptance and predicted step times; whether to draft at all, from measured time. A step with
    drafts, proposing included, is compared with plain steps for as many tokens. Losses use up a loss budget that gains
    refill; then drafting is paused until the loss is LOSS_SHARE of the time, except for matches of MAX_DEPTH tokens.
    """

    def __init__(self, times: StepTimes, passes: DraftPasses | None, matches_text: bool, clock: Clock) -> None:
        """Start with `passes` if a model drafts, `matches_text` if drafts (also) come from matches."""
        self._times, self._passes, self._matches_text, self._clock = times, passes, matches_text, clock
        self._acceptance = AcceptanceModel()
        self._budgets: dict[int, LossBudget] = {}  # by the bit length of the batch size
        self._proposed: list[tuple[Request, Draft, int]] = []  # with the request's number of tokens at that time
        self._is_drafting = False  # the proposer was not restricted before the current step
        self._was_plain = False  # the step before had no drafts
        self._num_decoding = self._num_drafts = self._num_passes = 0
        self._began_s = self._asked_s = self._contexts_s = self._propose_s = self._deferred_s = 0.0
        self._paused_since: float | None = None
        self._stats = DraftLengthStats()

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Cut the drafts to what gives the most tokens per second; none may be left."""
        count, self._num_drafts = len(decoding), 0
        self._num_decoding, self._began_s = count, self._clock()
        self._contexts_s = self._times.contexts_s(count, sum([request.num_tokens for request in decoding]))
        if drafted := [request for request in decoding if request.draft is not NO_DRAFT]:
            acceptance = [self._acceptance.acceptance(request, request.draft) for request in drafted]
            num_offered = sum(map(len, acceptance))
            times = self._times.with_drafts(count, self._contexts_s, num_offered, num_prefill_rows)
            lengths = most_profitable(acceptance, count, times)
            for request, length in zip(drafted, lengths):
                request.draft = request.draft.cut(length)
            self._num_drafts = sum(lengths)
            self._stats.num_zero_choices += not self._num_drafts
            self._stats.num_withheld_tokens += num_offered - self._num_drafts
        self._stats.num_rows = self._num_drafts
        self._stats.mean_length += MEAN_RATE * (self._num_drafts / max(1, count) - self._stats.mean_length)

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Account for the step; unless drafting is paused, let the `ready` requests have as many drafts as fit."""
        self._asked_s = self._clock()
        if self._num_decoding:
            self._account(len(plan.requests) > self._num_decoding, self._asked_s - self._began_s)
        self._propose_s, self._num_passes = 0.0, 0
        if not ready:
            return []
        budget = self._budget(len(ready))
        self._is_drafting = not budget.pause_left
        if self._is_drafting or budget.is_timing:
            self._paused_since = None
        elif self._paused_since is None:
            self._paused_since = time.monotonic()
        if self._is_drafting:
            self._num_passes = self._best_num_passes(len(ready))
            return [DraftQuota(request.draft_room, self._num_passes) for request in ready]
        if budget.is_timing or not self._matches_text:
            return []
        return [DraftQuota(request.draft_room, 0, MAX_DEPTH) for request in ready]

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Take the time of proposing, and remember the drafts before they are trimmed."""
        self._proposed += [(r, r.draft, r.num_tokens) for r in requests if r.draft is not NO_DRAFT]
        self._propose_s = self._clock() - self._asked_s
        if self._passes and self._num_passes:
            catch_up_s = max(0.0, self._propose_s - OUTLIER * self._passes.seconds(len(requests), self._num_passes))
            self._propose_s -= catch_up_s
            self._deferred_s += catch_up_s

    def finish_request(self, request: Request) -> None:
        """Drop a request; what its drafts have taught about their source stays."""
        self._acceptance.requests.pop(request.key, None)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        assert self._acceptance.requests.keys() <= {request.key for request in requests}

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        paused_s = 0.0 if self._paused_since is None else time.monotonic() - self._paused_since
        return replace(self._stats, is_paused=self._paused_since is not None, paused_s=paused_s)

    def _account(self, is_mixed: bool, step_s: float) -> None:
        """Compare a step with one without drafts; `is_mixed` says that it computed prefill rows, too."""
        count, num_drafts = self._num_decoding, self._num_drafts
        budget, num_accepted = self._budget(count), self._acceptance.update(self._proposed)
        self._proposed.clear()
        predicted_s = self._times.rows_s(count) + self._contexts_s
        if num_drafts or self._is_drafting:
            plain_s, extra_s = budget.slowdown * predicted_s, 0.0
            if num_drafts:
                extra_s = budget.slowdown * (self._times.rows_s(count + num_drafts) - self._times.rows_s(count))
                if not is_mixed:
                    extra_s = min(step_s, OUTLIER * (plain_s + extra_s)) - plain_s
            spread_s = self._deferred_s / CATCH_UP_STEPS
            self._deferred_s -= spread_s
            gain = num_accepted / count - (extra_s + self._propose_s + spread_s) / plain_s
            budget.record_gain(gain, self._deferred_s / plain_s)
        if not num_drafts and not is_mixed and self._was_plain:  # the first one after drafts finds other cache contents
            budget.time_plain_step(step_s, predicted_s)
        self._was_plain = not num_drafts
        if budget.pause_left and not self._is_drafting and budget.advance_pause():
            self._acceptance.limit_evidence()
            self._deferred_s = 0.0

    def _best_num_passes(self, count: int) -> int:
        """Return the number of draft passes that gives the most tokens per second."""
        if self._passes is None:
            return 0
        expected = self._acceptance.expected_accepted(self._passes.source, self._passes.max_passes)
        times = self._times.with_drafts(count, self._contexts_s, count * len(expected), 0)
        rates = [(1 + e) / (times[count * n] + self._passes.seconds(count, n)) for n, e in enumerate(expected, 1)]
        return 1 + rates.index(max(rates))

    def _budget(self, count: int) -> LossBudget:
        """Return the budget of a batch size; a new one starts with what is known of the nearest size."""
        size = count.bit_length()
        if size not in self._budgets:
            nearest = min(self._budgets, key=lambda other: abs(other - size), default=size)
            self._budgets[size] = LossBudget(self._budgets.get(nearest))
        return self._budgets[size]
