# SPDX-License-Identifier: Apache-2.0
"""Forms that never compile cost their own client time, and nobody else; real engine, demonstration model."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.server_process import ServerProcess, real_server
from tests.entrypoints.test_lifecycle import until

FLAGS = ("--max-model-len", "256", "--num-gpu-blocks-override", "80", "--api-key", "hostile", "--api-key", "polite")
TRIAL = "fastdeploy.structured_output.trial_process"


def endless(number: int) -> dict[str, Any]:
    """Return a form whose compilation takes minutes; it is not among the known ones, which are refused at once."""
    return {"guided_grammar": f'start: "{number}" %json {{"type": "number", "multipleOf": 2147483648}}'}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with real_server("demo", *FLAGS) as running:
        yield running


def complete(server: ServerProcess, key: str, **body: Any) -> httpx.Response:
    body = {"model": "demo", "prompt": "x", "max_tokens": 5, **body}
    return server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})


def test_known_forms_are_refused_at_once_with_their_limit(server: ServerProcess) -> None:
    response = complete(server, "hostile", guided_json={"type": "number", "multipleOf": 2147483648})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_json")
    assert "at most 5 significant digits, got 2147483648" in error["message"]
    response = complete(server, "hostile", guided_grammar=" " * 4000)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")


def test_forms_that_never_compile_delay_nobody_else(server: ServerProcess) -> None:
    order: list[str] = []

    def send(name: str, key: str, **body: Any) -> httpx.Response:
        response = complete(server, key, **body)
        order.append(name)
        return response

    with ThreadPoolExecutor(8) as threads:
        bad: list[Future[httpx.Response]] = []
        for i in range(3):
            bad.append(threads.submit(send, "bad", "hostile", **endless(i)))
        until(lambda: len(trials_running(server)) == 2, "two forms are tried")
        good = send("good", "polite", guided_regex="[ab]{3}")
        plain = send("plain", "polite")
        wait(bad)
    assert good.status_code == plain.status_code == 200
    assert len(good.json()["choices"][0]["text"]) == 3
    assert order[-1] == "bad"  # of three, two of which were being tried when the other client's came
    for future in bad:
        response = future.result()
        assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_grammar")
        assert response.json()["error"]["message"].endswith(
            "takes more than 2 s of processor time or 512 MiB to compile"
        )


def test_the_trials_end_with_a_killed_engine() -> None:
    with real_server("demo", *FLAGS) as server:
        assert complete(server, "polite", guided_regex="[ab]{3}").status_code == 200
        [engine] = server.engine_pids()
        [trial] = children(engine)
        os.kill(engine, signal.SIGKILL)
        server.wait_end()
        until(lambda: not Path(f"/proc/{trial}").exists(), "the process for trials has ended")


def children(pid: int) -> list[int]:
    """Return the process ids of the trials that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields, command = (
                (folder / "stat").read_text().rpartition(")")[2].split(),
                (folder / "cmdline").read_bytes(),
            )
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and TRIAL.encode() in command:
            found.append(int(folder.name))
    return found


def trials_running(server: ServerProcess) -> list[int]:
    """Return the process ids of the trials that are trying a form now, each a child of its process."""
    return [child for engine in server.engine_pids() for trial in children(engine) for child in children(trial)]
