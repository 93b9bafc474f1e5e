# SPDX-License-Identifier: Apache-2.0
"""Shows a test's failure when it happens, so that the output of a run that is cut off says what failed."""

from __future__ import annotations

import pytest

MAX_LENGTH = 300  # characters of an error's message


class FailureLines:
    """A plugin that writes one line for each failure: the test, and the first line of the error's message."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        """Write to a terminal reporter."""
        self._reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line behind the letter that the reporter has written."""
        if report.failed:
            self._reporter.write_line(f"\nfailed: {report.nodeid} ({report.when}): {error_line(report)}")
            self._reporter.flush()


def error_line(report: pytest.TestReport) -> str:
    """Return the first line of the message of a failure's exception, or the last line of what describes it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = crash.message.strip().splitlines()[:1] if crash else report.longreprtext.strip().splitlines()[-1:]
    return lines[0][:MAX_LENGTH] if lines else ""
