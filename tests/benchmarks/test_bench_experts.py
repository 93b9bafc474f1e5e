# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sparse layers runs from end to end on a small layer; no test asserts a time."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_experts

SIZES = ["--hidden", "128", "--width", "64", "--experts", "16", "--chosen", "2", "--shared", "32", "--layers", "2"]
SMALL = [*SIZES, "--rounds", "2", "--rows", "1", "5"]


@pytest.mark.parametrize("flags", [[], ["--together"]])
def test_every_format_and_number_of_rows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_readings: None, flags: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_experts", *SMALL, "--quantization", "none", "w4a8", *flags])
    bench_experts.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(r["format"], r["rows"]) for r in results] == [("none", 1), ("none", 5), ("w4a8", 1), ("w4a8", 5)]
    for row in results:
        assert row["router_us"] > 0 and row["over_floor"] > 0 and 0 < row["router_%"] < 100
        assert row["experts"] == 2 or (row["rows"] == 5 and not flags and 2 < row["experts"] <= 10)
