# SPDX-License-Identifier: Apache-2.0
"""A mock engine in a process that logs statistics 200 times as often."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.metrics import stats_log
from tests import mock_engine

FACTORY = "tests.frequent_stats:make_engine"


def make_engine(
    config: EngineConfig, on_progress: Callable[[str, float], None] | None = None
) -> mock_engine.MockEngine:
    """Build a mock engine."""
    stats_log.INTERVAL_S = 0.05
    return mock_engine.make_engine(config, on_progress)
