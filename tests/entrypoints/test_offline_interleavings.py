# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of the calls of one `LLM`: each request's result is the one it has alone, the engine ends empty.

Two threads begin streams, read, close and forget them, and run complete calls beside them. Some steps and additions are
interrupted, by a signal or by an exception in their middle.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from fastdeploy import LLM, CompletionOutput, RequestOutput, SamplingParams
from fastdeploy.core.errors import RequestFailedError
from tests.entrypoints.small_llm import assert_empty, load_small_model, replaced

NUM_INTERLEAVINGS, NUM_NIGHTLY = 200, 1000
NUM_ACTIONS = 8  # of each thread
PROMPTS = ("abc", "abcabcabcabcabcabcabcabc", "hello there", [9, 8, 7, 6, 5], [*range(40, 70)])
PARAMS = (
    {"temperature": 0.0, "max_tokens": 12},
    {"max_tokens": 30, "ignore_eos": True},
    {"n": 2, "max_tokens": 9, "logprobs": 2},
    {"max_tokens": 1, "prompt_logprobs": 1},
    {"max_tokens": 20, "stop": ["a", "Z"], "ignore_eos": True},
    {"max_tokens": 0, "temperature": 0.0},
    {"max_tokens": 24, "repetition_penalty": 1.3, "speculative": {"method": "off"}},
    {"max_tokens": 10, "structured_outputs": {"regex": "[ab]{4,8}"}},
)
EXPECTED_ERRORS = (KeyboardInterrupt, RequestFailedError)


@dataclass(frozen=True)
class Job:
    """A request of the catalog, which always has the same result: of `generate`, or of `chat` if `is_chat`."""

    prompt: Any
    params: SamplingParams
    is_chat: bool


@dataclass
class World:
    """The model, its catalog of requests with the result of each alone, and how many faults are still to come."""

    llm: LLM
    jobs: list[Job]
    alone: list[RequestOutput] = field(default_factory=list)
    num_faults: int = 0


def call(llm: LLM, jobs: list[Job], stream: bool) -> Any:
    """Run requests of one kind in one call."""
    prompts, params = [job.prompt for job in jobs], [job.params for job in jobs]
    if jobs[0].is_chat:
        prompts = [[{"role": "user", "content": str(prompt)}] for prompt in prompts]
    return (llm.chat if jobs[0].is_chat else llm.generate)(prompts, params, use_tqdm=False, stream=stream)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    jobs = [
        Job(prompt, SamplingParams(**{"seed": seed, **values}), seed % 3 == 0)
        for seed, (prompt, values) in enumerate((prompt, values) for prompt in PROMPTS for values in PARAMS)
        if seed % 3 or isinstance(prompt, str)
    ]
    world = World(load_small_model(tmp_path_factory.mktemp("small")), jobs)
    world.alone = [call(world.llm, [job], False)[0] for job in jobs]
    return world


def choices_of(output: RequestOutput) -> list[CompletionOutput]:
    """Return the choices without what depends on other requests: how many drafts were verified in a step."""
    assert output.finished
    for choice in output.outputs:
        choice.speculate_metrics = None
    return output.outputs


def assert_as_alone(world: World, chosen: list[int], outputs: list[RequestOutput]) -> None:
    for index, output in zip(chosen, outputs, strict=True):
        alone = world.alone[index]
        assert output.prompt_token_ids == alone.prompt_token_ids
        assert choices_of(output) == choices_of(alone)
        if world.jobs[index].params.prompt_logprobs is not None:
            assert output.prompt_logprobs == alone.prompt_logprobs


class Reader:
    """A stream that is read little by little."""

    def __init__(self, world: World, chosen: list[int]) -> None:
        self._world, self._chosen = world, chosen
        self._latest: dict[str, RequestOutput] = {}  # in order of the first tokens, not of the prompts
        self.updates: Iterator[RequestOutput] = call(world.llm, [world.jobs[i] for i in chosen], True)

    def read(self, count: int) -> bool:
        """Take some updates; return whether the stream goes on. A stream that ends has the results of each alone."""
        for _ in range(count):
            output = next(self.updates, None)
            if output is None:
                outputs = sorted(self._latest.values(), key=lambda output: int(output.request_id.partition("-")[2]))
                assert_as_alone(self._world, self._chosen, outputs)
                return False
            self._latest[output.request_id] = output
        for output in self._latest.values():
            self._assert_begins_as_alone(output)
        return True

    def _assert_begins_as_alone(self, output: RequestOutput) -> None:
        candidates = [self._world.alone[i] for i in self._chosen]
        (alone,) = (one for one in candidates if one.prompt_token_ids == output.prompt_token_ids)
        for choice, expected in zip(output.outputs, alone.outputs):
            assert choice.token_ids == expected.token_ids[: len(choice.token_ids)]
            assert expected.text.startswith(choice.text)


