# SPDX-License-Identifier: Apache-2.0
"""Names that are not local directories are downloaded with the hub's own client, in the requested revision."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy import LLM
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.clients import _PATTERNS, HUBS
from fastdeploy.hub.model_path import resolve_model_path

DEMO = resolve_model_path("demo")


class FakeClient:
    """A hub that delivers one folder, or fails."""

    def __init__(self, folder: str = DEMO, failure: str = "") -> None:
        self.folder = folder
        self.failure = failure
        self.calls: list[dict[str, Any]] = []

    def snapshot_download(self, **arguments: Any) -> str:
        self.calls.append(arguments)
        if self.failure:
            raise OSError(self.failure)
        return self.folder


def install(monkeypatch: pytest.MonkeyPatch, source: str, client: Any) -> None:
    monkeypatch.setenv("FD_MODEL_SOURCE", source)
    monkeypatch.setitem(sys.modules, HUBS[source].module, client)


@pytest.mark.parametrize(
    ("source", "name_argument", "default_branch"),
    [("HUGGINGFACE", "repo_id", "main"), ("MODELSCOPE", "model_id", "master"), ("AISTUDIO", "repo_id", "master")],
)
def test_each_client_gets_the_name_and_the_revision(
    monkeypatch: pytest.MonkeyPatch, source: str, name_argument: str, default_branch: str
) -> None:
    client = FakeClient()
    install(monkeypatch, source, client)
    assert resolve_model_path("owner/name") == DEMO
    assert resolve_model_path("owner/name", "v1.5") == DEMO
    assert resolve_model_path("owner/name", "main") == resolve_model_path("owner/name", "master") == DEMO
    assert [call[name_argument] for call in client.calls] == ["owner/name"] * 4
    assert [call["revision"] for call in client.calls] == [default_branch, "v1.5", default_branch, default_branch]
    assert "*.safetensors" in client.calls[0]["allow_patterns"] and "*.bin" not in client.calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    ("source", "package"),
    [("HUGGINGFACE", "huggingface_hub"), ("MODELSCOPE", "modelscope"), ("AISTUDIO", "aistudio-sdk>=0.3")],
)
@pytest.mark.parametrize("found", [None, SimpleNamespace()], ids=["missing", "too old"])
def test_a_missing_client_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, source: str, package: str, found: Any
) -> None:
    install(monkeypatch, source, found)
    with pytest.raises(ConfigError) as caught:
        resolve_model_path("owner/name")
    message = str(caught.value)
    assert f"pip install '{package}'" in message and f"FD_MODEL_SOURCE={source}" in message and "\n" not in message


def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "MODELSCOPE", FakeClient(failure="no route to host\n  at line 5"))
    with pytest.raises(ConfigError) as caught:
        resolve_model_path("owner/name", "v2")
    assert caught.value.message == (
        "owner/name is not a local directory, and the download of its revision v2 from ModelScope "
        "(FD_MODEL_SOURCE=MODELSCOPE) failed: no route to host"
    )


def test_an_unknown_source_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FD_MODEL_SOURCE", "somewhere")
    with pytest.raises(ConfigError, match="FD_MODEL_SOURCE: expected one of HUGGINGFACE, MODELSCOPE, AISTUDIO"):
        resolve_model_path("owner/name")


def test_a_revision_of_a_local_directory_is_refused_unless_it_is_a_default(tmp_path: Path) -> None:
    for revision in ("", "main", "master", "default"):
        assert resolve_model_path(str(tmp_path), revision) == str(tmp_path)
        assert resolve_model_path("demo", revision) == DEMO
    for name in (str(tmp_path), "demo"):
        with pytest.raises(ConfigError, match="revision: 'v2' needs the name of a hub's model"):
            resolve_model_path(name, "v2")


def test_the_offline_engine_takes_model_and_tokenizer_of_that_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    install(monkeypatch, "MODELSCOPE", client)
    llm = LLM("owner/name", revision="v1.5", max_num_seqs=2, max_model_len=64)
    assert llm.tokenizer.encode("def") == LLM("demo", max_num_seqs=2, max_model_len=64).tokenizer.encode("def")
    assert {call["revision"] for call in client.calls} == {"v1.5"}


@pytest.mark.parametrize("name", ["${path_to_model}", "$MODEL", "/models/${NAME}", "owner/${NAME}"])
@pytest.mark.parametrize("field", ["model", "tokenizer"])
def test_a_name_with_a_shell_variable_is_refused_without_a_request_to_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    client = FakeClient()
    install(monkeypatch, "HUGGINGFACE", client)
    with pytest.raises(ConfigError) as caught:
        resolve_model_path(name, field=field)
    assert str(caught.value).startswith(f"{field}: {name} is not the name of a model; a shell variable was not set")
    assert client.calls == []


def test_a_folder_may_have_a_dollar_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "$MODEL").symlink_to(DEMO)
    monkeypatch.chdir(tmp_path)
    assert Path(resolve_model_path("$MODEL")).samefile(DEMO)


class FakeHub(FakeClient):
    """A hub whose files are downloaded into a folder as far as the patterns ask for them."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        super().__init__(str(folder))
        self.files, self.num_lists = files, 0

    def snapshot_download(self, **arguments: Any) -> str:
        for file in self.files:
            if any(fnmatch(file, pattern) for pattern in arguments["allow_patterns"]):
                (Path(self.folder) / file).parent.mkdir(exist_ok=True)
                (Path(self.folder) / file).write_text(INDEX if file.endswith("index.json") else "{}")
        return super().snapshot_download(**arguments)

    def list_repo_files(self, name: str, revision: str) -> list[str]:
        self.num_lists += 1
        return self.files

    def fetched(self) -> list[str]:
        """Return the paths of the files that are there."""
        paths = (path for path in Path(self.folder).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.folder)) for path in paths)


