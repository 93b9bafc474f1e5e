# SPDX-License-Identifier: Apache-2.0
"""Engines that take turns at the same work, a few steps at a time, so that neighbours in time are compared.

A shared machine's speed moves by a third within seconds. Every engine decodes the same answers in stretches of equal
tokens; in each stretch all of them have their turn, in random order, and an engine whose last step went beyond the
stretch waits. So a change of the machine meets all engines alike. What a step emits beyond the end of a stretch counts,
as its time does: engines whose steps emit more go beyond it more often.

Requests of a batch are timed up to the stretch in which one of them ends before the others: where drafts come true
unevenly the rest decode in ever smaller steps, which a server fills with its next requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.replay import LayerRecord, replay_answers, replay_layer
from benchmarks.workloads import Turn
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.worker.model_runner import ModelRunner

FIRST_STRETCH = 4  # steps of the first engine; how long they take is not known yet

_ids = count()


@dataclass
class Spent:
    """What decoding came to.

    Attributes:
        num_emitted, num_request_steps, num_drafts: of all decoding steps, counted for each request of a step.
    """

    total_s: float = 0.0
    draft_s: float = 0.0
    model_s: float = 0.0
    verify_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    num_emitted: int = 0
    num_request_steps: int = 0
    num_drafts: int = 0

    def add(self, other: Spent) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s


class Timed:
    """An engine that tells how long its proposer and its runner take, and may replay answers."""

    def __init__(
        self, engine: Engine, clock: Callable[[], float], replay: bool, record: LayerRecord | None = None
    ) -> None:
        self.engine, self.clock = engine, clock
        self.texts: dict[str, list[int]] = {}
        self.is_ragged = False  # some of the answers were over and others not
        self.answers: dict[str, list[int]] | None = None
        self._spent = Spent()  # of the stretch now
        if replay:
            self.answers = {}
            replay_answers(engine, self.answers)
        self.record, self.drafts = record, dict[str, list[list[int]]]()
        if record is not None:
            replay_layer(engine, self.drafts)
        for part, name, bucket in (
            (engine.proposer, "propose", "draft_s"),
            (engine.runner, "run", "verify_s"),
        ):
            setattr(part, name, self._timed(getattr(part, name), bucket))
        assert isinstance(engine.runner, ModelRunner)
        for graph in (engine.runner._forward, engine.runner._choose):
            run: Any = self._timed(graph.run, "model_s", "verify_s")
            graph.run = run  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], bucket: str, within: str | None = None) -> Callable[..., Any]:
        """Return the function, its time counted in one bucket and not in that of the function that it is part of."""

        def call(*arguments: Any) -> Any:
            begin = self.clock()
            result = function(*arguments)
            seconds, spent = self.clock() - begin, self._spent
            setattr(spent, bucket, getattr(spent, bucket) + seconds)
            if within is not None:
                setattr(spent, within, getattr(spent, within) - seconds)
            return result

        return call

    def begin(self, turns: Sequence[Turn], params: SamplingParams, salt: str) -> None:
        """Read the prompts of turns that run side by side, and emit each answer's first token."""
        self._read(turns, salt)
        self.texts, self.is_ragged = {}, False
        for turn in turns:
            request_id = f"bench-{next(_ids)}"
            self.texts[request_id] = []
            if self.answers is not None:
                self.answers[request_id] = turn.answer
            if self.record is not None:
                self.drafts[request_id] = self.record.drafts_of(turn.prompt, turn.answer)
            self.engine.add_request(GenerationRequest(request_id, turn.prompt, params, cache_salt=salt))
        while not all(self.texts.values()):
            self._step()

    def advance(self, num_tokens: int) -> Spent:
        """Decode until the answers have so many tokens together, or are over; return what that took."""
        missing, before = num_tokens - sum(map(len, self.texts.values())), self.engine.stats()
        spent = self._spent = Spent()
        begin = self.clock()
        while spent.num_tokens < missing and self.engine.has_unfinished():
            spent.num_tokens += self._step()
            spent.num_steps += 1
        spent.total_s = self.clock() - begin
        after = self.engine.stats()
        spent.num_emitted = after.num_emitted_tokens - before.num_emitted_tokens
        spent.num_request_steps = after.num_steps - before.num_steps
        spent.num_drafts = after.num_draft_tokens - before.num_draft_tokens
        return spent

    def _read(self, turns: Sequence[Turn], salt: str) -> None:
        """Leave the prompts in the cache, so that all begin in one step: none decodes while others are read."""
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for turn in turns:
            self.engine.add_request(GenerationRequest(f"read-{next(_ids)}", turn.prompt, params, cache_salt=salt))
        while self.engine.has_unfinished():
            self.engine.step()

    def _step(self) -> int:
        deltas = self.engine.step()
        for delta in deltas:
            self.texts[delta.request_id] += delta.token_ids
        num_over = sum(delta.finish_reason is not None for delta in deltas)
        self.is_ragged = self.is_ragged or 0 < num_over < len(self.texts)
        return sum(len(delta.token_ids) for delta in deltas)


