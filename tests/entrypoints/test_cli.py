# SPDX-License-Identifier: Apache-2.0
"""The `fastdeploy` command."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

from fastdeploy.entrypoints.cli.collect_env import ITEMS, collect
from fastdeploy.entrypoints.cli.main import COMMANDS
from fastdeploy.entrypoints.cli.parser import server_url
from fastdeploy.version import __version__
from tests.entrypoints.server_process import ServerProcess, mock_server, sample
from tests.entrypoints.test_openai_client import CHAT_PROMPT, PROMPT, TOKENIZER, engine_text


def run(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `stdout` is where its output goes."""
    command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", *arguments]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        command,
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


def test_version_names_the_operator_library() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert re.fullmatch(rf"fastdeploy {re.escape(__version__)}, operator library .+\n", done.stdout)


def test_a_reader_that_has_ended_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = run("config", "demo", stdout=output)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sreve"], "unknown command 'sreve'; did you mean 'serve'?"),
        (["dance"], "unknown command 'dance'; see fastdeploy --help"),
        (
            ["serve", "demo", "--device", "npu"],
            "--device: expected auto, cpu, gpu, or gpu:1 for the second GPU, got 'npu'",
        ),
        (["bench", "swerve"], "unknown command 'bench swerve'; did you mean 'serve'?"),
        (["chat", "--max-token", "3"], "--max-token: unknown flag; did you mean '--max-tokens'?"),
        (["chat", "--max-tokens", "0"], "--max-tokens: expected at least 1, got 0"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate: expected a positive number or inf, got 0"),
        (["bench", "latency", "--use-beam-search"], "--use-beam-search: not supported"),
        (
            ["bench", "latency", "demo", "--port", "1"],
            "--port: is refused, leave it out: it is a flag of the server, and this command runs none",
        ),
        (["bench", "throughput", "demo", "--sead", "5"], "--sead: unknown flag; did you mean '--seed'?"),
        (["complete", "--quick"], "--quick: expected one argument"),
        (
            ["complete", "--url", "ftp://localhost"],
            "--url: expected an address such as http://localhost:8000, got 'ftp://localhost'",
        ),
        (["chat", "--url", "http:///v1"], "--url: expected an address such as http://localhost:8000, got 'http:///v1'"),
        (["tokenizer", "-i"], "fastdeploy tokenizer: the following arguments are required: -m/--model"),
        (["tokenizer", "-m", "demo"], "fastdeploy tokenizer: no action given; see fastdeploy tokenizer --help"),
        (["tokenizer", "-m", "demo", "-d", "1 99999"], "--decode: token id 99999 is not in the vocabulary"),
    ],
)  # fmt: skip
def test_wrong_command_lines_end_in_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"fastdeploy: error: {message}\n"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("localhost:8000/v1/", "http://localhost:8000"),
        ("https://host/llm/v1", "https://host/llm"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_of_servers_may_have_a_scheme_and_v1(text: str, url: str) -> None:
    assert server_url(text) == url


def test_all_unknown_flags_of_a_command_are_named() -> None:
    done = run("chat", "--max-token", "3", "--temprature=1", "--dance")
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        [
            "fastdeploy: error: --max-token: unknown flag; did you mean '--max-tokens'?",
            "fastdeploy: error: --temprature: unknown flag; did you mean '--temperature'?",
            "fastdeploy: error: --dance: unknown flag; see fastdeploy chat --help",
        ],
    )
    assert "unknown argument; see fastdeploy chat --help" in run("chat", "hello").stderr


def test_help_lists_every_command_and_each_command_has_help() -> None:
    usage = run().stdout
    for command in COMMANDS:
        assert re.search(rf"^  {command} ", usage, re.MULTILINE)
    assert "--max-model-len" in run("serve", "--help").stdout
    assert "--system-prompt" in run("chat", "--help").stdout
    assert "--request-rate" in run("bench", "serve", "--help").stdout


def num_prompt_tokens(server: ServerProcess) -> int:
    return int(sample(server.get("/metrics").text, "fastdeploy:prompt_tokens_total") or 0)


def test_complete_prints_the_continuation(server: ServerProcess) -> None:
    done = run("complete", "--url", server.url + "/v1", "-q", PROMPT, "--temperature", "0", "--max-tokens", "9")
    assert (done.returncode, done.stdout) == (0, engine_text(PROMPT, 0, 9) + "\n")


def test_chat_keeps_the_conversation_until_the_input_ends(server: ServerProcess) -> None:
    flags = ["--url", server.url + "/v1", "--temperature", "0", "--max-tokens", "5", "--system-prompt", "be brief"]
    before = num_prompt_tokens(server)
    done = run("chat", *flags, stdin="hi\nmore\n")
    first = engine_text(CHAT_PROMPT, 0, 5)
    history = f"{CHAT_PROMPT[:-10]}assistant: {first}\nuser: more\nassistant:"
    second = engine_text(history, 0, 5)
    assert (done.returncode, done.stdout) == (0, f"> {first}\n> {second}\n> \n")
    sent = sum(len(TOKENIZER.encode(text, add_special_tokens=False)) for text in (CHAT_PROMPT, history))
    assert num_prompt_tokens(server) - before == sent, "the second prompt holds the first answer"


