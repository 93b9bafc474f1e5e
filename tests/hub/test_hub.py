# SPDX-License-Identifier: Apache-2.0
"""Names that are not local directories are downloaded with the hub's own client, in the requested revision."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastdeploy import LLM
from fastdeploy.core.errors import ConfigError
from fastdeploy.hub.clients import HUBS
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
