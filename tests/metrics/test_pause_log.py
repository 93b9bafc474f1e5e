# SPDX-License-Identifier: Apache-2.0
"""Log lines about pauses of drafting."""

import logging

import pytest

from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.metrics.pause_log import PauseLog


def lines_of(states: list[DraftLengthStats], caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return in which steps drafting pauses by the lines that are logged for states in a row."""
    log = PauseLog()
    with caplog.at_level(logging.INFO, logger="fastdeploy.spec_decode"):
        for state in states:
            log.update(state)
    return [record.getMessage().partition(",")[0] for record in caplog.records]


def paused(num_requests: int, paused_s: float) -> DraftLengthStats:
    return DraftLengthStats(is_paused=True, num_requests=num_requests, paused_s=paused_s)


def test_pauses_are_logged_once_per_range_of_batch_sizes(caplog: pytest.LogCaptureFixture) -> None:
    states = [paused(1, 12.0), paused(1, 60.0), DraftLengthStats(num_requests=1), paused(1, 15.0)]
    states += [paused(size, 20.0) for size in (2, 3, 4, 7, 6, 2, 1, 8)]
    assert lines_of(states, caplog) == [
        "drafting pauses in steps of 1 request",
        "drafting pauses in steps of 2 to 3 requests",
        "drafting pauses in steps of 4 to 7 requests",
        "drafting pauses in steps of 8 to 15 requests",
    ]


def test_short_pauses_and_steps_without_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    states = [paused(1, 1.0), DraftLengthStats(num_requests=1), paused(1, 9.5), DraftLengthStats(paused_s=20.0)]
    states += [paused(0, 20.0)]
    assert lines_of(states, caplog) == []