@pytest.mark.parametrize(
    ("command", "model", "line"),
    [
        ("chat", "smollm2", "model smollm2; try: How do plants make their food?"),
        ("complete", "smollm2", "model smollm2; try: The capital of Japan is"),
        ("chat", "demo/moe", "demo/moe continues Python source; try: def fibonacci(n):"),
    ],
)
def test_a_terminal_gets_something_to_try(command: str, model: str, line: str) -> None:
    terminal, end = pty.openpty()
    os.write(terminal, b"\x04")  # the end of the input
    arguments = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", command, "--model-name", model]
    done = subprocess.run(arguments, stdin=end, capture_output=True, text=True, timeout=60, check=False)
    os.close(terminal)
    os.close(end)
    assert (done.returncode, done.stdout.splitlines()) == (0, [line, "> "])


def test_reasoning_is_marked_in_the_output(tmp_path: Path) -> None:
    with mock_server(
        tmp_path, "--reasoning-parser", "qwen3", special_tokens=("<think>", "</think>"), script=True
    ) as running:
        message = "[[<think>twice two</think>four]]"
        done = run("chat", "--url", running.url + "/v1", "--max-tokens", "40", stdin=message + "\n")
    assert done.stdout == "> [reasoning] twice two\n[answer] four\n> \n"


def test_error_answer_does_not_end_the_conversation(server: ServerProcess) -> None:
    url = server.url.removeprefix("http://")
    flags = ["--url", url, "--temperature", "0", "--max-tokens", "5", "--system-prompt", "be brief"]
    done = run("chat", *flags, stdin="the " * 900 + "\nhi\n")
    assert done.returncode == 1
    assert done.stderr.count("fastdeploy: error: ") == 1
    assert f"> {engine_text(CHAT_PROMPT, 0, 5)}\n> \n" in done.stdout


def test_interrupt_stops_the_answer_and_not_the_conversation(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-model-len", "100000", step_s=0.02) as running:
        command = [sys.executable, "-m", "fastdeploy.entrypoints.cli.main", "chat", "--url", running.url + "/v1"]
        chat = subprocess.Popen(
            [*command, "--max-tokens", "50000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("hi\n")
        assert chat.stdout.read(3) != "> \n", "the answer has begun"
        chat.send_signal(signal.SIGINT)
        rest, _ = chat.communicate("", timeout=60)
    assert chat.returncode == 0
    assert rest.endswith("(stopped)\n> \n")


def test_key_comes_from_the_flag_or_the_environment(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--api-key", "sesame") as running:
        command = ["complete", "--url", running.url + "/v1", "-q", PROMPT, "--temperature", "0", "--max-tokens", "3"]
        assert run(*command).returncode == 1
        assert run(*command, "--api-key", "sesame").stdout == engine_text(PROMPT, 0, 3) + "\n"
        assert run(*command, env={"OPENAI_API_KEY": "sesame"}).stdout == engine_text(PROMPT, 0, 3) + "\n"


def test_unreachable_server_and_refused_request_are_one_line(server: ServerProcess) -> None:
    unreachable = run("chat", "--url", "http://127.0.0.1:9/v1", "-q", "hi")
    assert unreachable.returncode == 1
    assert unreachable.stderr.startswith("fastdeploy: error: cannot reach http://127.0.0.1:9/v1: ")
    refused = run("complete", "--url", server.url + "/v1", "-q", PROMPT, "--temperature", "-1")
    assert refused.returncode == 1
    assert refused.stderr.startswith("fastdeploy: error: temperature: expected a number")


def test_tokenizer_encodes_decodes_and_exports(tmp_path: Path) -> None:
    file = tmp_path / "vocab.json"
    done = run("tokenizer", "-m", "demo", "-vs", "-e", "def f", "-d", "[298, 302]", "-ve", str(file))
    assert done.stdout == f'4096\n[1, 298, 302]\n"def f"\n4096 tokens written to {file}\n'
    assert json.loads(file.read_text())["def"] == 298


def test_collect_env_reports_the_machine_and_masks_secrets() -> None:
    secret = {"FD_API_KEY": "sesame", "FD_LOG_LEVEL": "ERROR"}
    text = run("collect-env", env=secret).stdout
    assert f"fastdeploy: {__version__}\n" in text
    assert "sesame" not in text and "FD_API_KEY: ***" in text and "FD_LOG_LEVEL: ERROR" in text
    report = json.loads(run("collect-env", "--json", env=secret).stdout)
    assert re.search(r"usable of \d+", report["cpu"]["cores"])
    assert report["memory"]["total"].endswith(" GiB")
    assert re.search(r"\(path \w+\)$", report["operator library"])
    assert report["gpu operator library"]


def test_collect_env_reports_why_an_item_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ITEMS, "memory", lambda: 1 // 0)
    report = collect()
    assert report["memory"] == "not available: ZeroDivisionError: integer division or modulo by zero"
    assert report["fastdeploy"] == __version__
