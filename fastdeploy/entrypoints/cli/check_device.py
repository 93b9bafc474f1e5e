# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy check-device`: whether a device computes what its kernels say, and how fast."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdeploy.config.env import EMULATED_VARIABLE
from fastdeploy.core.errors import device_errors
from fastdeploy.entrypoints.cli.parser import CommandParser

if TYPE_CHECKING:
    from fastdeploy.ops.device_check.findings import Finding

DESCRIPTION = (
    "Compare every operator of a device with its reference, calls of many rows with calls of one, and results with "
    "those of other devices. The exit status is 1 if something differs."
)


def main(arguments: list[str]) -> int:
    """Print a table, what was wrong, and one JSON line."""
    parser = CommandParser("check-device", DESCRIPTION)
    parser.add_argument("--device", default="gpu", help="the device, such as gpu:1")
    parser.add_argument(
        "--emulated", action="store_true", help="execute the GPU's kernels on the CPU; needs a checkout"
    )
    parser.add_argument("--short", action="store_true", help="a part of the examples and row counts, in a few seconds")
    parser.add_argument("--operators", nargs="+", default=[], help="operators to check; by default all with kernels")
    parser.add_argument("--bench", action="store_true", help="also measure times, beside copies and products")
    parser.add_argument("--report", type=Path, help="file that gets one JSON line per finding as soon as it is known")
    args = parser.parse_own(arguments)
    if args.emulated:
        os.environ[EMULATED_VARIABLE] = "1"
    with device_errors():
        return check(args.device, args.operators, args.short, args.bench, args.report)


def check(device: str, operators: list[str], is_short: bool, is_timed: bool, report: Path | None) -> int:
    """Check a device and print what was found; return 1 if an operator has failed."""
    from fastdeploy.ops.startup import prepare

    prepare(device)
    from fastdeploy.ops.device_check.report import describe_device
    from fastdeploy.ops.device_check.runner import run_checks

    findings = list(run_checks(device, operators, is_short, report))
    print(format_table(findings))
    failed = {finding.operator: f"{finding.check}: {finding.error}" for finding in findings if finding.error}
    print("".join(f"{name}: {error}\n" for name, error in failed.items()), end="")
    summary: dict[str, Any] = {
        **describe_device(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_short": is_short,
        "passed": not failed,
        "operators": sorted({finding.operator for finding in findings}),
        "failed": failed,
    }
    if is_timed:
        from fastdeploy.ops.device_check.bench import format_times, measure

        summary["times"] = measure()
        print(format_times(summary["times"]))
    print(json.dumps(summary))
    return 1 if failed else 0


def format_table(findings: Iterable[Finding]) -> str:
    """Return a line per operator: the number of cases of each check, or that it has failed."""
    from fastdeploy.ops.device_check.findings import CHECKS

    cells: dict[str, dict[str, str]] = {}
    for finding in findings:
        cells.setdefault(finding.operator, {})[finding.check] = "FAILED" if finding.error else str(finding.num_cases)
    lines = [f"{'operator':22}" + "".join(f"{check:>18}" for check in CHECKS)]
    for name, row in cells.items():
        lines.append(f"{name:22}" + "".join(f"{row.get(check, '-'):>18}" for check in CHECKS))
    return "\n".join(lines)
