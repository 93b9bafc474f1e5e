# SPDX-License-Identifier: Apache-2.0
"""bench_file_quality scores the same tokens with every file of a folder and both kinds of inputs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_file_quality
from tests.gguf.gguf_files import gguf_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "text.txt").write_text("A short text for a tiny model.")
    flags = ["bench_file_quality", str(folder), "--texts", str(folder / "text.txt")]
    monkeypatch.setattr(sys, "argv", flags)
    bench_file_quality.main()


def test_each_file_is_scored_in_both_kinds_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in bench_file_quality.FORMATS:  # one model in all places: a file's type is that of its content
        shutil.copy(gguf_path("qwen2_q8_0"), tmp_path / f"model-{kind}.gguf")
    run(tmp_path, monkeypatch)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {row["format"]: row for row in found["results"]}
    assert list(rows) == [
        "float32",
        "bf16, none",
        "q8_0, gguf",
        "q8_0, w8a8",
        "q4_1, gguf",
        "q4_1, w4a8",
        "q4_0, gguf",
        "q4_0, w4a8",
    ]
    assert found["benchmark"] == "quality" and found["texts"] == ["text.txt"]
    assert rows["q8_0, gguf"]["weights_mib"] < rows["bf16, none"]["weights_mib"] < rows["float32"]["weights_mib"]
    assert rows["q8_0, gguf"]["kl"] < rows["q8_0, w8a8"]["kl"] < 0.1, "8-bit inputs cost more than 16-bit ones"
    assert np.isfinite([row["perplexity"] for row in rows.values()]).all()


def test_a_folder_without_one_of_the_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(gguf_path("qwen2_q8_0"), tmp_path / "model-bf16.gguf")
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch)
    assert f"{tmp_path} has no model-q8_0.gguf" in capsys.readouterr().err