INDEX = json.dumps({"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}})
SHARDS = ["pytorch_model-1.bin", "pytorch_model-2.bin", "pytorch_model.bin.index.json"]
TRAINING = ["optimizer.pt", "optimizer.bin", "scheduler.pt", "training_args.bin", "rng_state.pt", "rng_state_0.pt"]


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["config.json", "pytorch_model.bin", *TRAINING], ["config.json", "pytorch_model.bin"]),
        (["config.json", "medusa_lm_head.pt", "training_args.bin"], ["config.json", "medusa_lm_head.pt"]),
        ([*SHARDS, *TRAINING], SHARDS),
        (["a[1].bin", "a1.bin.txt", "checkpoint/pytorch_model.bin"], ["a1.bin.txt", "a[1].bin"]),
        (["model.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"], ["model.safetensors"]),
        (["config.json", *TRAINING], ["config.json"]),
    ],
)
def test_drafting_models_without_safetensors_are_downloaded_as_pytorch_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: list[str], fetched: list[str]
) -> None:
    client = FakeHub(tmp_path, files)
    install(monkeypatch, "HUGGINGFACE", client)
    assert resolve_model_path("owner/head", takes_torch=True) == str(tmp_path)
    assert client.fetched() == fetched


def test_a_model_without_safetensors_is_not_downloaded_as_pytorch_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeHub(tmp_path, ["config.json", "pytorch_model.bin"])
    install(monkeypatch, "HUGGINGFACE", client)
    resolve_model_path("owner/head")
    assert client.fetched() == ["config.json"]


def test_downloaded_pytorch_files_are_found_without_the_list_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeHub(tmp_path, SHARDS)
    install(monkeypatch, "HUGGINGFACE", client)
    for _ in range(2):
        resolve_model_path("owner/head", "v2", takes_torch=True)
    assert client.num_lists == 1
    assert {call["revision"] for call in client.calls} == {"v2"}
    (tmp_path / SHARDS[0]).unlink()  # as after a download that was interrupted
    resolve_model_path("owner/head", "v2", takes_torch=True)
    assert client.num_lists == 2 and client.fetched() == SHARDS


def test_pytorch_files_are_left_alone_beside_safetensors_and_where_a_gguf_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeHub(tmp_path, ["pytorch_model.bin"])
    install(monkeypatch, "HUGGINGFACE", client)
    with pytest.raises(ConfigError, match=r"owner/head has no file 'a\.gguf'"):
        resolve_model_path("owner/head", gguf_file="a.gguf", takes_torch=True)
    assert client.fetched() == []
    resolve_model_path("owner/head", takes_torch=True)
    client.files.append("model.safetensors")  # a newer revision
    client.calls.clear()
    resolve_model_path("owner/head", takes_torch=True)
    assert [call["allow_patterns"] for call in client.calls] == [_PATTERNS]


def test_a_choice_of_gguf_files_is_asked_for_also_beside_pytorch_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeHub(tmp_path, ["a.gguf", "b.gguf", "imatrix.bin"])
    install(monkeypatch, "HUGGINGFACE", client)
    with pytest.raises(ConfigError, match=r"choose a GGUF file with --gguf-file; its GGUF files: a\.gguf, b\.gguf"):
        resolve_model_path("owner/draft", takes_torch=True)


def test_the_drafting_model_of_a_configuration_takes_pytorch_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = FakeHub(tmp_path, ["config.json", "pytorch_model.bin"])
    install(monkeypatch, "HUGGINGFACE", client)
    speculative = {"method": "draft_model", "model": "owner/head", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        LLM("demo", max_num_seqs=2, max_model_len=64, speculative_config=speculative)
    assert client.fetched() == ["config.json", "pytorch_model.bin"]
