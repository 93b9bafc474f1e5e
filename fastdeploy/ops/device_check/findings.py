# SPDX-License-Identifier: Apache-2.0
"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

REFERENCE, GOLDEN, POISONED, ROWS = "reference", "golden vectors", "poisoned outputs", "rows alone"
CHECKS = (REFERENCE, GOLDEN, POISONED, ROWS)


@dataclass(frozen=True)
class Finding:
    """The result of one check of one operator.

    Attributes:
        operator: name in the registry.
        check: one of CHECKS.
        num_cases: how many were computed.
        error: what was wrong with the first case that was, in one line; empty if none was.
    """

    operator: str
    check: str
    num_cases: int
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def one_line(error: Exception) -> str:
    """Return an exception as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason is given'}"
