# SPDX-License-Identifier: Apache-2.0
"""The tables of measured figures come from docs/results/data and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.make_result_tables import (
    DATA,
    PAGES,
    chats_table,
    decode_table,
    files_table,
    fresh_pages,
    isolation_table,
    merge_runs,
    peers_table,
    quality_table,
    speculation_table,
    write_data,
)

ENVIRONMENT = {"processor": "X", "isa": "avx2", "commit": "abc", "command": "python -m benchmarks.bench_decode"}


def test_pages_show_their_data() -> None:
    for path, text in fresh_pages().items():
        assert path.read_text() == text, "run python scripts/make_result_tables.py"


def test_every_data_file_is_shown_by_a_page() -> None:
    pages = "".join(path.read_text() for path in PAGES)
    names = [path.stem for path in DATA.glob("*.json")]
    assert names
    assert [name for name in names if f"<!-- table: {name} -->" not in pages] == []


def test_section_is_replaced_and_names_machine_commit_and_command(tmp_path: Path) -> None:
    row = {"format": "none", "context": 128, "rows": 1, "as": "requests", "over_floor": 1.1, "over_loops": 1.04}
    run = {"environment": ENVIRONMENT, "benchmark": "decode", "results": [row]}
    (tmp_path / "steps.json").write_text(json.dumps(run))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: steps -->\nold\n<!-- end of table -->\nafter\n")
    text = fresh_pages([page], tmp_path)[page]
    assert text.startswith("before\n<!-- table: steps -->\n")
    assert "| 128 | 1 | requests | 1.10 / 1.04 |" in text
    assert "X (path `avx2`), commit abc: `python -m benchmarks.bench_decode`" in text
    assert "old" not in text
    assert text.endswith("<!-- end of table -->\nafter\n")


def test_times_of_a_device_become_a_table(tmp_path: Path) -> None:
    times = {
        "copy_bytes_per_s": 1e12,
        "product_ops_per_s": 1e14,
        "cases": {"linear": {"us": 12.34, "share_of_peak": 0.5}},
    }
    checked = {"device": "Y, sm_90, driver", "isa": "sm_90", "operator_library": "0.1.0+ab", "times": times}
    write_data("card", merge_runs([f"a table\n{json.dumps(checked)}\n"]), tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- table: card -->\n<!-- end of table -->\n")
    text = fresh_pages([page], tmp_path)[page]
    assert "| linear | 12.3 | 0.50 |" in text
    assert "Y (path `sm_90`), operators 0.1.0+ab: `fastdeploy check-device --bench`" in text


def test_page_without_data_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: steps -->\n<!-- end of table -->\n")
    with pytest.raises(FileNotFoundError):
        fresh_pages([page], tmp_path)


def test_isolation_table_has_a_row_per_attack() -> None:
    row = {"attack": "grammar", "itl_ratio": 1.234, "ttft_steps": 2.04, "ordinary_steps": 1.5, "health_s": 0.123}
    assert isolation_table([row]).splitlines()[-1] == "| grammar | 1.23 | 2.0 (1.5) | 0.12 |"


def test_decode_table_has_a_column_per_format() -> None:
    cell = {"context": 128, "rows": 8, "as": "drafts", "over_floor": 1.0, "over_loops": 1.0}
    assert (
        decode_table([{**cell, "format": "none"}, {**cell, "format": "w8a8"}]).splitlines()[0].endswith("none | w8a8 |")
    )


def test_speculation_table_leaves_naive_out() -> None:
    rows = [
        {"workload": "editing", "batch": 1, "method": name, "speed_up": ratio, "conversion": ratio}
        for name, ratio in (("naive", 1.0), ("ngram", 2.5), ("naive again", 1.01))
    ]
    assert speculation_table(rows).splitlines()[2:] == ["| editing | 1 | 2.50 (2.50) |"]


def test_peers_table_shows_ratios_and_what_both_formats_lose(tmp_path: Path) -> None:
    losses = {"bf16": -0.04, "w8a8": 0.351, "llama.cpp Q8_0": 0.498}
    results = [{"format": name, "worse_%": loss} for name, loss in losses.items()]
    (tmp_path / "quality-smollm2.json").write_text(json.dumps({"results": results}))
    rows = [
        {"bits": 8, "engine": "w8a8", "over": "tokens/s", "decode-128": 40.0},
        {"bits": 8, "engine": "w8a8", "over": "llama.cpp q8_0", "decode-128": 2.19},
        {"bits": 8, "engine": "w8a8", "over": "OpenVINO GenAI int8", "decode-128": 1.5},
    ]
    assert peers_table(rows, tmp_path).splitlines()[2:] == [
        "| w8a8 | +0.4 % | llama.cpp q8_0 | +0.5 % | 2.19 |",
        "| w8a8 | +0.4 % | OpenVINO GenAI int8 |  | 1.50 |",
    ]


def test_files_table_shows_ratios_by_file_and_bits_of_inputs() -> None:
    peer = "llama.cpp q8_0, 0.3.36"
    rows = [
        {"bits": 8, "engine": "FastDeploy w8a8, avx2", "over": "tokens/s", "decode-128": 40.0},
        {"bits": 8, "engine": "FastDeploy w8a8, avx2", "over": peer, "decode-128": 2.194, "streams-16": None},
        {"bits": 8, "engine": "FastDeploy gguf, avx2", "over": peer, "decode-128": 1.5, "streams-16": 3.0},
    ]
    assert files_table(rows).splitlines() == [
        "| file | inputs | decode-128 | streams-16 |",
        "| --- | --- | --- | --- |",
        "| Q8_0 | 8 bits | 2.19 |  |",
        "| Q8_0 | 16 bits | 1.50 | 3.00 |",
    ]


def test_chats_table_shows_speed_up_error_and_tokens_per_step() -> None:
    rows = [
        {"workload": "chat-edit", "temperature": temperature, "batch": 1, "method": name}
        | {"speed_up": ratio, "error": 0.101, "mean_acceptance_length": length}
        for temperature in (0.0, 0.7)
        for name, ratio, length in (("naive", 1.0, 1.0), ("ngram", 2.5, 2.75), ("naive again", 0.99, 1.0))
    ]
    assert chats_table(rows[:-2]).splitlines() == [
        "| conversation | temperature | batch | ngram | naive again |",
        "| --- | --- | --- | --- | --- |",
        "| edit | 0.0 | 1 | 2.50 ± 0.10 (2.8) | 0.99 ± 0.10 |",
        "| edit | 0.7 | 1 |  |  |",
    ]


def test_quality_table_shows_the_change_over_each_reference() -> None:
    figures = {"perplexity": 17.2781, "change": 0.2264, "change_99%": 1.234, "kl": 0.04041, "same_token": 0.894}
    rows = [
        {"format": "float32", "over": "float32", **figures, "worse_%": 0.0, "weights_mib": 512.9},
        {"format": "w8a8", "over": "float32", **figures, "worse_%": 3.896, "weights_mib": 183.01},
    ]
    assert quality_table(rows).splitlines()[2:] == [
        "| float32 | 17.278 |  |  |  |  |  | 512.9 |",
        "| w8a8 | 17.278 | +3.90 % float32 | 0.226 | 1.23 | 0.0404 | 0.894 | 183.0 |",
    ]


def output(quantization: str, speed_up: float, **environment: str) -> str:
    """Return what a run of bench_speculation prints."""
    row = {"workload": "editing", "batch": 1, "method": "ngram", "speed_up": speed_up, "conversion": 0.5}
    command = f"python -m benchmarks.bench_speculation --replay --quantization {quantization} --batch 1"
    where = {**ENVIRONMENT, "command": command, **environment}
    run = {
        "environment": where,
        "benchmark": "speculation",
        "options": {"quantization": quantization},
        "results": [row],
    }
    return f"a table\n{json.dumps(run)}\n"


def test_runs_with_different_formats_become_one_table(tmp_path: Path) -> None:
    write_data("speed", merge_runs([output("none", 2.0), output("w8a8", 1.5)]), tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- table: speed -->\n<!-- end of table -->\n")
    lines = fresh_pages([page], tmp_path)[page].splitlines()
    assert "| none | editing | 1 | 2.00 (0.50) |" in lines and "| w8a8 | editing | 1 | 1.50 (0.50) |" in lines
    assert any("--replay --quantization FORMAT --batch 1" in line for line in lines)


def test_one_run_is_shown_as_it_is(tmp_path: Path) -> None:
    write_data("speed", merge_runs([output("none", 2.0)]), tmp_path)
    assert json.loads((tmp_path / "speed.json").read_text()) == json.loads(output("none", 2.0).splitlines()[-1])


def test_runs_of_different_commits_are_not_merged() -> None:
    with pytest.raises(ValueError, match=r"expected runs of .*'abc'.*, got .*'def'"):
        merge_runs([output("none", 2.0), output("w8a8", 1.5, commit="def")])
