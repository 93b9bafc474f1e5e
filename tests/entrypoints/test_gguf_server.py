# SPDX-License-Identifier: Apache-2.0
"""Servers of GGUF files: start, errors of the start, and what is left of them, with real engine processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fastdeploy.ipc.child import DEFAULT_FACTORY
from tests.entrypoints.server_process import ServerProcess
from tests.gguf.gguf_files import gguf_path

FEW = ["--max-model-len", "64", "--max-num-seqs", "2", "--kv-cache-memory-bytes", "1M"]


def server_of(path: Path, temporary: Path, cache: str, *flags: str) -> ServerProcess:
    temporary.mkdir(exist_ok=True)
    env = {"XDG_CACHE_HOME": cache, "TMPDIR": str(temporary)}
    return ServerProcess([str(path), *FEW, *flags], DEFAULT_FACTORY, env)


def test_without_a_cache_all_processes_share_a_temporary_folder_that_is_gone_in_the_end(tmp_path: Path) -> None:
    server = server_of(gguf_path("llama_rare"), tmp_path / "tmp", os.devnull, "--workers", "2")
    try:
        server.wait_ready()
        body = {"model": server.get("/v1/models").json()["data"][0]["id"], "prompt": "a", "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200
        assert len(list((tmp_path / "tmp").glob("fastdeploy-gguf-*"))) == 1
        server.terminate()
        assert server.wait_end() == 0
        assert not list((tmp_path / "tmp").iterdir())
        assert (server.stdout + server.stderr).count("Not a directory") == 1
    finally:
        server.close()


@pytest.mark.parametrize("name", ["a\nb.gguf", "a b ü.gguf"])
def test_a_damaged_file_is_one_line_and_status_2_whatever_its_name(tmp_path: Path, name: str) -> None:
    content = gguf_path("qwen2_q8_0").read_bytes()
    (tmp_path / name).write_bytes(content[:-1])
    server = server_of(tmp_path / name, tmp_path / "tmp", str(tmp_path / "cache"))
    try:
        assert server.wait_end() == 2
        [line] = server.stderr.splitlines()
        assert line.startswith("fastdeploy: error: --model: ") and "is incomplete: tensor" in line
        assert not list((tmp_path / "tmp").iterdir()) and not (tmp_path / "cache").exists()
    finally:
        server.close()


def test_a_tokenizer_that_cannot_be_read_is_one_line_while_the_engine_loads(tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf_path("qwen2_q8_0"), tmp_path / "m.gguf"))
    (other := tmp_path / "tokenizer").mkdir()
    (other / "tokenizer.json").write_text("{}")
    server = server_of(path, tmp_path / "tmp", str(tmp_path / "cache"), "--tokenizer", str(other))
    try:
        assert server.wait_end() == 2
        [line] = server.stderr.splitlines()
        assert line.startswith("fastdeploy: error: --tokenizer: ")
        assert not list((tmp_path / "tmp").iterdir()), "the engine has ended and its socket is removed"
    finally:
        server.close()
