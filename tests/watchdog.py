# SPDX-License-Identifier: Apache-2.0
"""Ends the process of a test that goes on long after its limit, whatever it waits for.

pytest-timeout raises an exception in the main thread, once. That ends no wait in native code, no block that defers
signals, and no `with` block or fixture that waits for a thread or a process at its end.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Generator

import pytest

GRACE_S = 60.0  # after the limit of the test, for what pytest-timeout can end


class Watchdog:
    """A plugin that prints the stacks of all threads, then ends the process; xdist reports the test that it ran."""

    def __init__(self, stderr: int) -> None:
        """Print to a file descriptor, which stays open."""
        self._stderr = stderr

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch a test and its fixtures."""
        self._watch(item)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
        """Watch the end of a test that has failed, for which pytest and pytest-timeout cancel their timers."""
        if isinstance(node, pytest.Item):
            self._watch(node)

    def _watch(self, item: pytest.Item) -> None:
        if (limit_s := _limit_s(item)) > 0:
            faulthandler.dump_traceback_later(limit_s + GRACE_S, file=self._stderr, exit=True)


def _limit_s(item: pytest.Item) -> float:
    """Return the limit of pytest-timeout for a test; 0 is none, as in a debugger."""
    if item.config.getoption("usepdb"):
        return 0.0
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout")
    return float(marker.args[0] if marker else item.config.getini("timeout") if given is None else given)
