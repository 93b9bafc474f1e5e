# SPDX-License-Identifier: Apache-2.0
"""Tests of logging and metrics leave the loggers as they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

LOGGERS = ("fastdeploy", "fastdeploy.request", "uvicorn")


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """Restore the loggers after each test."""
    kept = {name: logging.getLogger(name) for name in LOGGERS}
    states = {name: (list(logger.handlers), logger.level, logger.propagate) for name, logger in kept.items()}
    yield
    for name, logger in kept.items():
        logger.handlers[:], logger.level, logger.propagate = states[name]
