# SPDX-License-Identifier: Apache-2.0
"""Asks a child process which operators run on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

TIMEOUT_S = 300  # the emulator may have to be compiled


@cache
def describe_device(device: str) -> dict[str, Any]:
    """Return what fastdeploy.ops.report says of a device, or {"error": why it cannot be used}."""
    command = [sys.executable, "-m", "fastdeploy.ops.report", device]
    child = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = child.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": f"exit status {child.returncode}: {(child.stderr.strip().splitlines() or [''])[-1]}"}


def device_line(found: dict[str, Any]) -> str:
    """Return a description as one line."""
    if "error" in found:
        return f"not available: {found['error']}"
    native, references, missing = (found[f"{kind}_operators"] for kind in ("native", "reference", "missing"))
    line = f"{found['backend']} ({found['device_name']}), {found['isa']}, library {found['operator_library']}; "
    if references:
        total = len(native) + len(references)
        line += f"{len(native)} of {total} operators are native, not {', '.join(references)}"
    else:
        line += f"all {len(native)} operators are native"
    return f"{line}; there is no {', '.join(missing)}, which some models need" if missing else line
