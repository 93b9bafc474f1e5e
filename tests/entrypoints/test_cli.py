# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from fastdeploy.version import __version__
from tests.entrypoints.server_process import ServerProcess
from tests.entrypoints.test_openai_client import CHAT_PROMPT, PROMPT, engine_text


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_version_names_the_operator_library() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"fastdeploy {re.escape(__version__)}, operator library .+\n", done.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "serve"], "bench is not available yet"),
        (["dance"], "dance is no command; see fastdeploy --help"),
        (["serve", "demo", "--device", "gpu"], "device: expected one of cpu, got 'gpu'"),
    ],
)
def test_what_is_not_there_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fastdeploy: error: {message}\n"


def test_help_lists_the_commands() -> None:
    assert "serve MODEL" in run().stdout
    assert "--max-model-len" in run("serve", "--help").stdout


def test_complete_prints_the_continuation(server: ServerProcess) -> None:
    done = run("complete", "--url", server.url + "/v1", "-q", PROMPT, "--temperature", "0", "--max-tokens", "9")
    assert (done.returncode, done.stdout) == (0, engine_text(PROMPT, 0, 9) + "\n")


def test_chat_keeps_the_conversation_until_the_input_ends(server: ServerProcess) -> None:
    flags = ["--url", server.url + "/v1", "--temperature", "0", "--max-tokens", "5", "--system-prompt", "be brief"]
    done = run("chat", *flags, stdin="hi\nmore\n")
    first = engine_text(CHAT_PROMPT, 0, 5)
    second = engine_text(f"{CHAT_PROMPT[:-10]}assistant: {first}\nuser: more\nassistant:", 0, 5)
    assert (done.returncode, done.stdout) == (0, f"> {first}\n> {second}\n> \n")


def test_server_that_is_not_there_or_refuses_is_one_line(server: ServerProcess) -> None:
    nobody = run("chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi")
    assert nobody.returncode == 1
    assert nobody.stderr.startswith("fastdeploy: error: cannot reach http://127.0.0.1:9/v1: ")
    refused = run("complete", "--url", server.url + "/v1", "-q", PROMPT, "--temperature", "-1")
    assert refused.returncode == 1
    assert refused.stderr.startswith("fastdeploy: error: temperature: expected a number")
