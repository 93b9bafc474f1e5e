# SPDX-License-Identifier: Apache-2.0
"""Which GGUF file a name stands for: a file, the only one of a folder, the first part, or what --gguf-file names."""

from __future__ import annotations

import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy.core.errors import ConfigError
from fastdeploy.hub import clients, model_path
from fastdeploy.hub.gguf_choice import download_patterns, models_among

PARTS = [f"big-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture(autouse=True)
def derived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the chosen file instead of the folder that is derived from it."""
    monkeypatch.setattr(model_path, "gguf_folder", lambda path: Path(f"derived from {path}"))


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"GGUF")
    return folder


def refused(name: str | Path, gguf_file: str = "") -> str:
    with pytest.raises(ConfigError) as caught:
        model_path.resolve_model_path(str(name), gguf_file=gguf_file)
    return str(caught.value)


def chosen(name: str | Path, gguf_file: str = "") -> str:
    return model_path.resolve_model_path(str(name), gguf_file=gguf_file).removeprefix("derived from ")


@pytest.mark.parametrize("name", ["a.gguf", "A.GGUF", "sha256-0123"])
def test_a_file_is_gguf_by_its_name_or_its_first_bytes(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    assert chosen(tmp_path / name) == str(tmp_path / name)


def test_another_file_or_a_missing_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("text")
    for name in (str(tmp_path / "notes.txt"), "notes.txt", "./missing.gguf", "models/missing.gguf", "missing.gguf"):
        assert refused(name) == f"model: {name} is neither a directory nor a GGUF file"


def test_the_only_model_of_a_folder_is_taken_and_parts_are_one_model(tmp_path: Path) -> None:
    assert chosen(write(tmp_path / "one", "a.gguf", "config.json", "README.md")) == str(tmp_path / "one" / "a.gguf")
    assert chosen(write(tmp_path / "parts", *PARTS)) == str(tmp_path / "parts" / PARTS[0])
    assert chosen(tmp_path / "parts" / PARTS[0]) == str(tmp_path / "parts" / PARTS[0])


def test_several_models_of_a_folder_are_listed_and_one_can_be_named(tmp_path: Path) -> None:
    write(tmp_path, "b.gguf", "a.gguf", *PARTS, "sub/c.gguf")
    assert refused(tmp_path) == (
        f"model: {tmp_path} has 3 GGUF models, a.gguf, b.gguf, {PARTS[0]}; give the path of one of them, or its name "
        "with --gguf-file"
    )
    for name in ("b.gguf", PARTS[0], "sub/c.gguf"):
        assert chosen(tmp_path, name) == str(tmp_path / name)
    assert refused(tmp_path, "d.gguf") == (
        f"gguf_file: {tmp_path} has no file 'd.gguf'; its GGUF files: a.gguf, b.gguf, {PARTS[0]}, sub/c.gguf"
    )


def test_a_folder_with_other_weights_is_not_a_gguf_model(tmp_path: Path) -> None:
    for name in ("model.safetensors", "packed_weights.json"):
        folder = write(tmp_path / name.split(".")[0], "a.gguf", "b.gguf", name)
        assert chosen(folder) == str(folder)
        assert chosen(folder, "b.gguf") == str(folder / "b.gguf")


@pytest.mark.parametrize("name", ["/etc/a.gguf", "../a.gguf", "sub/../../a.gguf"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, "a.gguf", "in/sub/a.gguf")
    expected = f"gguf_file: expected the path of a file in the folder or repository, got {name!r}"
    assert refused(tmp_path / "in", name) == expected
    assert refused("owner/name", name) == expected


def test_the_flag_beside_a_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "a.gguf") / "a.gguf"
    assert refused(file, "a.gguf") == f"gguf_file: {file} is a GGUF file itself, got 'a.gguf'"
    assert refused("smollm2", "a.gguf") == "gguf_file: smollm2 is a GGUF file itself, got 'a.gguf'"


def test_the_lowest_part_stands_for_its_model_in_each_folder() -> None:
    names = [f"{folder}/{part}" for folder in ("x", "y") for part in reversed(PARTS)]
    assert models_among([*names, "z.bin", PARTS[2]]) == [PARTS[2], f"x/{PARTS[0]}", f"y/{PARTS[0]}"]


def test_patterns_name_all_parts_and_no_other_file() -> None:
    assert download_patterns(f"x/{PARTS[0]}") == [f"x/{part}" for part in PARTS]
    assert download_patterns("a[1]*.gguf") == ["a[[]1][*].gguf"]


class FakeHub:
    """A hub with one repository: each client's functions, which copy the wanted files to a folder."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.remote, self.local = write(folder / "remote", *names), folder / "local"
        self.names = names
        self.revisions: list[str] = []

    def snapshot_download(self, revision: str, allow_patterns: list[str], **names: str) -> str:
        self.revisions.append(revision)
        for name in self.names:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (self.local / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.remote / name, self.local / name)
        return str(self.local)

    def install(self, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
        def list_files(name: str, revision: str) -> list[str]:
            self.revisions.append(revision)
            return self.names

        def entries(name: str, revision: str, **options: Any) -> list[dict[str, str]]:
            return [{"Path": name, "path": name} for name in list_files(name, revision)]

        module = SimpleNamespace(snapshot_download=self.snapshot_download, list_repo_files=list_files)
        module.get_model_files = lambda *args: (entries(*args), {})
        monkeypatch.setitem(sys.modules, clients.HUBS[source].module, module)
        if source == "MODELSCOPE":
            api = SimpleNamespace(HubApi=lambda: SimpleNamespace(get_model_files=entries))
            monkeypatch.setitem(sys.modules, "modelscope.hub.api", api)
        monkeypatch.setenv("FD_MODEL_SOURCE", source)


@pytest.mark.parametrize("source", clients.HUBS)
def test_a_hub_delivers_the_named_file_with_its_parts_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    hub = FakeHub(tmp_path, ["config.json", "a.gguf", *(f"big/{part}" for part in PARTS)])
    hub.install(monkeypatch, source)
    assert chosen("owner/name", "a.gguf") == str(hub.local / "a.gguf")
    assert [file.name for file in hub.local.iterdir()] == ["a.gguf"]
    assert chosen("owner/name", f"big/{PARTS[0]}") == str(hub.local / "big" / PARTS[0])
    assert sorted(file.name for file in (hub.local / "big").iterdir()) == PARTS
    assert refused("owner/name", "b.gguf") == (
        f"gguf_file: owner/name has no file 'b.gguf'; its GGUF files: a.gguf, big/{PARTS[0]}"
    )


@pytest.mark.parametrize("source", clients.HUBS)
def test_a_hub_repository_with_only_gguf_files_is_refused_with_their_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    hub = FakeHub(tmp_path, ["config.json", "b.gguf", *PARTS])
    hub.install(monkeypatch, source)
    with pytest.raises(ConfigError) as caught:
        model_path.resolve_model_path("owner/name", "v2")
    assert str(caught.value) == (
        "gguf_file: owner/name has no *.safetensors; choose a GGUF file with --gguf-file; its GGUF files: "
        f"b.gguf, {PARTS[0]}"
    )
    assert hub.revisions == ["v2", "v2"]


def test_a_hub_repository_with_safetensors_is_taken_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, ["config.json", "model.safetensors", "b.gguf"])
    hub.install(monkeypatch, "HUGGINGFACE")
    assert chosen("owner/name") == str(hub.local)
    assert sorted(file.name for file in hub.local.iterdir()) == ["config.json", "model.safetensors"]
    assert hub.revisions == ["main"], "no list of files is asked for"
