# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy check-device` passes on the emulated GPU, and what fails on a device is known at the first start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.ops import registry
from fastdeploy.ops.device_check import examples, first_start, golden
from fastdeploy.ops.device_check.first_start import find_failures, with_family
from fastdeploy.ops.device_check.rows import find_difference
from scripts.make_golden_vectors import compute_digests


def test_the_emulated_gpu_passes_its_check(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", "check-device", "--emulated", "--short"]
    done = subprocess.run([*command, "--report", str(report)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["passed"] and summary["is_emulated"] and summary["failed"] == {}
    assert {"append_attention", "linear", "sample", "draft", "verify_draft_tokens"} <= set(summary["operators"])
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    begun = [line["begins"] for line in lines if "begins" in line]
    assert sorted(lines[0]["operators"]) == sorted(begun) == summary["operators"]


def test_golden_vectors_are_those_of_the_emulator() -> None:
    """Run `python -m scripts.make_golden_vectors` after a change on purpose."""
    assert golden.known_digests() == compute_digests()


def test_other_random_numbers_than_those_of_the_golden_vectors_mean_none(monkeypatch: pytest.MonkeyPatch) -> None:
    golden.known_digests.cache_clear()
    monkeypatch.setattr(golden, "inputs_digest", lambda: "other")
    assert golden.known_digests() == {}
    golden.known_digests.cache_clear()


def test_a_row_that_depends_on_its_neighbours_is_found() -> None:
    def call(first: int, rows: int) -> np.ndarray:
        values = np.arange(100.0)[first : first + rows, None]
        return values + (rows == 17)

    assert find_difference(call, (1, 2, 16, 33)) == ""
    assert find_difference(call, (1, 17, 33)) == "17 rows differ from the same rows among 33"


def test_a_result_that_differs_or_depends_on_old_memory_is_found() -> None:
    entry = registry.entries()["rms_norm"]
    example = next(e for e in entry.examples if "gpu" in registry.backends_of(e))
    reference = registry.lookup("reference")
    expected = examples.compute(example, reference)
    assert examples.compare("rms_norm", expected, expected) == ""
    changed = [(dtype, values + 1) for dtype, values in expected]
    assert "are allowed" in examples.compare("rms_norm", changed, expected)

    def reading_old_memory(x: paddle.Tensor, weight: paddle.Tensor, out: paddle.Tensor, rows: int, eps: float) -> None:
        old = out[:1].astype("float32")
        entry.reference(x, weight, out, rows, eps)
        out[:1] = (out[:1].astype("float32") + 0 * old).astype(out.dtype)

    assert examples.Poisoner(reference, "rms_norm").find_error(example, expected) == ""
    poisoner = examples.Poisoner(lambda name: reading_old_memory, "rms_norm")
    assert "depends on what its memory held" in poisoner.find_error(example, expected)


CRASHING = """
import json, os, sys
arguments = sys.argv[1:]
names = arguments[arguments.index("--operators") + 1:] if "--operators" in arguments else ["a", "linear", "b", "c"]
with open(arguments[arguments.index("--report") + 1], "a") as report:
    def write(line):
        report.write(json.dumps(line) + "\\n")
        report.flush()
    write({"operators": names})
    for name in names:
        write({"begins": name})
        if name == "linear":
            os.kill(os.getpid(), 9)
        write({"operator": name, "check": "reference", "num_cases": 1, "error": "wrong" if name == "c" else ""})
"""


def test_an_operator_that_ends_its_process_has_failed_and_the_others_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING)
    monkeypatch.setattr(first_start, "COMMAND", (str(script),))
    assert find_failures("gpu") == {"linear": "the process ended with status -9", "c": "wrong"}


def test_operators_that_share_a_layout_run_their_references_together() -> None:
    assert with_family(["rms_norm"]) == {"rms_norm"}
    assert with_family(["linear"]) == {"pack_linear", "first_outputs", "linear", "packed_embedding"}
    assert with_family({"append_attention": "wrong"}) == {"allocate_kv_cache", "append_attention"}


FIRST_START = """
from fastdeploy.ops.startup import prepare
prepare("gpu")
from fastdeploy.ops.backends.gpu_emulated.backend import EmulatedGpuBackend
from fastdeploy.ops.device_check import first_start
EmulatedGpuBackend.needs_check = True
checks = []
first_start.find_failures = lambda device: checks.append(device) or {"rms_norm": "wrong"}
print([sorted(first_start.failing_operators("gpu")) for _ in range(2)], checks)
"""


def test_the_result_of_the_first_start_is_kept(tmp_path: Path) -> None:
    environment = {**os.environ, "FD_GPU_EMULATED": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_START], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[['rms_norm'], ['rms_norm']] ['gpu']"
    [kept] = tmp_path.rglob("*.json")
    assert json.loads(kept.read_text())["failed"] == {"rms_norm": "wrong"}
