# SPDX-License-Identifier: Apache-2.0
"""The check of a device at the first start of an engine on it.

It runs in a process of its own, because a kernel that fails may take everything with it that the process has on the
device. The result is kept for the pair of library and device.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from fastdeploy.config.env import child_environment, read_env
from fastdeploy.ops.backend import Backend
from fastdeploy.ops.registry import find_backend

TOGETHER = (  # operators that share the layout of data: they run their references together
    frozenset({"pack_linear", "first_outputs", "linear", "packed_embedding"}),
    frozenset({"allocate_kv_cache", "append_attention"}),
)
COMMAND = ("-m", "fastdeploy.entrypoints.cli.main", "check-device", "--short")

logger = logging.getLogger("fastdeploy.engine")


def failing_operators(device: str) -> frozenset[str]:
    """Return the operators that must not run their kernels on a device; check it, if that has not been done before."""
    backend = find_backend(device)
    if not backend.needs_check:
        return frozenset()
    backend.load()
    file = result_file(backend)
    if not file.exists():
        logger.info("checking the operators on %s, once", backend.identify())
        failed = find_failures(device)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"device": backend.identify(), "failed": failed}) + "\n")
    names: dict[str, str] = json.loads(file.read_text())["failed"]
    for name, error in names.items():
        logger.warning("operator %s failed the check of %s: %s", name, backend.identify(), error)
    return with_family(names)


def result_file(backend: Backend) -> Path:
    """Return where the result for a pair of library and device is kept."""
    key = blake2b(f"{backend.describe()}\0{backend.identify()}".encode(), digest_size=8).hexdigest()
    return Path(read_env().cache_dir) / "device-checks" / f"{key}.json"


def with_family(names: Iterable[str]) -> frozenset[str]:
    """Return the names, and those of all operators that share the layout of data with one of them."""
    found = frozenset(names)
    return found.union(*(family for family in TOGETHER if family & found))


def find_failures(device: str) -> dict[str, str]:
    """Return operator -> what was wrong; an operator that ends its process has failed, and the others are checked."""
    failed: dict[str, str] = {}
    checked: set[str] = set()
    remaining: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        while True:
            report = Path(folder) / "report.jsonl"
            report.unlink(missing_ok=True)
            operators = ["--operators", *remaining] if remaining else []
            done = subprocess.run(
                [sys.executable, *COMMAND, "--device", device, "--report", str(report), *operators],
                env=child_environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
            planned: list[str] = next((line["operators"] for line in lines if "operators" in line), [])
            begun = [line["begins"] for line in lines if "begins" in line]
            failed |= {line["operator"]: line["error"] for line in lines if line.get("error")}
            checked.update(begun)
            if done.returncode in (0, 1) and len(begun) == len(planned) > 0:
                return failed
            if not begun:
                raise RuntimeError(f"check-device: {(done.stderr or done.stdout).strip()[-300:]}")
            failed[begun[-1]] = f"the process ended with status {done.returncode}"
            remaining = [name for name in planned if name not in checked]
            if not remaining:
                return failed
