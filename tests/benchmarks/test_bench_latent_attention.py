# SPDX-License-Identifier: Apache-2.0
"""The benchmark of latent attention runs from end to end, and counts each cached row once; no test asserts a time."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_latent_attention
from benchmarks.launches import LaunchWork
from fastdeploy.ops.latent_attention import LatentLayout

SIZES = ["--latent-dim", "64", "--rope-dim", "16", "--nope-dim", "16"]


@pytest.mark.parametrize("flags", [[], ["--apart"]])
def test_every_number_of_heads_positions_and_rows_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_readings: None, flags: list[str]
) -> None:
    shapes = ["--heads", "4", "20", "--positions", "40", "--rows", "1", "3", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_latent_attention", *SIZES, *shapes, *flags])
    bench_latent_attention.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [(r["heads"], r["positions"], r["rows"]) for r in results] == [
        (heads, 40, rows) for heads in (4, 20) for rows in (1, 3)
    ]
    assert all(row["us"] > 0 and row["of_floor"] > 0 and 0 < row["bytes_%"] <= 100 for row in results)


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4)])
def test_the_work_reads_each_row_once_and_multiplies_its_latent_part_twice(dtype: str, item: int) -> None:
    layout = LatentLayout(4, 64, 16, 16)
    capture = bench_latent_attention.capture
    (drafts, kept), (apart, also_kept) = (capture(layout, 3, 40, is_apart, dtype) for is_apart in (False, True))
    per_pair = 2.0 * 4 * (64 + 16 + 64)
    assert drafts.count_work() == [LaunchWork(40.0 * 80 * item, per_pair * (38 + 39 + 40), 0.0)]
    assert apart.count_work() == [LaunchWork(3 * 40.0 * 80 * item, per_pair * 3 * 40, 0.0)]
    del kept, also_kept  # a graph holds addresses only
