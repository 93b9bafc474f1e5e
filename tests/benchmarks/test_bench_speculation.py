# SPDX-License-Identifier: Apache-2.0
"""The benchmark of speculation reports what it measured, on very little work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.bench_speculation import HEADS, Case, main, method_mapping, print_slower
from benchmarks.replay import make_tokens_alike
from fastdeploy.detokenize.chat_template import ChatTemplates
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.models.weight_source import DummySource

# One request: with several, it depends on time which stretches count.
SMALLEST = ["--batch", "1", "--seconds", "0", "--groups", "1", "--max-tokens", "24", "--max-prompt-tokens", "300"]


def results(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["bench_speculation", *SMALLEST, *flags])
    main()
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert [row["method"] for row in found][-1] == "naive again"
    return found


def test_every_workload_and_method_has_a_row_and_drafts_shorten_the_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = '{"method": "suffix", "adaptive": false}'
    flags = ["--workload", "editing", "random", "--method", "ngram-fixed", suffix]
    rows = results(capsys, monkeypatch, *flags)
    assert [(row["workload"], row["method"]) for row in rows] == [
        (workload, method)
        for workload in ("editing", "random")
        for method in ("naive", "ngram-fixed", suffix, "naive again")
    ]
    for row in rows:
        assert row["conversion"] == pytest.approx(row["speed_up"] / row["mean_acceptance_length"])
        assert min(row[f"{part}_ms"] for part in ("model", "verify", "overhead")) > 0 and row["draft_ms"] >= 0
    assert [row["rows_per_step"] > 1.0 for row in rows[:4]] == [False, True, True, False]
    lengths = [row["mean_acceptance_length"] for row in rows[:3]]
    assert lengths[0] == 1 and lengths[1] > 1.2 and lengths[2] > 1.2
    assert (rows[0]["speed_up"], rows[0]["error"]) == (1, 0)


def test_replay_takes_drafts_of_trained_heads_and_leaves_out_draft_models(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = resolve_model_path("demo")
    methods = ["suffix-fixed", "mtp-fixed", *(f"{method}-fixed" for method in HEADS)]
    flags = ["--replay", "--shape", shape, "--workload", "plain", "--method", "draft_model", *methods]
    rows = results(capsys, monkeypatch, *flags)
    assert [row["method"] for row in rows] == ["naive", *methods, "naive again"]
    lengths = {row["method"]: row["mean_acceptance_length"] for row in rows}
    assert lengths["mtp-fixed"] > 1.5 and lengths["eagle3-fixed"] > 1.5
    assert all(lengths[f"{method}-fixed"] > 1 for method in HEADS)


def test_a_share_of_all_tokens_is_alike() -> None:
    shapes = {"embedding": (1000, 8), "matrix": (8, 8)}
    plain, alike = DummySource(shapes, seed=3), DummySource(shapes, seed=3)
    make_tokens_alike(alike, "embedding", 0.3)
    np.testing.assert_array_equal(alike.read("matrix").numpy(), plain.read("matrix").numpy())
    table, before = alike.read("embedding").numpy(), plain.read("embedding").numpy()
    is_first, is_own = (table == before[0]).all(-1), (table == before).all(-1)
    assert (is_first | is_own).all() and 0.25 < is_first.mean() < 0.35


def test_replay_replaces_the_drafts_of_a_random_layer_by_those_of_a_trained_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--replay", "--shape", "demo", "--workload", "editing", "--method", "mtp-fixed", "mtp+suffix-fixed"]
    rows = results(capsys, monkeypatch, *flags)
    assert [row["method"] for row in rows] == ["naive", "mtp-fixed", "mtp+suffix-fixed", "naive again"]
    assert min(row["mean_acceptance_length"] for row in rows[1:3]) > 1.5


def test_replay_of_the_models_own_answers_has_the_acceptance_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--workload", "plain", "--method", "mtp-fixed"]
    itself = results(capsys, monkeypatch, *flags)[1]
    replayed = results(capsys, monkeypatch, "--replay", "--shape", "demo", *flags)[1]
    text = results(capsys, monkeypatch, "--replay", "--shape", "demo", *flags, "--own-answers")[1]
    assert replayed["mean_acceptance_length"] == itself["mean_acceptance_length"] > text["mean_acceptance_length"]


def test_conversations_are_compared_at_each_temperature(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--workload", "chat-free", "random", "--method", "ngram-fixed", "--temperature", "0", "0.7"]
    rows = results(capsys, monkeypatch, *flags)
    cases = [("chat-free", 0.0), ("chat-free", 0.7), ("random", 1.0)]
    methods = ("naive", "ngram-fixed", "naive again")
    assert [(row["workload"], row["temperature"], row["method"]) for row in rows] == [
        (*case, method) for case in cases for method in methods
    ]
    assert all(row["mean_acceptance_length"] >= 1 for row in rows)


def test_only_conversations_end_where_the_model_ends_them() -> None:
    assert not Case("chat-free", 0.7, 1).params(8).ignore_eos
    assert Case("plain", 0.0, 1).params(8).ignore_eos


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replay", "--workload", "chat-edit"], "--replay: expected recorded answers"),
        (["--figures", "charts", "--temperature", "0", "1"], "--figures: expected one --temperature"),
    ],
)
def test_what_conversations_cannot_be_combined_with_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        results(capsys, monkeypatch, *flags)
    assert message in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_pretrained(resolve_model_path("demo"))
    tokenizer.chat_templates = ChatTemplates({}, {})
    monkeypatch.setattr(Tokenizer, "from_pretrained", lambda path: tokenizer)
    with pytest.raises(SystemExit):
        results(capsys, monkeypatch, "--workload", "chat-edit")
    assert "--workload: demo has no chat template" in capsys.readouterr().err


def test_methods_slower_than_naive_are_named_apart_from_uncertain_ones(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = {"naive": 1.0, "ngram": 0.94, "suffix": 0.953, "mtp": 0.96, "draft_model": 1.2, "naive again": 1.01}
    figures = [{"batch": 4, "method": method, "speed_up": speed, "error": 0.01} for method, speed in speeds.items()]
    print_slower([{"workload": "plain", "temperature": 0.0, **row} for row in figures])  # 0.98 minus the noise of 0.01
    assert capsys.readouterr().out.splitlines() == [
        "more than 2% slower than naive, beyond naive over naive, of 4: plain 4 ngram",
        "perhaps, within two errors: plain 4 suffix, plain 4 mtp",
    ]
    print_slower([{"workload": "chat-edit", "temperature": 0.7, **row} for row in figures])
    assert "of 4: chat-edit 4 at 0.7 ngram" in capsys.readouterr().out


def test_charts_are_small_and_reproducible(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from benchmarks.figures import draw_speculation

    row = {"speed_up": 2.0, "mean_acceptance_length": 2.5, "draft_ms": 0.1, "overhead_ms": 0.5}
    row |= {"model_ms": 9.0, "verify_ms": 0.2}
    rows = [
        {"workload": workload, "batch": batch, "method": method, **row}
        for workload in ("editing", "loop", "quoting", "plain", "random")
        for batch in (1, 4, 16, 64)
        for method in ("naive", "ngram", "suffix")
    ]
    for folder in ("a", "b"):
        draw_speculation(rows, "title", tmp_path / folder)
    for name in ("speed-up.svg", "step.svg"):
        assert 4000 < (tmp_path / "a" / name).stat().st_size < 60_000
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("method", "mapping"),
    [
        ("ngram", {"method": "ngram", "num_speculative_tokens": 8}),
        ("mtp", {"method": "mtp", "num_speculative_tokens": 3}),
        ("mtp-fixed", {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}),
        (
            "mtp+suffix",
            {"method": "mtp", "num_speculative_tokens": 8, "mtp_strategy": "with_suffix", "num_model_steps": 3},
        ),
        ('{"method": "suffix"}', {"method": "suffix"}),
    ],
)
def test_methods_are_names_or_json_mappings(method: str, mapping: dict[str, Any]) -> None:
    assert method_mapping(method, 8) == mapping
