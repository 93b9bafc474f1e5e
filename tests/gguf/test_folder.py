# SPDX-License-Identifier: Apache-2.0
"""The folder that is derived from a GGUF file: made once, complete or not at all, wherever the cache can be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.model_config import ModelConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.gguf import file as gguf_file
from fastdeploy.gguf import folder as module
from fastdeploy.gguf.folder import find_gguf, gguf_folder
from fastdeploy.gguf.header import read_header
from tests.gguf.gguf_files import gguf_path

MAKE = "import sys; from pathlib import Path; from fastdeploy.gguf.folder import gguf_folder as f; "
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.gguf"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the folders be made in a cache of the test's own; return where."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastdeploy" / "gguf"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(gguf_path("llama_k"), tmp_path / "m.gguf"))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def run(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKE + code, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})


def test_a_folder_is_made_once_and_complete(path: Path, cache: Path) -> None:
    folder = gguf_folder(path)
    made = (folder / "config.json").stat()
    assert gguf_folder(path) == folder and (folder / "config.json").stat().st_mtime_ns == made.st_mtime_ns
    assert names(folder) == FILES and names(cache) == {folder.name}
    assert (folder / "model.gguf").readlink() == path


@pytest.mark.parametrize("name", ["a b.gguf", "ü 模型.gguf", "a\nb.gguf", os.fsdecode(b"\xff.gguf")])
def test_any_path_is_a_path(tmp_path: Path, path: Path, name: str) -> None:
    folder = gguf_folder(path.rename(tmp_path / name))
    found = find_gguf(folder)
    assert found is not None and found.path.name == name and found.tensors
    (tmp_path / name).write_bytes(b"GGML")
    with pytest.raises(ConfigError) as error:
        gguf_folder(tmp_path / name)
    assert "\n" not in str(error.value) and "is no GGUF file" in str(error.value)


def test_a_relative_path_and_links_lead_to_the_file(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for link in links:
        link.symlink_to(path)
    folders = [gguf_folder(link) for link in links]
    links[0].unlink()
    found = find_gguf(folders[1])
    assert found is not None and found.path == links[1], "it does not depend on another link"
    monkeypatch.chdir(tmp_path)
    relative = gguf_folder(Path("m.gguf"))
    monkeypatch.chdir("/")
    found = find_gguf(relative)
    assert found is not None and found.path == path


def test_a_file_that_is_removed_is_named(path: Path) -> None:
    folder = gguf_folder(path)
    find_gguf(folder)
    path.unlink()
    for use in (lambda: gguf_folder(path), lambda: find_gguf(folder)):
        with pytest.raises(ConfigError, match=f"cannot read {path}: No such file"):
            use()


def test_a_file_that_is_replaced_gets_another_folder_and_is_read_again(path: Path) -> None:
    folder = gguf_folder(path)
    before = find_gguf(folder)
    shutil.copy(gguf_path("qwen2_k"), path)
    other = gguf_folder(path)
    assert json.loads((other / "config.json").read_text())["model_type"] == "qwen2"
    after = find_gguf(folder)
    assert before is not None and after is not None and before.tensors.keys() != after.tensors.keys()


def test_a_change_of_rotary_factors_which_are_data_makes_another_folder(path: Path) -> None:
    def factors() -> Any:
        return json.loads((gguf_folder(path) / "config.json").read_text())["rope_parameters"]["freq_factors"]

    before, content = factors(), bytearray(path.read_bytes())
    offset = read_header(path).tensors["rope_freqs.weight"].offset
    content[offset : offset + 4] = b"\x00\x00\x00\x40"
    path.write_bytes(content)
    assert factors() == [2.0, *before[1:]]


def test_a_new_version_makes_new_folders(path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = gguf_folder(path)
    (old / "config.json").write_text("{}")
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    new = gguf_folder(path)
    assert names(cache) == {old.name, new.name} and ModelConfig.from_pretrained(new).num_layers


@pytest.mark.parametrize("damage", ["header", "metadata", "tensor"])
def test_an_invalid_file_leaves_nothing(path: Path, cache: Path, damage: str) -> None:
    content = path.read_bytes()
    old, new = {
        "header": (b"GGUF", b"GGML"),
        "metadata": (b"llama.block_count", b"llama.block_counx"),
        "tensor": (b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"),
    }[damage]
    assert old in content
    path.write_bytes(content.replace(old, new))
    with pytest.raises(ConfigError, match=r"m\.gguf"):
        gguf_folder(path)
    assert not cache.exists()


def test_processes_that_start_at_once_share_a_folder(path: Path, cache: Path) -> None:
    code = "sys.stdin.read(1); print(f(Path(sys.argv[1])))"
    command = [sys.executable, "-c", MAKE + code, str(path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    found = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    [folder] = found
    assert names(Path(folder)) == FILES and names(cache) == {Path(folder).name}


def fails(call: Callable[..., Any], where: Path, error: int) -> Callable[..., Any]:
    """Return a function that fails with an error of the system for paths below a folder."""

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self.is_relative_to(where) and (arguments and "w" in str(arguments[0])):
            raise OSError(error, os.strerror(error), str(self))
        return call(self, *arguments, **options)

    return fail


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where temporary folders are made."""
    (folder := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_full_disk_makes_the_folder_a_temporary_one(
    path: Path, cache: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "open", fails(Path.open, cache, errno.ENOSPC))
    folder = gguf_folder(path)
    assert folder == gguf_folder(path) and names(folder) == FILES and folder.parent == temporary
    assert not names(cache), "no rest is left"
    [record] = caplog.records
    assert "No space left" in record.getMessage() and str(path) in record.getMessage()


def test_without_any_space_there_is_one_error(
    path: Path, cache: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", fails(Path.open, tmp_path, errno.ENOSPC))
    with pytest.raises(ConfigError) as error:
        gguf_folder(path)
    message = str(error.value)
    assert str(path) in message and message.count("No space left") == 2 and "\n" not in message
    assert not names(cache)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="No such file"):
        gguf_folder(path)


def test_a_process_without_a_cache_removes_its_folder_at_its_end(path: Path, tmp_path: Path) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    process = run(
        "a, b = f(Path(sys.argv[1])), f(Path(sys.argv[1])); assert a == b and a.is_dir(); print(a)",
        str(path),
        XDG_CACHE_HOME=os.devnull,
        TMPDIR=str(temporary),
    )
    out, errors = process.communicate()
    assert process.returncode == 0 and out.startswith(str(temporary)), errors
    assert not names(temporary)
    assert errors.count("Not a directory") == 1


def test_the_headers_of_a_file_that_stays_the_same_are_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []

    def open_header(file: Path) -> Any:
        opened.append(file)
        return read_header(file)

    folder = gguf_folder(path)
    monkeypatch.setattr(gguf_file, "read_header", open_header)
    assert find_gguf(folder) is find_gguf(folder) and len(opened) == 1
