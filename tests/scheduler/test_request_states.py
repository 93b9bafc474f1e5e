# SPDX-License-Identifier: Apache-2.0
"""Requests end right whatever dies: schedules of faults over the model of Redis, and planted mistakes.

A schedule is a number (`simulator.py`). To look at one that fails: `Simulation(seed).play()`.
"""

from __future__ import annotations

import pytest

from tests.scheduler.planted import PLANTED
from tests.scheduler.simulator import Simulation, Violation

NUM_SCHEDULES = 500
NUM_NIGHTLY = 10_000
NUM_TO_FIND = 500  # schedules in which a planted mistake must show


def find_violation(seeds: range) -> str | None:
    """Return what the first schedule that fails shows."""
    for seed in seeds:
        try:
            Simulation(seed).play()
        except Violation as violation:
            return f"schedule {seed}: {violation}"
    return None


def test_every_request_ends_right_and_nothing_is_left() -> None:
    assert find_violation(range(NUM_SCHEDULES)) is None


@pytest.mark.nightly
def test_every_request_ends_right_in_many_schedules() -> None:
    assert find_violation(range(NUM_SCHEDULES, NUM_SCHEDULES + NUM_NIGHTLY)) is None


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[mistake](monkeypatch)
    assert find_violation(range(NUM_TO_FIND)) is not None
