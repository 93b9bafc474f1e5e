# SPDX-License-Identifier: Apache-2.0
"""The measurement of distinct experts runs from end to end."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_distinct_experts


def test_each_number_of_requests_and_rows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_experts: str
) -> None:
    flags = ["--dummy", "--requests", "1", "2", "--rows", "1", "3", "--max-tokens", "12"]
    monkeypatch.setattr(sys, "argv", ["bench_distinct_experts", tiny_experts, *flags])
    bench_distinct_experts.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(row["requests"], row["rows_each"]) for row in rows] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert rows[0]["experts"] == 2 and rows[0]["of_one_row"] == rows[0]["independent"] == 1
    assert 0 < rows[1]["exponent"] < 2
    assert rows[1]["independent"] == pytest.approx(4 * (1 - 0.75**3))
    for row in rows[1:]:
        assert 2 < row["experts"] <= min(8, 2 * row["requests"] * row["rows_each"])
        assert row["exponent"] is None or 0 < row["exponent"] < 2


def test_dense_models_are_refused(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_distinct_experts", tiny, "--dummy"])
    with pytest.raises(SystemExit, match="expected a model with experts"):
        bench_distinct_experts.main()
