# SPDX-License-Identifier: Apache-2.0
"""The comparison of measured and predicted steps runs from end to end; no test asserts a time."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import bench_step_times


def results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    flags = ("--requests", "1", "3", "--rows", "1", "4", "--rounds", "3", *flags)
    monkeypatch.setattr(sys, "argv", ["bench_step_times", *flags])
    bench_step_times.main()
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["requests"], row["rows_each"]) for row in found] == [(1, 1), (1, 4), (3, 1), (3, 4)]
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in found)
    return found


def test_distinct_experts_are_compared_with_their_prediction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_experts: str
) -> None:
    apart = results(monkeypatch, capsys, "--shape", tiny_experts, "--layers", "3")
    assert apart[0]["experts"] == 3 * 2 and apart[0]["predicted_experts"] == pytest.approx(3 * 2)
    alike = results(monkeypatch, capsys, "--shape", tiny_experts, "--layers", "3", "--alike", "0.9")
    assert alike[1]["experts"] < apart[1]["experts"] and alike[2]["experts"] < apart[2]["experts"]


def test_dense_models_have_times_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: str
) -> None:
    assert "experts" not in results(monkeypatch, capsys, "--shape", tiny)[0]