@dataclass
class Lane:
    """One method and what it came to, stretch by stretch."""

    name: str
    timed: Timed
    spent: Spent = field(default_factory=Spent)
    stretches: list[Spent] = field(default_factory=list)

    def add(self, stretch: Spent) -> None:
        """Count a stretch."""
        self.spent.add(stretch)
        self.stretches.append(stretch)

    def surprises(self) -> list[float]:
        """Return, for each stretch, its share of all tokens less its share of all time."""
        spent = self.spent
        return [each.num_tokens / spent.num_tokens - each.total_s / spent.total_s for each in self.stretches]


class Turns:
    """Lets lanes take turns at the same prompts."""

    def __init__(self, lanes: Sequence[Lane], params: SamplingParams, stretch_s: float) -> None:
        """Make stretches that take the first lane about `stretch_s` seconds, whole steps of it."""
        self.lanes = lanes
        self._params, self._stretch_s = params, stretch_s
        self._dice = random.Random(0)

    def run(self, turns: Sequence[Turn], salt: str, is_timed: bool = True) -> None:
        """Let every lane answer the prompts side by side.

        Raises:
            AssertionError: lanes said different texts.
        """
        for lane in self.lanes:
            lane.timed.begin(turns, self._params, salt)
        end = len(turns)  # the first tokens
        while any(lane.timed.engine.has_unfinished() for lane in self.lanes):
            end += len(turns) * self._steps_per_stretch()
            stretches = [(lane, lane.timed.advance(end)) for lane in self._dice.sample(self.lanes, len(self.lanes))]
            is_timed = is_timed and not any(lane.timed.is_ragged for lane in self.lanes)
            if is_timed:
                for lane, stretch in stretches:
                    lane.add(stretch)
        for lane in self.lanes:
            texts = [list(lane.timed.texts.values()) for lane in (self.lanes[0], lane)]
            assert texts[0] == texts[1], f"{lane.name} changed a text"

    def _steps_per_stretch(self) -> int:
        spent = self.lanes[0].spent
        return max(1, round(self._stretch_s * spent.num_steps / spent.total_s)) if spent.num_steps else FIRST_STRETCH


def speed_up(base: Lane, lane: Lane) -> tuple[float, float]:
    """Return tokens per second over those of `base`, and the standard error of that ratio by its stretches.

    The error is that of a ratio of sums: what stretches differ by in other ways than the ratio itself. Where drafts
    pay it holds the difference between passages of text, too.
    """
    ratio = lane.spent.tokens_per_s / base.spent.tokens_per_s
    errors = [own - other for own, other in zip(lane.surprises(), base.surprises())]
    scatter = math.sqrt(sum(error**2 for error in errors) * len(errors) / max(1, len(errors) - 1))
    return ratio, ratio * scatter