class Player:
    """Acts at random, in one thread."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, random.Random(seed)
        self._readers: list[Reader] = []

    def play(self) -> None:
        actions = (self._open, self._open, self._read, self._read, self._complete, self._close, self._forget)
        for _ in range(NUM_ACTIONS):
            self._try(self._rng.choice(actions))
        while self._readers:
            self._try(partial(self._read, 1000))

    def _try(self, action: Callable[[], None]) -> None:
        """Act; an interrupt ends the streams that it reaches, of which nothing more is expected."""
        try:
            action()
        except EXPECTED_ERRORS:
            self._readers.clear()

    def _choose(self) -> list[int]:
        """Return one to three requests with different prompts, all of `generate` or all of `chat`."""
        first = self._rng.randrange(len(self._world.jobs))
        chosen, prompts = [first], [self._world.jobs[first].prompt]
        for index in self._rng.sample(range(len(self._world.jobs)), 2):
            job = self._world.jobs[index]
            if job.is_chat == self._world.jobs[first].is_chat and job.prompt not in prompts:
                chosen.append(index)
                prompts.append(job.prompt)
        return chosen

    def _open(self) -> None:
        self._readers.append(Reader(self._world, self._choose()))

    def _read(self, count: int = 0) -> None:
        if self._readers:
            reader = self._rng.choice(self._readers)
            if not reader.read(count or self._rng.randrange(1, 12)):
                self._readers.remove(reader)

    def _complete(self) -> None:
        chosen = self._choose()
        assert_as_alone(self._world, chosen, call(self._world.llm, [self._world.jobs[i] for i in chosen], False))

    def _close(self) -> None:
        if self._readers:
            self._readers.pop(self._rng.randrange(len(self._readers))).updates.close()  # type: ignore[attr-defined]

    def _forget(self) -> None:
        if self._readers:
            self._readers.pop(self._rng.randrange(len(self._readers)))


def with_faults(world: World, rng: random.Random, method: Callable[..., Any], may_raise: bool) -> Callable[..., Any]:
    """Return a method before or after which a signal sometimes comes, or an exception if it may."""

    def interrupt() -> None:
        if world.num_faults == 0 or rng.random() > 0.04:
            return
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and (not may_raise or rng.random() < 0.5):
            world.num_faults -= 1
            signal.raise_signal(signal.SIGINT)
        elif may_raise:
            world.num_faults -= 1
            raise KeyboardInterrupt

    def run(*arguments: Any) -> Any:
        interrupt()
        result = method(*arguments)
        interrupt()
        return result

    return run


def run_in_two_threads(world: World, seed: int) -> None:
    errors: list[BaseException] = []

    def play(player: Player) -> None:
        try:
            player.play()
        except BaseException as error:
            errors.append(error)

    first, second = Player(world, 2 * seed), Player(world, 2 * seed + 1)
    thread = threading.Thread(target=play, args=(second,))
    thread.start()
    try:
        play(first)
    finally:
        thread.join()
    if errors:
        raise errors[0]


def run_interleaving(world: World, seed: int) -> None:
    """Run one interleaving: in one thread or in two, with or without interrupts."""
    rng, engine = random.Random(seed), world.llm.engine
    world.num_faults = rng.choice((0, 0, 1, 3))
    places = [(engine, "step", True), (engine, "add_request", True), (engine.runner, "run", True)]
    places += [(engine, "abort", False), (engine.scheduler, "add", False), (engine.scheduler, "finish", False)]
    with ExitStack() as patches:
        for target, name, may_raise in places:
            faulty = with_faults(world, rng, getattr(target, name), may_raise)
            patches.enter_context(replaced(target, name, faulty))
        if seed % 2:
            Player(world, seed).play()
        else:
            run_in_two_threads(world, seed)
    assert_empty(world.llm)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_results_are_those_of_each_request_alone_and_the_engine_ends_empty(world: World) -> None:
    for seed in range(NUM_INTERLEAVINGS):
        run_interleaving(world, seed)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts while a stream is forgotten
def test_results_of_many_more_interleavings_are_those_of_each_request_alone(world: World) -> None:
    for seed in range(NUM_INTERLEAVINGS, NUM_INTERLEAVINGS + NUM_NIGHTLY):
        run_interleaving(world, seed)
