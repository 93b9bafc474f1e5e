# SPDX-License-Identifier: Apache-2.0
"""Log lines about what requests ask for and do not get; each is written once per process."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger("fastdeploy.server")


@cache
def note_once(text: str) -> None:
    """Log a line unless this process has logged it already; it must not contain anything of a request."""
    logger.info("%s", text)
