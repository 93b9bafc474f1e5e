# SPDX-License-Identifier: Apache-2.0
"""Threads that serve their clients in turn."""

from __future__ import annotations

import random
import threading
from concurrent.futures import CancelledError, Future

import pytest

from fastdeploy.core.errors import QueueFullError
from fastdeploy.core.fair_executor import FairExecutor


class Recorder:
    """Functions that block until they are allowed to end, and the order in which they began."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun: list[str] = []

    def blocking(self, name: str) -> str:
        self.begun.append(name)
        assert self.gate.wait(60)
        return name


def wait_begun(recorder: Recorder, count: int) -> None:
    for _ in range(60_000):
        if len(recorder.begun) == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"expected {count} functions to begin, got {recorder.begun}")


def test_one_client_occupies_one_thread_and_others_find_a_free_one() -> None:
    executor, recorder = FairExecutor(2, 10, "test"), Recorder()
    futures = [executor.submit("greedy", 1.0, recorder.blocking, f"greedy{i}") for i in range(5)]
    wait_begun(recorder, 1)
    futures.append(executor.submit("polite", 1.0, recorder.blocking, "polite"))
    wait_begun(recorder, 2)
    assert recorder.begun == ["greedy0", "polite"]
    recorder.gate.set()
    assert [future.result(60) for future in futures] == [*(f"greedy{i}" for i in range(5)), "polite"]


def test_waiting_clients_are_served_in_turn_and_by_weight() -> None:
    executor, recorder = FairExecutor(1, 10, "test"), Recorder()
    futures = [executor.submit("other", 1.0, recorder.blocking, "other")]
    wait_begun(recorder, 1)
    futures += [executor.submit("a", 1.0, recorder.blocking, f"a{i}") for i in range(3)]
    futures += [executor.submit("b", 1.0, recorder.blocking, f"b{i}") for i in range(2)]
    futures += [executor.submit("c", 2.0, recorder.blocking, f"c{i}") for i in range(4)]
    recorder.gate.set()
    for future in futures:
        future.result(60)
    assert recorder.begun == ["other", "a0", "b0", "c0", "c1", "a1", "b1", "c2", "c3", "a2"]


def test_client_with_too_many_waiting_functions_is_refused_and_others_are_not() -> None:
    executor, recorder = FairExecutor(1, 2, "test"), Recorder()
    futures = [executor.submit("a", 1.0, recorder.blocking, f"a{i}") for i in range(3)]
    with pytest.raises(QueueFullError, match="2 large requests of this client are waiting"):
        executor.submit("a", 1.0, recorder.blocking, "a3")
    futures.append(executor.submit("b", 1.0, recorder.blocking, "b"))
    recorder.gate.set()
    assert [future.result(60) for future in futures] == ["a0", "a1", "a2", "b"]


def test_errors_reach_the_caller_and_cancelled_functions_do_not_run() -> None:
    executor, recorder = FairExecutor(1, 10, "test"), Recorder()
    first = executor.submit("a", 1.0, recorder.blocking, "a")
    failing = executor.submit("a", 1.0, int, "x")
    cancelled = executor.submit("a", 1.0, recorder.blocking, "never")
    last = executor.submit("a", 1.0, recorder.blocking, "last")
    assert cancelled.cancel()
    recorder.gate.set()
    assert (first.result(60), last.result(60)) == ("a", "last")
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(60)
    with pytest.raises(CancelledError):
        cancelled.result(60)
    assert recorder.begun == ["a", "last"]


def check_random_members(seed: int, count: int) -> None:
    """Submit random work of random clients and check that all of it runs, at most one function per client at once."""
    rng = random.Random(seed)
    executor, lock = FairExecutor(rng.randrange(1, 5), count, "test"), threading.Lock()
    running: set[str] = set()
    futures: list[Future[int]] = []

    def work(client: str, value: int) -> int:
        with lock:
            assert client not in running
            running.add(client)
        with lock:
            running.remove(client)
        return value

    for value in range(count):
        client = rng.choice("abcdef")
        futures.append(executor.submit(client, rng.choice([0.5, 1.0, 3.0]), work, client, value))
    assert [future.result(60) for future in futures] == list(range(count))


@pytest.mark.parametrize("seed", range(5))
def test_random_work_is_done_one_function_per_client_at_a_time(seed: int) -> None:
    check_random_members(seed, 300)
