# SPDX-License-Identifier: Apache-2.0
"""Counts and log lines of refused requests."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry

from fastdeploy.metrics.refusals import REASONS, RefusalRecorder
from tests.virtual_time import run_in_virtual_time


def test_every_refusal_is_counted_and_five_per_second_and_reason_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()

    async def main() -> None:
        recorder = RefusalRecorder(registry)
        for number in range(128):
            recorder.record("auth", f"number {number}")
            await asyncio.sleep(0.001)
        recorder.record("invalid", "of another reason")
        await asyncio.sleep(1)
        recorder.record("auth", "in the next second")
        await asyncio.sleep(2)

    with caplog.at_level(logging.INFO, "fastdeploy.refusals"):
        run_in_virtual_time(main())
    assert caplog.messages == [
        *(f"refused (auth): number {number}" for number in range(5)),
        "refused (invalid): of another reason",
        "refused (auth): and 123 more",
        "refused (auth): in the next second",
    ]
    counts = {
        reason: registry.get_sample_value("fastdeploy:requests_rejected_total", {"reason": reason})
        for reason in REASONS
    }
    assert counts == {**dict.fromkeys(REASONS, 0), "auth": 129, "invalid": 1}
