# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: signals, limits, how failures are shown, the examples of property tests, quick tests."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from hypothesis import settings

from tests.failure_lines import FailureLines
from tests.quick import mark_quick
from tests.watchdog import Watchdog

settings.register_profile("same-examples", derandomize=True, deadline=None)  # no test asserts a time
settings.load_profile("same-examples")


LOCAL = ("127.0.0.1", "localhost", "::1")
for name in ("NO_PROXY", "no_proxy"):  # clients of tests talk to servers on this machine
    os.environ[name] = ",".join([*filter(None, [os.environ.get(name)]), *LOCAL])


@pytest.hookimpl(trylast=True)  # the terminal reporter is there
def pytest_configure(config: pytest.Config) -> None:
    """Let SIGINT interrupt, which shells let their background jobs ignore; watch tests; show failures at once."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert sys.__stderr__ is not None
    config.pluginmanager.register(Watchdog(os.dup(sys.__stderr__.fileno())))
    if (reporter := config.pluginmanager.get_plugin("terminalreporter")) is not None:  # not in a worker of xdist
        config.pluginmanager.register(FailureLines(reporter))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick tests, before pytest selects by marker."""
    mark_quick(items)
