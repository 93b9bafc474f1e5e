# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run from end to end, those of whole steps with a tiny model; no test asserts a time."""

from __future__ import annotations

import json
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest

from benchmarks import (
    bench_decode,
    bench_isolation,
    bench_memory,
    bench_overhead,
    bench_prefill,
    bench_proposing,
    step_parts,
)


@pytest.fixture
def last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small_readings: None, tiny: str
) -> Any:
    """Return a function that runs a benchmark in this process on the tiny shape and returns its JSON line."""

    def run(module: ModuleType, *flags: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [module.__name__, "--shape", tiny, *flags])
        module.main()
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return run


def test_decode_measures_every_format_context_and_number_of_rows(last_line: Any) -> None:
    flags = ["--quantization", "none", "w4a8", "--context", "32", "80", "--rows", "1", "4", "--rounds", "2"]
    results = last_line(bench_decode, *flags)["results"]
    kinds = [(1, "requests"), (4, "requests"), (4, "drafts")]
    cases = [(format, context, *kind) for format in ("none", "w4a8") for context in (32, 80) for kind in kinds]
    assert [(r["format"], r["context"], r["rows"], r["as"]) for r in results] == cases
    for row in results:
        assert row["over_floor"] > 0 and row["floor_ms"] > 0
        assert row["over_loops"] > 0 and row["loops_ms"] > 0
        assert row["rows_per_s"] == pytest.approx(1000 * row["rows"] / row["step_ms"])
        assert row["times_one"] == 1 or row["rows"] > 1
        assert row["loops_times_one"] == 1 or row["rows"] > 1
    reads = {(r["format"], r["rows"], r["as"]): r["read_gb"] for r in results if r["context"] == 80}
    assert reads["none", 4, "drafts"] == reads["none", 1, "requests"] < reads["none", 4, "requests"]


def test_decode_prints_the_time_of_each_part_and_of_its_loop(last_line: Any) -> None:
    flags = ["--quantization", "w4a8", "--context", "40", "--rows", "1", "4", "--rounds", "2", "--parts"]
    results = last_line(bench_decode, *flags)["results"]
    assert len(results) == 3
    with_loops = {"qkv", "attention output", "gate and up", "down", "head", "Attention"}
    for row in results:
        parts = {part["part"]: part for part in row["parts"]}
        assert set(parts) >= {*with_loops, "Sample", "RmsNorm", step_parts.REST}
        assert {part for part in parts if parts[part]["loop_ms"] > 0} == with_loops
        assert all(part["ms"] > 0 for part in parts.values())
        loops_ms = sum(part["loop_ms"] for part in parts.values())
        lost = [part["lost"] for part in row["parts"]]
        assert lost == sorted(lost, reverse=True)
        assert sum(lost) == pytest.approx((sum(part["ms"] for part in parts.values()) - loops_ms) / row["loops_ms"])
        assert loops_ms == pytest.approx(row["loops_ms"]), "the loops of the parts add up to those of the step"


def test_prefill_compares_formats_with_bf16(last_line: Any) -> None:
    flags = ["--quantization", "none", "w8a8", "--tokens", "16", "48", "--rounds", "2"]
    results = last_line(bench_prefill, *flags)["results"]
    assert [(r["format"], r["tokens"]) for r in results] == [("none", 16), ("w8a8", 16), ("none", 48), ("w8a8", 48)]
    for row in results:
        assert row["share"] > 0
        assert row["over_bf16"] == 1 or row["format"] == "w8a8"


def test_the_parts_of_prefill_account_for_the_whole_step(last_line: Any) -> None:
    flags = ["--quantization", "none", "--tokens", "48", "--rounds", "1", "--parts"]
    (row,) = last_line(bench_prefill, *flags)["results"]
    assert {"qkv", "attention output", "gate and up", "down", "head", "Attention", step_parts.REST} <= set(row["parts"])
    shares = list(row["parts"].values())
    assert sum(shares) == pytest.approx(1.0) and shares == sorted(shares, reverse=True) and shares[-1] > 0


def test_overhead_is_split_for_each_method_and_grammars_need_a_tokenizer(last_line: Any) -> None:
    def measured(*flags: str) -> list[tuple[str, int]]:
        results = last_line(bench_overhead, "--requests", "1", "3", "--steps", "4", *flags)["results"]
        for row in results:
            assert 0 < row["choosing_us"] < row["outside_us"] < 1e3 * row["step_ms"]
            assert (row["proposing_us"] > 0) == (row["method"] == "ngram")
        return [(row["method"], row["requests"]) for row in results]

    assert measured() == [("naive", 1), ("ngram", 1), ("naive", 3), ("ngram", 3)]
    assert measured("--shape", "demo")[:3] == [("naive", 1), ("ngram", 1), ("grammar", 1)]


def test_memory_is_that_of_the_process_beside_weights_and_cache(last_line: Any) -> None:
    (row,) = last_line(bench_memory, "--quantization", "wint8", "--requests", "4", "--context", "16")["results"]
    assert row["weights_gib"] > 0 and row["cache_gib"] > 0
    assert row["beside_gib"] == pytest.approx(row["resident_gib"] - row["weights_gib"] - row["cache_gib"])
    assert row["peak_beside_gib"] >= row["beside_gib"] - 0.01


def test_isolation_measures_an_attack_beside_ordinary_requests_and_then_stops_the_server(
    last_line: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_isolation, "KV_CACHE_BYTES", 64 << 20)  # taken at the start
    monkeypatch.setattr(bench_isolation, "NUM_TOKENS", 2000)  # a few tokens of the tiny model arrive at once
    found = last_line(bench_isolation, "--attacks", "tokenize", "--streams", "1", "--quantization", "none")
    [row] = found["results"]
    assert row["attack"] == "tokenize"
    assert row["statuses"].startswith("400: "), "a text of eight million characters is refused"
    assert row["itl_ratio"] > 0 and row["health_s"] > 0
    assert found["stop_s"] > 0


def test_proposing_is_measured_for_each_method_with_new_and_known_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--shared-tokens", "40000", "--history", "1000", "--steps", "20", "--batch", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["bench_proposing", *flags])
    bench_proposing.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = {(row["method"], row["batch"], row["text"]): row for row in found["results"]}
    assert list(rows) == list(product(("ngram", "suffix"), (1, 2), ("new", "known")))
    assert all(row["draft_us"] > 0 and row["live_bytes_per_token"] > 4 for row in rows.values())
    emitted = {kind: rows["suffix", 2, kind]["emitted_per_step"] for kind in ("new", "known")}
    assert emitted["known"] > 2 * emitted["new"] >= 2
    assert found["shared"]["shared_tokens"] > 20_000
