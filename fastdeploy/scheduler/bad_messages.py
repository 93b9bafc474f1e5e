# SPDX-License-Identifier: Apache-2.0
"""Takes note of what stands in Redis and cannot be decoded, whoever wrote it."""

from __future__ import annotations

import logging

from fastdeploy.scheduler.messages import BadMessageError

logger = logging.getLogger("fastdeploy.cluster")


class BadMessages:
    """Counts the values that were dropped; a line in the log tells of the first one in each stream.

    Attributes:
        num_dropped: values that could not be decoded.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._logged: set[str] = set()

    def note(self, stream: str, error: BadMessageError) -> None:
        """Count a value that was dropped."""
        self.num_dropped += 1
        if stream not in self._logged:
            self._logged.add(stream)
            logger.warning("An entry of %s cannot be decoded and is dropped, as are further ones: %s", stream, error)
