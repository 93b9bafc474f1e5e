# SPDX-License-Identifier: Apache-2.0
"""The comparison of states that later drafts read runs from end to end, on a few short texts."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import bench_mtp_states


def test_both_states_are_measured_for_each_form_and_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"LENGTH": 32, "NUM_PROMPT_TOKENS": 22, "NUM_HELD_OUT": 2, "BATCH": 2, "NUM_SOURCE_TOKENS": 4000}
    for name, value in sizes.items():
        monkeypatch.setattr(bench_mtp_states, name, value)
    monkeypatch.setattr(sys, "argv", ["bench_mtp_states", "--texts", "4", "--train-steps", "2"])
    bench_mtp_states.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    states = {"ERNIE": ("normed", "raw"), "DeepSeek": ("after the norm", "before the norm")}
    targets = (("ERNIE", "demo"), ("DeepSeek", "demo"), ("DeepSeek", "spread"))
    cases = [(form, target, state) for form, target in targets for state in states[form]]
    assert [(row["form"], row["target"], row["state"]) for row in rows] == cases
    for row in rows:
        assert row["tokens per step"] >= 1 and all(0 <= row[f"draft {i}"] <= 1 for i in (1, 2, 3))
    assert rows[0]["tokens per step"] > 1.5 > rows[2]["tokens per step"]  # one layer is trained, the other is not
