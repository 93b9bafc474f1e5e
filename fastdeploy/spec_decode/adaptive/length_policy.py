# SPDX-License-Identifier: Apache-2.0
"""How many drafts each request gets. See docs/design/adaptive-length.md.

Each step makes four calls, in this order:

1. The scheduler calls `trim_drafts` before it plans the step: drafts are cut to the tokens that are worth verifying.
2. After the commit the engine calls `draft_quotas`: the policy takes in the step and says what may be proposed next.
3. The engine calls `Proposer.propose` with these quotas.
4. The engine calls `on_drafts_proposed`: the requests hold their new drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from fastdeploy.core.request import NO_DRAFT, Draft, DraftQuota, Request, RequestStatus
from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.core.step import StepPlan
from fastdeploy.spec_decode.adaptive.acceptance import MAX_DEPTH, AcceptanceModel
from fastdeploy.spec_decode.adaptive.step_times import DraftPasses, StepTimes, most_profitable

TRIAL_BUDGET = 2.0  # plain steps that drafts may lose in a trial before drafting is paused
MAX_BUDGET = 8.0  # plain steps: most that is kept of what drafts have gained, as a reserve against losses
LOSS_SHARE = 0.01  # of the time: most that trials may cost in the long run
PLAIN_STEPS = 6  # steps without drafts in a row by which plain steps are timed while drafts are verified
FIRST_PLAIN = 16  # drafted steps before plain steps are timed for the first time; the distance then doubles
PLAIN_RATE = 0.1  # weight of a step in the running mean of plain step times
OUTLIER = 2.0  # times the expected seconds that a step counts for at most, such as one that was interrupted
CATCH_UP_STEPS = 32  # over which the cost of a drafting model that computes tokens it has missed is spread


class LengthPolicy:
    """Fixed length: every request gets as many drafts as fit, and all are verified."""

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Begin a step: cut `request.draft` of the requests that decode, beside about `num_prefill_rows` other rows."""

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Take in a computed and committed step; return a quota for each of the `ready` requests, or none at all."""
        return [DraftQuota(request.draft_room, request.draft_room) for request in ready]

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Take in that the requests now hold what was proposed."""

    def finish_request(self, request: Request) -> None:
        """Drop the state of a request that ended."""

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError if state of requests other than the live `requests` is kept."""

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        return DraftLengthStats()


class _Bucket:
    """Loss budget and plain step time of batches of similar size. Gains and losses are counted in plain steps."""

    def __init__(self, nearest: _Bucket | None = None) -> None:
        self.slowdown: float = nearest.slowdown if nearest else 1.0  # of plain steps: measured time / predicted time
        self.budget = TRIAL_BUDGET
        self.pause_left: int = min(nearest.pause_left, FIRST_PLAIN) if nearest else 0  # steps
        self.is_timing = False  # the pause is one of PLAIN_STEPS that time plain steps
        self._mean_gain = 0.0
        self._num_plain = self._num_paused = 0
        self._steps_to_timing = self._distance = FIRST_PLAIN
        self._slowdown_before = self.slowdown

    def time_plain_step(self, seconds: float, predicted_s: float) -> None:
        """Take in a step without drafts."""
        ratio = min(seconds / predicted_s, OUTLIER * self.slowdown)
        self._num_plain += 1
        self.slowdown += max(PLAIN_RATE, 1 / (1 + self._num_plain)) * (ratio - self.slowdown)
        self._steps_to_timing = self._distance

    def record_gain(self, gain: float, deferred: float) -> None:
        """Take in what the drafts of a step saved, or lost (negative), and a cost that is spread over later steps."""
        self._mean_gain += PLAIN_RATE * (gain - self._mean_gain)
        self.budget = min(self.budget + gain, MAX_BUDGET)
        if self.pause_left:
            if self.budget >= TRIAL_BUDGET and not self.is_timing:
                self.pause_left = 0  # long matches have gained as much as a trial may lose
            return
        self._steps_to_timing -= 1
        if self.budget < 0.0:
            self._pause(int((TRIAL_BUDGET + deferred - self.budget) / LOSS_SHARE), is_timing=False)
        elif self._steps_to_timing <= 0:
            self._pause(PLAIN_STEPS, is_timing=True)
            cost = TRIAL_BUDGET + PLAIN_STEPS * max(0.0, self._mean_gain)
            self._steps_to_timing = self._distance = min(2 * self._distance, int(cost / LOSS_SHARE))

    def advance_pause(self) -> bool:
        """Take in a step of a pause, which ends early if plain steps are slower than was believed when it began.

        Returns:
            True if drafts are now tried again.
        """
        self.pause_left -= 1
        self._num_paused += 1
        if self._num_paused == PLAIN_STEPS and self.slowdown > 1.1 * self._slowdown_before:
            self.pause_left = 0
        is_trial = not self.pause_left and not self.is_timing
        if not self.pause_left:
            self.is_timing = False
            self.budget = max(self.budget, TRIAL_BUDGET)
        return is_trial

    def _pause(self, num_steps: int, is_timing: bool) -> None:
        self.pause_left, self.is_timing = num_steps, is_timing
        self._num_paused, self._slowdown_before = 0, self.slowdown


class AdaptiveLengthPolicy(LengthPolicy):
    """Verifies the drafts that raise the batch's tokens per second; pauses drafting that loses time.

    Which drafts are verified follows from their acceptance so far and from predicted step times. Whether requests are
    drafted for at all follows from measured time alone: what a step took, proposing included, is compared with the time
    of steps without drafts for as many tokens. Losses are paid from a loss budget that gains refill. When it is used
    up, drafting is paused, for so long that the loss is `LOSS_SHARE` of the time, and then tried again. During a pause
    only matches of at least MAX_DEPTH tokens are drafted: a text that begins to repeat itself needs no trial.
    """

    def __init__(
        self,
        times: StepTimes,
        passes: DraftPasses | None = None,
        match_source: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start without experience.

        Args:
            passes: the drafting model, if there is one.
            match_source: name of the drafts that are found by matching text, if any are.
            clock: seconds. Best is processor time of the calling thread, which leaves out that of other processes.
        """
        self._times, self._passes, self._match_source, self._clock = times, passes, match_source, clock
        self._acceptance = AcceptanceModel()
        self._buckets: dict[int, _Bucket] = {}
        self._proposed: list[tuple[Request, Draft, int]] = []  # with the request's number of tokens at that time
        self._is_drafting = False  # proposals without restriction were asked for the current step
        self._is_plain = False  # the last step had no drafts
        self._num_decoding = self._num_drafts = self._num_passes = 0
        self._began_s = self._asked_s = self._contexts_s = self._propose_s = self._deferred_s = 0.0
        self._min_match_len = 1
        self._paused_since: float | None = None
        self._stats = DraftLengthStats()

    def trim_drafts(self, decoding: Sequence[Request], num_prefill_rows: int) -> None:
        """Cut the drafts to what gives the most tokens per second; none may be left."""
        count = self._num_decoding = len(decoding)
        self._num_drafts = 0
        if not count:
            return
        self._began_s = self._clock()
        self._contexts_s = self._times.contexts_s(count, sum([request.num_tokens for request in decoding]))
        if drafted := [request for request in decoding if request.draft is not NO_DRAFT]:
            acceptance = [self._acceptance.acceptance(request.key, request.draft) for request in drafted]
            num_offered = sum(map(len, acceptance))
            times = self._times.with_drafts(count, self._contexts_s, num_offered, num_prefill_rows)
            lengths = most_profitable(acceptance, count, times)
            for request, length in zip(drafted, lengths):
                request.draft = request.draft.cut(length)
            self._num_drafts = sum(lengths)
            self._stats.num_zero_choices += not self._num_drafts
            self._stats.num_withheld_tokens += num_offered - self._num_drafts
        self._stats.num_rows = self._num_drafts
        self._stats.mean_length += PLAIN_RATE * (self._num_drafts / count - self._stats.mean_length)

    def draft_quotas(self, plan: StepPlan, ready: Sequence[Request]) -> list[DraftQuota]:
        """Account for the step; unless drafting is paused, let the `ready` requests have as many drafts as fit."""
        now_s = self._asked_s = self._clock()
        if self._num_decoding:
            self._account(len(plan.requests) > self._num_decoding, now_s - self._began_s)
        self._propose_s, self._num_passes = 0.0, 0
        if not ready:
            return []
        bucket = self._bucket(len(ready))
        self._is_drafting = not bucket.pause_left
        self._note_pause(bool(bucket.pause_left) and not bucket.is_timing)
        if self._is_drafting:
            if self._passes:
                self._choose_passes(self._passes, len(ready), ready[0].max_drafts)
            return [DraftQuota(r.draft_room, self._num_passes, self._min_match_len) for r in ready]
        if self._match_source is None or bucket.is_timing:
            return []
        return [DraftQuota(request.draft_room, 0, MAX_DEPTH) for request in ready]

    def on_drafts_proposed(self, requests: Sequence[Request]) -> None:
        """Take the time of proposing, and remember the drafts before they are trimmed."""
        self._proposed += [(r, r.draft, r.num_tokens) for r in requests if r.draft is not NO_DRAFT]
        self._propose_s = self._clock() - self._asked_s
        if self._passes and self._num_passes:
            catch_up_s = self._propose_s - OUTLIER * self._passes.seconds(len(requests), self._num_passes)
            if catch_up_s > 0.0:
                self._propose_s -= catch_up_s
                self._deferred_s += catch_up_s

    def finish_request(self, request: Request) -> None:
        """Drop a request; what its drafts have taught about their source stays."""
        self._acceptance.finish_request(request.key)

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that nothing is kept of other requests."""
        assert self._acceptance.keys() <= {request.key for request in requests}

    def stats(self) -> DraftLengthStats:
        """Return counters and the current state."""
        paused_s = 0.0 if self._paused_since is None else time.monotonic() - self._paused_since
        return replace(self._stats, is_paused=self._paused_since is not None, paused_s=paused_s)

    def _account(self, is_mixed: bool, step_s: float) -> None:
        """Compare a step with one without drafts; `is_mixed` says that it computed prefill rows, too."""
        count, num_drafts = self._num_decoding, self._num_drafts
        bucket, num_accepted = self._bucket(count), self._learn_acceptance()
        predicted_s = self._times.rows_s(count) + self._contexts_s
        if num_drafts or self._is_drafting:
            extra_s = 0.0
            if num_drafts:
                extra_s = bucket.slowdown * (self._times.rows_s(count + num_drafts) - self._times.rows_s(count))
            plain_s = bucket.slowdown * predicted_s
            if num_drafts and not is_mixed:
                extra_s = min(step_s, OUTLIER * (plain_s + extra_s)) - plain_s
            spread_s = self._deferred_s / CATCH_UP_STEPS
            self._deferred_s -= spread_s
            gain = num_accepted / count - (extra_s + self._propose_s + spread_s) / plain_s
            was_paused = bucket.pause_left
            bucket.record_gain(gain, self._deferred_s / plain_s)
            if bucket.pause_left and not was_paused and not bucket.is_timing:
                self._deferred_s = 0.0
        if not num_drafts and not is_mixed and self._is_plain:  # the first one after drafts finds other cache contents
            bucket.time_plain_step(step_s, predicted_s)
        self._is_plain = not num_drafts
        if bucket.pause_left and not self._is_drafting and bucket.advance_pause():
            self._acceptance.reset()

    def _learn_acceptance(self) -> int:
        """Compare the last proposals with what was emitted; return the number of accepted drafts."""
        if not self._proposed:
            return 0
        outcomes = [(r.key, draft, r.tokens_since(num_tokens)) for r, draft, num_tokens in self._proposed]
        self._acceptance.update(outcomes)
        for request, _, _ in self._proposed:
            if request.status is RequestStatus.FINISHED:
                self._acceptance.finish_request(request.key)
        self._proposed.clear()
        return sum([max(0, len(emitted) - 1) for _, _, emitted in outcomes])

    def _choose_passes(self, passes: DraftPasses, count: int, max_drafts: int) -> None:
        """Choose the number of draft passes, and the shortest match that is expected to be worth more than them."""
        expected = self._acceptance.expected_accepted(passes.source, passes.max_passes)
        times = self._times.with_drafts(count, self._contexts_s, count * passes.max_passes, 0)
        rates = [
            (1.0 + accepted) / (times[count * num] + passes.seconds(count, num))
            for num, accepted in enumerate(expected, 1)
        ]
        self._num_passes = 1 + rates.index(max(rates))
        if self._match_source is not None:
            worth, length = expected[self._num_passes - 1], self._min_match_len

            def is_better(match_len: int) -> bool:
                return self._acceptance.expected_accepted(self._match_source, max_drafts, match_len)[-1] > worth

            if length > 1 and is_better(length - 1):
                self._min_match_len -= 1
            elif length <= MAX_DEPTH and not is_better(length):
                self._min_match_len += 1

    def _note_pause(self, is_paused: bool) -> None:
        if is_paused != (self._paused_since is not None):
            self._paused_since = time.monotonic() if is_paused else None

    def _bucket(self, count: int) -> _Bucket:
        """Return the bucket of a batch size; a new one starts with what is known of the nearest size."""
        size = count.bit_length()
        bucket = self._buckets.get(size)
        if bucket is None:
            nearest = min(self._buckets, key=lambda other: abs(other - size), default=None)
            bucket = self._buckets[size] = _Bucket(None if nearest is None else self._buckets[nearest])
        return bucket
