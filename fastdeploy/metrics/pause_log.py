# SPDX-License-Identifier: Apache-2.0
"""Log lines about pauses of drafting."""

from __future__ import annotations

import logging
import time

from fastdeploy.core.stats import DraftLengthStats

INTERVAL_S = 10.0

logger = logging.getLogger("fastdeploy.spec_decode")


class PauseLog:
    """Logs every ten seconds how long drafting has been paused, and when it resumes; short pauses are not logged."""

    def __init__(self) -> None:
        self._logged_s: float | None = None  # of the last line about the current pause

    def update(self, stats: DraftLengthStats) -> None:
        """Take in the current state."""
        if stats.is_paused:
            now_s = time.monotonic()
            if stats.paused_s >= INTERVAL_S and (self._logged_s is None or now_s - self._logged_s >= INTERVAL_S):
                self._logged_s = now_s
                logger.info(
                    "drafting has been paused for %.0f s because drafts cost more time than they save", stats.paused_s
                )
        elif self._logged_s is not None:
            self._logged_s = None
            logger.info("drafting has resumed")
