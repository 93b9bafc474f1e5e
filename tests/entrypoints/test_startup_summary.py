# SPDX-License-Identifier: Apache-2.0
"""The start-up summary: notes, and how a node works with others, which a server that works alone does not mention."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastdeploy.config.api_keys import ApiKey
from fastdeploy.config.args import parse_serve_args
from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.entrypoints.openai.api_server import announce
from fastdeploy.entrypoints.openai.startup_summary import ProgressBar, server_rows, summary_lines
from fastdeploy.version import __version__
from tests.entrypoints.server_process import ROOT

DESCRIPTION = {"model": "demo", "max_model_len": 2048, "cluster": {"group": "ab", "num_slots": 64, "bytes": 2**28}}


def test_a_server_shows_its_context_and_what_decided_the_size_of_the_cache() -> None:
    cache = {"num_blocks": 40, "block_size": 64, "num_tokens": 2560, "bytes": 2**30, "dtype": "bfloat16"}
    cache["bound"] = "half of the free memory"
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "model_context": 32768}
    assert summary_lines({**DESCRIPTION, **limits, "kv_cache": cache}, ())[2:4] == [
        "  context      2048 of the model's 32768 tokens, 8 requests and 512 tokens per step",
        "  KV cache     40 blocks of 64, 2560 tokens, 1.0 GiB (half of the free memory), bfloat16",
    ]


def test_a_node_shows_what_it_does_and_where_it_meets_the_others() -> None:
    config = ClusterConfig(
        scheduler_name="splitwise",
        splitwise_role="decode",
        scheduler_topic="mtp",
        node_id="n1",
        scheduler_url="rediss://user:sesame@redis.example:6380/1",
    )
    lines = summary_lines(DESCRIPTION, ["a note"], config)
    assert lines[-3:] == [
        "  cluster      splitwise, decode, topic mtp, node n1, rediss://***@redis.example:6380/1",
        "  KV transfer  ipc, 64 slots, 256 MiB",
        "  note: a note",
    ]


def test_nodes_of_one_queue_have_no_role_and_transfer_nothing() -> None:
    config = ClusterConfig(scheduler_name="global", node_id="n1", scheduler_password="sesame")
    lines = summary_lines(DESCRIPTION, (), config)
    assert lines[-1] == "  cluster      global, topic default, node n1, redis://127.0.0.1:6379/0"


def test_a_server_alone_shows_nothing_of_it() -> None:
    assert not any(
        "cluster" in line or "KV transfer" in line for line in summary_lines(DESCRIPTION, (), ClusterConfig())
    )


def test_keys_are_shown_by_name_and_weight_and_never_by_their_secret() -> None:
    keys = [ApiKey("research", "sk-1", weight=2.5), ApiKey("operations", "sk-2", admin=True)]
    rows = server_rows(keys, {})
    assert rows["API keys"] == "research (weight 2.5), operations (weight 1, admin)"
    assert summary_lines(DESCRIPTION, (), more_rows=rows)[-1] == f"  API keys     {rows['API keys']}"
    many = [ApiKey(f"k{i}", f"sk-{i}") for i in range(20)]
    assert server_rows(many, {})["API keys"].endswith(", k7 (weight 1), and 12 more")


def test_a_server_without_keys_has_no_row_for_them() -> None:
    lines = summary_lines(DESCRIPTION, (), more_rows=server_rows((), {"server": [3], "API": [5, 6], "engine": [4]}))
    assert lines[-1] == "  processes    server 3, API 5 6, engine 4"
    assert not any("keys" in line for line in lines)


def test_a_start_shows_the_notes_of_flags_and_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse_serve_args(["demo", "--enforce-eager", "--uds", "/run/s", "--served-model-name", "a", "b"])
    description = {**DESCRIPTION, "notes": ["context 2048 of the model's 8192: the draft model"]}
    parser = SimpleNamespace(description="")
    server = SimpleNamespace(
        description=lambda: description,
        defaults=GenerationDefaults(),
        tool_parser=parser,
        engine_config=args.engine,
    )
    announce(server, args, "http://localhost", {"server": [7]})  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "  note: --enforce-eager True has no effect: there are no CUDA graphs and no graph compiler on the CPU",
        "  note: context 2048 of the model's 8192: the draft model",
        "Ready: http://localhost/v1 on /run/s (models 'a', 'b')",
    ]


@pytest.mark.parametrize(
    ("is_terminal", "shown"),
    [
        (True, f"\rweights              [{'#' * 15}{'.' * 15}]  50%\rweights              [{'#' * 30}] 100%\n"),
        (False, ""),
    ],
)
def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, shown: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    bar = ProgressBar()
    for fraction in (0.5, 0.501, 1.0):
        bar.show("weights", fraction)
    assert capsys.readouterr().err == shown


def test_the_first_line_is_printed_before_paddle_is_imported(tmp_path: Path) -> None:
    release = tmp_path / "release"
    (tmp_path / "paddle.py").write_text(
        "import os, time\n"
        f"while not os.path.exists({str(release)!r}):\n    time.sleep(0.05)\n"
        "raise ImportError('paddle is imported')\n"
    )
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    command = [sys.executable, "-m", "fastdeploy.entrypoints.openai.api_server", "--model", "demo", "--port", "0"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        readable, _, _ = select.select([server.stdout], [], [], 60)
        release.touch()
        rest = server.stderr.read()
        assert readable and server.stdout.read() == f"FastDeploy {__version__}, loading demo\n"
    assert "paddle is imported" in rest, "the import was waiting"
