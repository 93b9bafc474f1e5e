# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host beside a GPU runs from end to end; no test asserts a time."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_host_beside_a_gpu_is_timed_for_each_method_and_number_of_requests() -> None:
    command = [sys.executable, "-m", "benchmarks.bench_gpu_host", "--requests", "1", "3", "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [(row["method"], row["requests"]) for row in results] == [
        *(("naive", 1), ("naive", 3), ("ngram", 1), ("ngram", 3)),
    ]
    assert all(row["host_us"] > 0 and row["launch_us"] > 0 for row in results)
