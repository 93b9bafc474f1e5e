# SPDX-License-Identifier: Apache-2.0
"""Hand-overs with few blocks and few slots, delayed and aborted at every stage: texts stay right and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.handover import Handover
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.hub.model_path import resolve_model_path
from tests.engine.hand_over import Pair
from tests.exactness.disturbed import is_beginning
from tests.exactness.engines import METHODS, Texts, build, config, configured, proposer_of
from tests.exactness.requests import make_requests, run_alone

STAGES = ("computing", "handed over", "prepared", "continued")


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), build(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(config()), requests)


class DelayedThread:
    """In the place of a mover's thread: copies wait until they are told to run."""

    def __init__(self) -> None:
        self._tasks = deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call."""
        self._tasks.append((future := Future[Any](), function, args))
        return future

    def run(self, count: int) -> None:
        """Run the first calls."""
        for _ in range(min(count, len(self._tasks))):
            future, function, args = self._tasks.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(function(*args))


@dataclass
class FuzzedPair(Pair):
    """Two engines between which requests and copies are delayed, and requests aborted.

    Attributes:
        aborted: by request, the stage in which it was aborted.
        due: step in which a prepared request is added.
    """

    random: random.Random = field(default_factory=random.Random)
    aborted: dict[str, str] = field(default_factory=dict)
    due: dict[str, int] = field(default_factory=dict)
    num_steps: int = 0
    exports: DelayedThread = field(default_factory=DelayedThread)
    imports: DelayedThread = field(default_factory=DelayedThread)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.exporting._mover._thread = self.exports  # type: ignore[assignment]
        self.importing._mover._thread = self.imports  # type: ignore[assignment]

    def pass_on(self, handover: Handover) -> None:
        """Prepare a request, which is added a few steps later, before or after its blocks have arrived."""
        if self.random.random() < 0.1:
            self.aborted[handover.request_id] = "handed over"
            self.release(handover.request_id)
            return
        ticket = self.ticket_for(handover)
        self.second.prepare(ticket)
        self.due[ticket.request_id] = self.num_steps + self.random.choice([0, 0, 1, 5, 20])
        self.waiting.append(ticket)

    def step(self) -> None:
        """Abort what is drawn, then step both engines."""
        self.num_steps += 1
        if self.random.random() < 0.08:
            self.abort(self.random.choice([*self.requests]))
        self.exports.run(self.random.choice([0, 1, 100]))
        self.imports.run(self.random.choice([0, 1, 100]))
        super().step()

    def is_due(self, ticket: GenerationRequest) -> bool:
        """Return whether a prepared request is added now; if so, its copies end first."""
        is_due = self.due[ticket.request_id] <= self.num_steps
        self.imports.run(100 if is_due else 0)
        return is_due

    def abort(self, request_id: str) -> None:
        """End a request wherever it is."""
        if any(ticket.request_id == request_id for ticket in self.waiting):
            self.waiting = [ticket for ticket in self.waiting if ticket.request_id != request_id]
            self.second.cancel(request_id)
            self.aborted[request_id] = "prepared"
            self.release(request_id)
        for engine, stage in ((self.first, "computing"), (self.second, "continued")):
            if deltas := engine.abort(request_id):
                self.collect(deltas)
                self.aborted[request_id] = stage


def fuzz(requests: list[GenerationRequest], plain: Texts, seed: int) -> tuple[Counter[str], FuzzedPair]:
    """Run one schedule; return how many requests were aborted in each stage."""
    draw = random.Random(seed)

    def engine() -> Engine:
        method, caches_prefixes = draw.choice([*METHODS, "naive"]), draw.random() < 0.5
        num_drafts = 3 if method != "naive" else 0
        cfg = config(configured(method), num_drafts, draw.choice([7, 64]), draw.choice([12, 16, 40]), caches_prefixes)
        return build(with_sequences(cfg, draw.choice([3, 16])), proposer_of(method, plain, 3))

    pair = FuzzedPair(engine(), engine(), num_slots=draw.choice([6, 24, 60]), random=draw)
    left = draw.sample(requests, len(requests))
    while left or pair.is_busy():
        for _ in range(draw.choice([0, 0, 1, 4])):
            if left:
                pair.add(left.pop(), hands_over=draw.random() < 0.8)
        if draw.random() < 0.15:
            pair.first.hand_over(draw.choice([*pair.requests] or [""]))
        if pair.requests:
            pair.step()
    texts = pair.texts()
    for request in requests:
        for key in ((request.request_id, index) for index in range(request.params.n)):
            if request.request_id not in pair.aborted:
                assert texts[key] == plain[key]
            elif key in texts:
                assert is_beginning(texts[key], plain[key])
    assert sorted(pair.free_slots) == list(range(pair.num_slots))
    return Counter(pair.aborted.values()), pair


def with_sequences(cfg: EngineConfig, max_num_seqs: int) -> EngineConfig:
    return replace(cfg, scheduler=replace(cfg.scheduler, max_num_seqs=max_num_seqs))


def check(requests: list[GenerationRequest], plain: Texts, seeds: range) -> None:
    """Run schedules; assert that together they abort in every stage, preempt, and lack slots and blocks."""
    aborted, events = Counter[str](), Counter[str]()
    for seed in seeds:
        counts, pair = fuzz(requests, plain, seed)
        aborted += counts
        events["imported"] += pair.importing.num_imported_blocks
        events["preempted"] += sum(engine.stats().num_preemptions for engine in (pair.first, pair.second))
        events["no room"] += pair.importing.num_failed_blocks["no_room"]
        events["no image"] += sum(handover.image is None for handover in pair.handovers)
    assert all(aborted[stage] for stage in STAGES), aborted
    assert all(events[name] for name in ("imported", "preempted", "no room", "no image")), events


def test_nothing_leaks_and_no_text_changes(requests: list[GenerationRequest], plain: Texts) -> None:
    check(requests, plain, range(10, 20))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_nothing_leaks_and_no_text_changes_in_many_schedules(requests: list[GenerationRequest], plain: Texts) -> None:
    check(requests, plain, range(20, 620))
