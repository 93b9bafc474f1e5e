# SPDX-License-Identifier: Apache-2.0
"""Effects of the server's flags, in a real server process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_cli import run
from tests.entrypoints.test_openai_client import PROMPT, engine_text

ASK = {"model": "default", "prompt": PROMPT, "max_tokens": 3, "request_id": "asked"}
FLAGS = ("--max-logprobs", "2", "--disable-log-requests", "--uvicorn-log-level", "info", "--enable-force-include-usage")


@pytest.fixture(scope="module")
def flagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with mock_server(tmp_path_factory.mktemp("flagged"), *FLAGS) as running:
        yield running


def test_max_logprobs_limits_the_alternatives_of_a_request(flagged: ServerProcess) -> None:
    assert flagged.post("/v1/completions", {**ASK, "logprobs": 2}).status_code == 200
    refused = flagged.post("/v1/completions", {**ASK, "logprobs": 3})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "logprobs: expected an integer in [0, 2] (--max-logprobs), got 3"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_streams_end_with_usage_that_the_request_does_not_ask_for(
    flagged: ServerProcess, path: str, body: dict[str, object], options: dict[str, object]
) -> None:
    response = flagged.post(path, {"model": "default", "max_tokens": 3, "stream": True, **body, **options})
    *lines, end = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    *chunks, last = [json.loads(line) for line in lines]
    assert end == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_tls_is_served_and_the_client_checks_the_certificate(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *name]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    with mock_server(tmp_path, "--ssl-keyfile", key, "--ssl-certfile", certificate) as secure:
        assert secure.url.startswith("https://")
        command = ["complete", "--url", secure.url + "/v1", "-q", PROMPT, "--temperature", "0", "--max-tokens", "3"]
        assert run(*command, env={"SSL_CERT_FILE": certificate}).stdout == engine_text(PROMPT, 0, 3) + "\n"
        stranger = run(*command)
    assert stranger.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stderr and stranger.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificate_that_cannot_be_used_is_one_line_before_the_model_loads(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "certificate.pem"
    if content is not None:
        file.write_text(content)
    done = run("serve", "demo", "--port", "0", "--ssl-keyfile", str(file), "--ssl-certfile", str(file))
    assert (done.returncode, done.stdout.count("\n")) == (2, 1)  # the first line of every start
    assert done.stderr.startswith(f"fastdeploy: error: --ssl-certfile: cannot use {str(file)!r}")
    assert done.stderr.count("\n") == 1


def test_request_lines_are_logged_unless_switched_off(
    flagged: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with mock_server(tmp_path_factory.mktemp("usual")) as usual:
        for server in (flagged, usual):
            server.post("/v1/completions", ASK)
            server.terminate()
            assert server.wait_end() == 0
    assert "cmpl-asked[0] length" in usual.stderr
    assert "cmpl-asked" not in flagged.stderr
    assert "Finished server process" in flagged.stderr, "uvicorn speaks at its level info"
    assert "Finished server process" not in usual.stderr
