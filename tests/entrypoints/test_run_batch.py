# SPDX-License-Identifier: Apache-2.0
"""`fastdeploy run-batch`: a file of requests against real servers."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.entrypoints.cli.run_batch import _commonest_error, read_requests
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_cli import run
from tests.entrypoints.test_openai_client import CHAT_PROMPT, MESSAGES, PROMPT, engine_text

GREEDY = {"model": "default", "max_tokens": 4, "temperature": 0}


URLS = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages"
DEEP = "[" * 900 + "]" * 900


def line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {**GREEDY, "prompt": f"{PROMPT} {custom_id}"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body, **changes}


def write(folder: Path, *lines: Any) -> list[str]:
    """Write the input and return the flags that name it and its output."""
    texts = [entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False) for entry in lines]
    (folder / "in.jsonl").write_text("\n".join(texts) + "\n")
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]


def test_answers_keep_order_and_ids_and_an_invalid_request_does_not_end_the_run(
    server: ServerProcess, tmp_path: Path
) -> None:
    chat = {**GREEDY, "messages": MESSAGES, "logprobs": True}
    flags = write(
        tmp_path,
        line("long", body={**GREEDY, "prompt": PROMPT, "max_tokens": 90}),
        line("chat", url="/v1/chat/completions", body=chat),
        "",
        line("range", body={**GREEDY, "prompt": PROMPT, "temperature": -1}),
        line("field", body={**GREEDY, "prompt": PROMPT, "temprature": 1}),
        line("verb", method="GET"),
        line("route", url="/v1/embeddings"),
        line("stream", body={**GREEDY, "prompt": PROMPT, "stream": True}),
        line("last", body={**GREEDY, "prompt": PROMPT + "\u2028 is no end of a line"}),
        line("response", url="/v1/responses", body={"input": MESSAGES, "temperature": 0, "max_output_tokens": 4}),
        line("message", url="/v1/messages", body={**GREEDY, "messages": MESSAGES}),
    )
    done = run("run-batch", *flags, "--url", server.url, "--concurrency", "3")
    assert done.returncode == 0, "the file is written, and requests have succeeded"
    last = done.stderr.splitlines()[-1]
    found = re.fullmatch(r"5 of 10 requests succeeded, 5 failed; (\d+) tokens in \d+\.\d s; answers in \S+; (.*)", last)
    assert found is not None and found.group(2).startswith("commonest error (1 of 5): temperature: "), last
    written = answers(tmp_path)
    assert [entry["custom_id"] for entry in written] == [
        "long",
        "chat",
        "range",
        "field",
        "verb",
        "route",
        "stream",
        "last",
        "response",
        "message",
    ]
    bodies = {entry["custom_id"]: (entry["response"] or {}).get("body") for entry in written}
    usages = [bodies[name]["usage"] for name in ("long", "chat", "last", "response", "message")]
    names = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens")
    assert int(found.group(1)) == sum(usage.get(name, 0) for usage in usages for name in names)
    assert bodies["long"]["choices"][0]["text"] == engine_text(PROMPT, 0, 90)
    assert bodies["chat"]["choices"][0]["message"]["content"] == engine_text(CHAT_PROMPT, 0, 4)
    assert bodies["response"]["output"][0]["content"][0]["text"] == engine_text(CHAT_PROMPT, 0, 4)
    assert bodies["message"]["content"] == [{"type": "text", "text": engine_text(CHAT_PROMPT, 0, 4)}]
    assert len(bodies["chat"]["choices"][0]["logprobs"]["content"]) == 4
    assert written[0]["response"]["status_code"] == 200
    assert written[0]["response"]["request_id"] == bodies["long"]["id"]
    assert written[2]["response"]["status_code"] == 400 and bodies["range"]["error"]["param"] == "temperature"
    assert "did you mean 'temperature'" in bodies["field"]["error"]["message"]
    messages = {entry["custom_id"]: entry["error"]["message"] for entry in written if entry["error"]}
    assert messages == {
        "verb": "method: expected 'POST', got 'GET'",
        "route": f"url: expected one of {URLS}, got '/v1/embeddings'",
        "stream": "body.stream: streaming is not supported in batches",
    }
    assert not (tmp_path / "out.jsonl.part").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (f'"method": {DEEP}', "method: expected 'POST', got an array"),
        (
            f'"url": {DEEP}',
            f"url: expected one of {URLS}, got an array",
        ),
        (f'"body": {{"prompt": {DEEP}}}', "body: is nested too deeply: expected at most 64 levels"),
        ('"body": {"prompt": "a\\ud800"}', r"body: expected valid Unicode, got the lone surrogate '\ud800'"),
        ('"body": {"prompt": "a"}', ""),
    ],
)
def test_line_that_cannot_be_sent_gets_an_error_of_its_own(tmp_path: Path, change: str, error: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(line("a"))[:-1] + f", {change}}}")  # the last of equal keys counts
    [request] = read_requests(str(file))
    assert request.custom_id == "a" and request.error.startswith(error) and bool(request.error) == bool(error)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a"), line("b"), line("a")], "custom_id: 'a' occurs in lines 1 and 3"),
        ([line("a"), "{"], "line 2: not valid JSON"),
        ([line("a"), "[" * 100_000], "line 2: not valid JSON"),
        ([{"method": "POST"}], 'line 1: expected an object with a string "custom_id"'),
    ],
)
def test_input_without_unique_ids_is_refused(
    server: ServerProcess, tmp_path: Path, lines: list[Any], message: str
) -> None:
    done = run("run-batch", *write(tmp_path, *lines), "--url", server.url + "/v1")
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_of_which_no_request_succeeded_has_status_1_and_shows_the_commonest_error(
    server: ServerProcess, tmp_path: Path
) -> None:
    wrong = [line(name, body={**GREEDY, "prompt": PROMPT, "top_p": 5}) for name in "ab"]
    done = run("run-batch", *write(tmp_path, line("c", method="GET"), *wrong), "--url", server.url)
    assert done.returncode == 1 and len(answers(tmp_path)) == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("0 of 3 requests succeeded, 3 failed; 0 tokens in ")
    assert "; commonest error (2 of 3): top_p: expected " in last


def test_a_run_without_requests_has_status_0(server: ServerProcess, tmp_path: Path) -> None:
    done = run("run-batch", *write(tmp_path, ""), "--url", server.url)
    assert done.returncode == 0
    assert re.search(r"^0 of 0 requests succeeded, 0 failed; 0 tokens in \d+\.\d s; answers in \S+$", done.stderr, re.M)


def test_the_error_of_another_server_is_its_status() -> None:
    answer = {"error": None, "response": {"status_code": 404, "body": {"detail": "Not Found"}}}
    assert _commonest_error([answer]) == "; commonest error (1 of 1): status 404"


def test_interrupted_run_is_resumed(server: ServerProcess, tmp_path: Path) -> None:
    flags = write(tmp_path, line("a"), line("b"), line("c"))
    first = {"id": "kept", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    (tmp_path / "out.jsonl.part").write_text(json.dumps(first) + '\n{"id": "half a li')
    done = run("run-batch", *flags, "--url", server.url + "/v1", "--resume")
    assert done.returncode == 0, done.stderr
    written = answers(tmp_path)
    total = sum(entry["response"]["body"]["usage"]["total_tokens"] for entry in written[1:])
    assert f"3 of 3 requests succeeded, 0 failed; {total} tokens in " in done.stderr, "those of this run"
    assert [entry["custom_id"] for entry in written] == ["a", "b", "c"]
    assert written[0]["id"] == "kept"
    assert written[2]["response"]["body"]["choices"][0]["text"] == engine_text(PROMPT + " c", 0, 4)
    (tmp_path / "out.jsonl.part").write_text(json.dumps({**first, "custom_id": "z"}) + "\n")
    other = run("run-batch", *flags, "--url", server.url + "/v1", "--resume")
    assert other.returncode == 2 and "has the answers to a different input" in other.stderr


def test_outputs_that_are_no_regular_files_are_written_in_place(server: ServerProcess, tmp_path: Path) -> None:
    """Renaming a file over them, as root may, would replace a device of the system."""
    flags = write(tmp_path, line("a"), line("b"))[:2]
    fifo, device, link = tmp_path / "fifo", tmp_path / "device", tmp_path / "link"
    os.mkfifo(fifo)
    if os.geteuid() == 0:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # /dev/null
    else:
        device.symlink_to("/dev/null")
    link.symlink_to(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    for path in (fifo, link):
        done = run("run-batch", *flags, "-o", str(path), "--url", server.url + "/v1")
        assert done.returncode == 0, done.stderr
        assert [json.loads(text)["custom_id"] for text in os.read(reader, 2**16).splitlines()] == ["a", "b"]
    os.close(reader)
    assert run("run-batch", *flags, "-o", str(device), "--url", server.url + "/v1").returncode == 0
    assert fifo.is_fifo() and link.is_symlink() and device.is_char_device()
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "link"])
def test_standard_output_is_written_in_place_and_stays(server: ServerProcess, tmp_path: Path, name: str) -> None:
    """Also if it is a regular file that already has a line, and if a link leads there."""
    flags, path = write(tmp_path, line("a"))[:2], str(tmp_path / name)
    before = os.readlink("/dev/stdout")
    (tmp_path / "link").symlink_to("/dev/stdout")
    done = run("run-batch", *flags, "-o", path, "--url", server.url + "/v1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["custom_id"] == "a"
    with (tmp_path / "kept").open("w") as file:
        file.write("before\n")
        file.flush()
        assert run("run-batch", *flags, "-o", path, "--url", server.url + "/v1", stdout=file).returncode == 0
    first, second = (tmp_path / "kept").read_text().splitlines()
    assert (first, json.loads(second)["custom_id"]) == ("before", "a")
    assert os.readlink("/dev/stdout") == before
    refused = run("run-batch", *flags, "-o", path, "--url", server.url + "/v1", "--resume")
    assert refused.stderr == f"fastdeploy: error: --resume: not possible for {path!r}, which is no regular file\n"


def test_a_link_to_a_file_stays_and_the_file_is_replaced_when_the_run_is_complete(
    server: ServerProcess, tmp_path: Path
) -> None:
    flags = write(tmp_path, line("a"))
    (tmp_path / "target").write_text("old")
    (tmp_path / "out.jsonl").symlink_to("target")
    assert run("run-batch", *flags, "--url", server.url + "/v1").returncode == 0
    assert os.readlink(tmp_path / "out.jsonl") == "target"
    assert [entry["custom_id"] for entry in answers(tmp_path)] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "target"]


def test_a_folder_as_output_is_one_error(server: ServerProcess, tmp_path: Path) -> None:
    flags = write(tmp_path, line("a"))[:2]
    done = run("run-batch", *flags, "-o", str(tmp_path), "--url", server.url + "/v1")
    expected = f"fastdeploy: error: --output-file: cannot write {str(tmp_path)!r}: Is a directory"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, expected)


def test_request_is_sent_again_after_429(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-concurrency", "1", step_s=0.01) as running:
        flags = write(tmp_path, *(line(str(i)) for i in range(4)))
        done = run("run-batch", *flags, "--url", running.url + "/v1", "--concurrency", "4")
    assert done.returncode == 0, done.stderr
    assert [entry["response"]["status_code"] for entry in answers(tmp_path)] == [200] * 4


def test_dying_server_ends_the_run_in_one_line_and_leaves_whole_lines_only(tmp_path: Path) -> None:
    with mock_server(tmp_path, die_at_token=300, step_s=0.001) as running:
        first = run("run-batch", *write(tmp_path, line("a")), "--url", running.url + "/v1")
        assert first.returncode == 0
        (tmp_path / "out.jsonl").rename(tmp_path / "out.jsonl.part")
        flags = write(tmp_path, line("a"), *(line(str(i), body={**GREEDY, "prompt": [300]}) for i in range(6)))
        done = run("run-batch", *flags, "--url", running.url + "/v1", "--resume")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("; run again with --resume to continue")
    assert "never retrieved" not in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
    text = (tmp_path / "out.jsonl.part").read_text()
    assert text.endswith("\n") and json.loads(text)["custom_id"] == "a"


def test_private_server_is_started_with_the_engine_s_flags_and_stopped(tmp_path: Path) -> None:
    request = line("code", body={"model": "short", "prompt": "def f(", "max_tokens": 8, "temperature": 0})
    flags = write(tmp_path, request, line("too long", body={**request["body"], "prompt": [5] * 70}))
    done = run("run-batch", *flags, "--model", "demo", "--max-model-len", "64", "--served-model-name", "short")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("1 of 2 requests succeeded, 1 failed; ")
    good, bad = answers(tmp_path)
    assert good["response"]["body"]["usage"]["completion_tokens"] == 8
    assert bad["response"]["status_code"] == 400
    assert "Ready: http://127.0.0.1:" in done.stderr and "Shutting down" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "demo", "--port", "1"], "--port: not allowed for a private server; use --url for a running one"),
        (["--model", "demo", "--scheduler-name", "global"], "--scheduler-name: not allowed for a private server"),
        (
            ["--url", "http://localhost:1/v1", "--model", "demo"],
            "--model: not allowed with --url, which names a running server",
        ),
        (["--model", "demo", "--data-parallel-size", "2"], "--data-parallel-size 2: is refused, leave it out: data"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(tmp_path: Path, flags: list[str], message: str) -> None:
    done = run("run-batch", *write(tmp_path, line("a")), *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"fastdeploy: error: {message}")


def test_unreachable_server_is_one_line(tmp_path: Path) -> None:
    done = run("run-batch", *write(tmp_path, line("a")), "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "fastdeploy: error: cannot reach http://127.0.0.1:9/v1" in done.stderr
