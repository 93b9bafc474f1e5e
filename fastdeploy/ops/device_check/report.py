# SPDX-License-Identifier: Apache-2.0
"""What a check leaves behind: which device it was, and a file with one JSON line per operator and finding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy.ops.registry import find_backend


def describe_device(device: str) -> dict[str, Any]:
    """Return the device's name, its library and whether it is emulated; its backend has been loaded."""
    backend = find_backend(device)
    return {"device": backend.identify(), "is_emulated": backend.is_emulated, **backend.describe()}


def write_line(report: Path | None, line: Mapping[str, Any]) -> None:
    """Append a JSON line, which is in the file even if the process ends next."""
    if report is not None:
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")
