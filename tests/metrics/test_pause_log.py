# SPDX-License-Identifier: Apache-2.0
"""Log lines about pauses of drafting."""

import logging

import pytest

from fastdeploy.core.stats import DraftLengthStats
from fastdeploy.metrics import pause_log
from fastdeploy.metrics.pause_log import PauseLog


def test_long_pause_is_logged_until_drafting_resumes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(pause_log.time, "monotonic", lambda: now_s)
    log = PauseLog()
    with caplog.at_level(logging.INFO, logger="fastdeploy.spec_decode"):
        for paused_s in (None, 1.0, None, 4.0, 9.5, 12.0, 15.0, 22.5, None, None):
            now_s += 3.0
            log.update(DraftLengthStats(is_paused=paused_s is not None, paused_s=paused_s or 0.0))
    assert [record.getMessage() for record in caplog.records] == [
        "drafting has been paused for 12 s because drafts cost more time than they save",
        "drafting has resumed",
    ]


def test_line_is_repeated_every_ten_seconds(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(pause_log.time, "monotonic", lambda: now_s)
    log = PauseLog()
    with caplog.at_level(logging.INFO, logger="fastdeploy.spec_decode"):
        for now_s in range(0, 40, 2):
            log.update(DraftLengthStats(is_paused=True, paused_s=float(now_s)))
    assert [record.args for record in caplog.records] == [(10.0,), (20.0,), (30.0,)]
