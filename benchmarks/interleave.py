# SPDX-License-Identifier: Apache-2.0
"""How are engines compared on a machine whose speed changes? They decode the same answers in alternation, in stretches.

The speed of a shared machine changes by a third within seconds. Every engine decodes the same answers in stretches of
equal tokens; in each stretch all engines run once, in random order. A change of the machine therefore affects all of
them alike. A step may emit tokens beyond the end of a stretch: these count, as their time does, and the engine's next
stretch is shorter.

Requests of a batch are timed up to the stretch in which the first of them ends before the others. The rest would decode
in smaller and smaller batches, which a server fills with its next requests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.replay import DraftRecord, replay_answers, replay_drafts
from benchmarks.workloads import Turn
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.worker.model_runner import ModelRunner

FIRST_STRETCH = 4  # steps of the baseline, before the time of its steps is known

_ids = count()


@dataclass
class Timings:
    """Seconds and counts of decoding.

    Attributes:
        total_s, draft_s, model_s, verify_s: of whole steps, the proposer, the model, and the model's buffers.
        num_tokens: emitted in the timed stretches.
        num_emitted, num_request_steps, num_drafts: sums over the requests of all decoding steps.
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

    def add(self, other: Timings) -> None:
        """Add those of another stretch."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second."""
        return self.num_tokens / self.total_s


class TimedEngine:
    """An engine with the times of its proposer and its runner; it may replay answers.

    Attributes:
        texts: request id -> tokens emitted so far.
        is_uneven: some answers have ended and others have not.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float], replay: bool, record: DraftRecord | None = None
    ) -> None:
        self.engine, self.clock = engine, clock
        self.texts: dict[str, list[int]] = {}
        self.is_uneven = False
        self.answers: dict[str, list[int]] | None = None
        self._timings = Timings()  # of the current stretch
        if replay:
            self.answers = {}
            replay_answers(engine, self.answers)
        self.record, self.drafts = record, dict[str, list[list[int]]]()
        if record is not None:
            replay_drafts(engine, self.drafts)
        for part, name, key in ((engine.proposer, "propose", "draft_s"), (engine.runner, "run", "verify_s")):
            setattr(part, name, self._timed(getattr(part, name), key))
        assert isinstance(engine.runner, ModelRunner)
        for graph in (engine.runner._forward, engine.runner._sample_and_verify):
            run: Any = self._timed(graph.run, "model_s", "verify_s")
            graph.run = run  # type: ignore[method-assign]

    def _timed(self, function: Callable[..., Any], key: str, outer: str | None = None) -> Callable[..., Any]:
        """Return `function` with its time added to `key` and taken from `outer`, which contains it."""

        def call(*arguments: Any) -> Any:
            begin = self.clock()
            result = function(*arguments)
            seconds, timings = self.clock() - begin, self._timings
            setattr(timings, key, getattr(timings, key) + seconds)
            if outer is not None:
                setattr(timings, outer, getattr(timings, outer) - seconds)
            return result

        return call

    def prefill(self, turns: Sequence[Turn], params: SamplingParams, salt: str) -> None:
        """Add the prompts as one batch and emit the first token of each answer."""
        self._cache_prompts(turns, salt)
        self.texts, self.is_uneven = {}, False
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

    def decode(self, num_tokens: int) -> Timings:
        """Decode until the answers have `num_tokens` tokens in total or have ended; return the stretch's timings."""
        missing, before = num_tokens - sum(map(len, self.texts.values())), self.engine.stats()
        timings = self._timings = Timings()
        begin = self.clock()
        while timings.num_tokens < missing and self.engine.has_unfinished():
            timings.num_tokens += self._step()
            timings.num_steps += 1
        timings.total_s = self.clock() - begin
        after = self.engine.stats()
        timings.num_emitted = after.num_emitted_tokens - before.num_emitted_tokens
        timings.num_request_steps = after.num_steps - before.num_steps
        timings.num_drafts = after.num_draft_tokens - before.num_draft_tokens
        return timings

    def _cache_prompts(self, turns: Sequence[Turn], salt: str) -> None:
        """Leave the prompts in the prefix cache, so that one step prefills all of them and none decodes before."""
        params = SamplingParams(temperature=0.0, max_tokens=1)
        for turn in turns:
            self.engine.add_request(GenerationRequest(f"cache-{next(_ids)}", turn.prompt, params, cache_salt=salt))
        while self.engine.has_unfinished():
            self.engine.step()

    def _step(self) -> int:
        deltas = self.engine.step()
        for delta in deltas:
            self.texts[delta.request_id] += delta.token_ids
        num_ended = sum(delta.finish_reason is not None for delta in deltas)
        self.is_uneven = self.is_uneven or 0 < num_ended < len(self.texts)
        return sum(len(delta.token_ids) for delta in deltas)


@dataclass
class Contender:
    """A method, its engine, and its timings in total and per stretch."""

    name: str
    timed: TimedEngine
    total: Timings = field(default_factory=Timings)
    stretches: list[Timings] = field(default_factory=list)

    def add(self, stretch: Timings) -> None:
        """Count a stretch."""
        self.total.add(stretch)
        self.stretches.append(stretch)

    def deviations(self) -> list[float]:
        """Return, per stretch, its share of all tokens minus its share of the total time."""
        total = self.total
        return [each.num_tokens / total.num_tokens - each.total_s / total.total_s for each in self.stretches]


class Comparison:
    """Lets contenders answer the same prompts in alternation."""

    def __init__(self, contenders: Sequence[Contender], params: SamplingParams, stretch_s: float) -> None:
        """Use stretches of whole steps that take the first contender, the baseline, about `stretch_s` seconds."""
        self.contenders = contenders
        self._params, self._stretch_s = params, stretch_s
        self._random = random.Random(0)

    def run(self, turns: Sequence[Turn], salt: str) -> None:
        """Let every contender answer the prompts as one batch.

        Raises:
            AssertionError: two contenders emitted different texts.
        """
        for contender in self.contenders:
            contender.timed.prefill(turns, self._params, salt)
        end, is_timed = len(turns), True  # the first tokens
        while any(contender.timed.engine.has_unfinished() for contender in self.contenders):
            end += len(turns) * self._steps_per_stretch()
            in_random_order = self._random.sample(self.contenders, len(self.contenders))
            stretches = [(contender, contender.timed.decode(end)) for contender in in_random_order]
            is_timed = is_timed and not any(contender.timed.is_uneven for contender in self.contenders)
            if is_timed:
                for contender, stretch in stretches:
                    contender.add(stretch)
        expected = list(self.contenders[0].timed.texts.values())
        for contender in self.contenders:
            assert list(contender.timed.texts.values()) == expected, f"{contender.name} changed a text"

    def _steps_per_stretch(self) -> int:
        total = self.contenders[0].total
        return max(1, round(self._stretch_s * total.num_steps / total.total_s)) if total.num_steps else FIRST_STRETCH


def speed_up(base: Contender, contender: Contender) -> tuple[float, float]:
    """Return tokens per second over those of `base`, and the standard error of that ratio over the stretches.

    It is the error of a ratio of sums. If drafts pay off it also contains the differences between passages of text.
    """
    ratio = contender.total.tokens_per_s / base.total.tokens_per_s
    errors = [own - other for own, other in zip(contender.deviations(), base.deviations())]
    scatter = math.sqrt(sum(error**2 for error in errors) * len(errors) / max(1, len(errors) - 1))
    return ratio, ratio * scatter
