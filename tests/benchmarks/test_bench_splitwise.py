# SPDX-License-Identifier: Apache-2.0
"""The benchmark of separated prefill and decode runs from end to end with a tiny model; no test asserts a time."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import bench_splitwise


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: str) -> Any:
    """Return a function that measures some parts in this process and returns their rows."""

    def run(*parts: str) -> dict[str, list[dict[str, Any]]]:
        monkeypatch.setenv("FD_NUM_THREADS", "1")
        flags = ["--shape", tiny, "--quantization", "none", "--smoke", "--parts", *parts]
        monkeypatch.setattr(sys, "argv", ["bench_splitwise", *flags])
        bench_splitwise.main()
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        by_part = {part: [row for row in found["results"] if row["part"] == part] for part in parts}
        assert sum(map(len, by_part.values())) == len(found["results"])
        return by_part

    return run


def test_copies_are_compared_with_memcpy_for_both_kinds_of_caches(results: Any) -> None:
    rows = results("copies")["copies"]
    assert [row["cache"] for row in rows] == ["auto", "int8"]
    wide, narrow = (row["mb"] for row in rows)
    assert wide == 192 * 2 * 2 * 2 * 16 * 2 / 1e6  # tokens, layers, keys and values, heads, their size, bytes
    assert narrow == 192 * 2 * 2 * 2 * (16 + 4) / 1e6
    for row in rows:
        assert row["export"] > 0 and row["import"] > 0 and row["python_share"] > 0


def test_a_pair_is_measured_beside_one_node(results: Any) -> None:
    [row] = results("latency")["latency"]
    assert row["ttft_ratio"] == pytest.approx(row["ttft_split_ms"] / row["ttft_mixed_ms"])
    assert row["second_token"] >= 0


@pytest.mark.nightly
def test_traffic_processor_time_and_prefix_hits_are_measured(results: Any) -> None:
    found = results("processor", "redis", "prefixes")
    [processor] = found["processor"]
    assert all(processor[f"{name}_us"] > 0 for name in ("engine", "api_local", "api", "agent", "redis"))
    assert [row["scheduler"] for row in found["redis"]] == ["global", "splitwise"]
    for row in found["redis"]:
        assert row["commands_per_request"] > 0 and row["bytes_per_token"] > 0
    [prefixes] = found["prefixes"]
    assert prefixes["hits_one"] == 8 * 128, "the second turn finds the two full blocks of the first one"
