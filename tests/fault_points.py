# SPDX-License-Identifier: Apache-2.0
"""Arms fault points in the process of the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastdeploy.core.faults import POINTS, Fault, arm

BATCH_POINTS = ("propose", "observe", "run")
CLUSTER_POINTS = tuple(point for point in POINTS if point.startswith(("agent_", "owner_")))
API_POINTS = ("parse", "tokenise", "build", "detokenise")


@contextmanager
def armed(point: str, request_id: str = "", num_skipped: int = 0) -> Iterator[Fault]:
    """Arm one fault, and disarm it at the end."""
    fault = Fault(point, "raise", request_id, num_skipped)
    arm([fault])
    try:
        yield fault
    finally:
        arm(())
