# SPDX-License-Identifier: Apache-2.0
"""A server that listens on a Unix socket."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import openai
import pytest

from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.errors import ConfigError
from fastdeploy.entrypoints.openai.listener import listening
from tests.entrypoints.server_process import mock_server
from tests.entrypoints.test_openai_client import PROMPT, engine_text


def leave_behind(path: Path) -> None:
    """Make the file of a Unix socket on which nobody listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_clients_reach_a_server_on_a_unix_socket(tmp_path: Path, workers: str) -> None:
    path = tmp_path / "server.sock"
    leave_behind(path)
    with mock_server(tmp_path, "--uds", str(path), "--workers", workers) as server:
        assert f"Ready: http://localhost/v1 on {path} (model " in server.stdout
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            client = openai.OpenAI(api_key="EMPTY", base_url=server.url + "/v1", http_client=http)
            answer = client.completions.create(model="default", prompt=PROMPT, temperature=0, max_tokens=5)
            assert answer.choices[0].text == engine_text(PROMPT, 0, 5)
            chunks = client.completions.create(model="default", prompt=PROMPT, temperature=0, max_tokens=5, stream=True)
            assert "".join(chunk.choices[0].text for chunk in chunks) == engine_text(PROMPT, 0, 5)
        server.terminate()
        assert server.wait_end() == 0
        assert not path.exists()


def test_a_socket_in_use_and_other_files_are_left_alone(tmp_path: Path) -> None:
    path, file = tmp_path / "server.sock", tmp_path / "file"
    file.write_text("mine")
    with listening(ServerConfig(uds=str(path))):
        with (
            pytest.raises(ConfigError, match=r"^--uds: cannot listen on '.*server.sock': Address already in use$"),
            listening(ServerConfig(uds=str(path))),
        ):
            pass
        assert path.is_socket()
    assert not path.exists()
    with (
        pytest.raises(ConfigError, match=r"^--uds: cannot listen on '.*file': Address already in use$"),
        listening(ServerConfig(uds=str(file))),
    ):
        pass
    assert file.read_text() == "mine"


def test_a_path_that_cannot_be_a_socket_is_one_line(tmp_path: Path) -> None:
    for path in (str(tmp_path / "none" / "s"), "/tmp/" + "s" * 200):
        with (
            pytest.raises(ConfigError, match=r"^--uds: cannot listen on '.*': (No such file|AF_UNIX path too long)"),
            listening(ServerConfig(uds=path)),
        ):
            pass
