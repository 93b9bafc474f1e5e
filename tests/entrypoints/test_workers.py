# SPDX-License-Identifier: Apache-2.0
"""Several API processes on one port and one engine (mock engine, real processes)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server, sample
from tests.entrypoints.test_lifecycle import COMPLETION, StreamInThread, is_gone, metric, run_to_end, until
from tests.mock_engine import save_mock_model


def children(server: ServerProcess, module: str) -> list[int]:
    """Return the process ids of the server's children that run `module`; one that has just ended is left out."""
    found = []
    for pid in server.engine_pids():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if module in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def workers(server: ServerProcess) -> list[int]:
    return children(server, "openai.api_worker")


def connections(server: ServerProcess, pid: int) -> int:
    """Return the number of connections to the server's port that a process has."""
    port = f":{int(server.url.rsplit(':', 1)[1]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "01"}
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return sum(link in sockets for link in links)


class CutStream(threading.Thread):
    """Reads a stream whose connection may be lost."""

    def __init__(self, server: ServerProcess, **change: Any) -> None:
        super().__init__()
        self._url = server.url + "/v1/completions"
        self._body = {**COMPLETION, "stream": True, **change}
        self.started = threading.Event()
        self.text = ""
        self.is_lost = False
        self.start()
        assert self.started.wait(60)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    self.started.set()
                    self.text += line
        except httpx.HTTPError:
            self.is_lost = True


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of two API processes."""
    with mock_server(tmp_path, "--workers", "2", "--max-concurrency", "61", step_s=0.01, hold=True) as server:
        yield server


def test_all_workers_share_one_engine_and_one_page_of_metrics(pair: ServerProcess, tmp_path: Path) -> None:
    assert len(workers(pair)) == 2 and len(children(pair, "engine_process")) == 1
    hold = tmp_path / "hold"
    hold.touch()
    streams = [StreamInThread(pair, request_id=f"r{i}") for i in range(12)]
    until(lambda: pair.get("/load").json()["num_requests"] == 12, "every worker counts the requests of all")
    until(lambda: metric(pair, "num_requests_running") == 12, "the engine reports them")
    assert metric(pair, "num_requests_inside") == 12
    hold.unlink()
    texts = {"".join(e["choices"][0]["text"] for e in stream.events()) for stream in streams}
    assert len(texts) == 1
    for _ in range(6):  # by different workers
        page = pair.get("/metrics").text
        assert page.count("# TYPE fastdeploy:requests_number_total") == 1
        assert "# HELP fastdeploy:requests_number_total Requests" in page
        assert metric(pair, "requests_number_total") == metric(pair, "e2e_request_latency_seconds_count") == 12
        assert metric(pair, "generation_tokens_total") == 1200
        assert sample(page, 'http_requests_total{method="POST",path="/v1/completions",status_code="200"}') == 12


def test_request_ids_are_unique_across_workers(pair: ServerProcess) -> None:
    CutStream(pair, request_id="same", max_tokens=400)
    for _ in range(6):
        response = pair.post("/v1/completions", {**COMPLETION, "request_id": "same"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
    pair.close()


def test_each_worker_admits_its_share_of_max_concurrency(tmp_path: Path) -> None:
    body = {**COMPLETION, "max_tokens": 2000, "stream": True}
    flags = ("--workers", "2", "--max-concurrency", "3")
    with mock_server(tmp_path, *flags, step_s=0.02) as server, httpx.Client(timeout=60) as client:
        request = client.build_request("POST", server.url + "/v1/completions", json=body)
        responses = [client.send(request, stream=True)]
        while responses[-1].status_code == 200:
            responses.append(client.send(request, stream=True))
        assert 2 <= len(responses) - 1 <= 4, "two for each worker"
        assert (responses[-1].status_code, responses[-1].headers["retry-after"]) == (429, "1")
        assert "2 sequences are running, the maximum is 2 (--max-concurrency)" in responses[-1].read().decode()


def test_killed_worker_is_replaced_and_its_requests_leave_the_engine(pair: ServerProcess) -> None:
    streams = [CutStream(pair, request_id=f"r{i}", max_tokens=300) for i in range(6)]
    victim = max(workers(pair), key=lambda pid: connections(pair, pid))
    num_lost = connections(pair, victim)
    assert num_lost > 0
    os.kill(victim, signal.SIGKILL)
    aborted = 'request_success_total{finish_reason="abort"}'
    until(lambda: metric(pair, aborted) == num_lost, "the engine aborted the requests of the worker")
    until(lambda: len(workers(pair)) == 2 and victim not in workers(pair), "another worker replaces it")
    for stream in streams:
        stream.join(60)
    assert sum(stream.is_lost for stream in streams) == num_lost
    assert all(stream.text.endswith("data: [DONE]") for stream in streams if not stream.is_lost)
    until(lambda: metric(pair, "available_gpu_block_num") == 100, "all blocks are free")
    assert metric(pair, "num_requests_inside") == 0
    assert "ended with status -9" in pair.stderr
    [again] = re.findall(r"API process \d is started again as process (\d+)", pair.stderr)
    assert int(again) in workers(pair)
    for _ in range(6):
        assert pair.post("/v1/completions", {**COMPLETION, "max_tokens": 3}).status_code == 200


def test_a_fault_kills_each_worker_once_and_not_its_replacement(tmp_path: Path) -> None:
    env = {"FD_DEBUG": "1", "FD_FAULT": "tokenise:kill"}
    with mock_server(tmp_path, "--workers", "2", env=env) as server:
        first = set(workers(server))
        while first & set(workers(server)):
            with contextlib.suppress(httpx.HTTPError):
                server.post("/v1/completions", {**COMPLETION, "max_tokens": 3})
        until(lambda: len(workers(server)) == 2, "others replace them")
        second = workers(server)
        for _ in range(8):
            until(lambda: server.get("/health").status_code == 200, "they are connected")
            assert server.post("/v1/completions", {**COMPLETION, "max_tokens": 3}).status_code in (200, 503)
        assert workers(server) == second


def test_sigterm_drains_every_worker(pair: ServerProcess) -> None:
    [engine], api = children(pair, "engine_process"), workers(pair)
    streams = [StreamInThread(pair, request_id=f"r{i}") for i in range(8)]
    pair.terminate()
    for stream in streams:
        assert stream.events()[-1]["choices"][0]["finish_reason"] == "length"
    assert pair.wait_end() == 0
    assert all(is_gone(pid) for pid in (engine, *api))


def test_killed_engine_gives_every_client_a_typed_error_and_status_1(pair: ServerProcess) -> None:
    [engine], api = children(pair, "engine_process"), workers(pair)
    streams = [StreamInThread(pair, request_id=f"r{i}", max_tokens=1500) for i in range(6)]
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        error = stream.events()[-1]["error"]
        assert error["type"] == "service_unavailable_error"
        assert "the engine process ended with status -9" in error["message"]
    assert pair.wait_end() == 1
    assert "fastdeploy: error: the engine process ended with status -9; the last lines of its log:" in pair.stderr
    assert all(is_gone(pid) for pid in api)


def test_workers_and_engine_do_not_outlive_a_supervisor_that_was_killed(pair: ServerProcess) -> None:
    pids = pair.engine_pids()
    pair.process.kill()
    until(lambda: all(is_gone(pid) for pid in pids), "all have ended")


def test_an_unusable_configuration_is_one_line_with_workers_too(tmp_path: Path) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, config_error="no weights in it")), "--workers", "2")
    assert server.process.returncode == 2
    errors = [line for line in server.stderr.splitlines() if not line.startswith("weights")]
    assert errors == ["fastdeploy: error: --model: no weights in it"]


def test_engine_that_dies_while_starting_gives_status_1_with_workers_too(tmp_path: Path) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, die_at_start=True)), "--workers", "2")
    assert server.process.returncode == 1
    assert "the engine process ended with status 3" in server.stderr
    assert "the mock engine cannot start" in server.stderr


def test_metrics_port_shows_all_workers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with mock_server(tmp_path, "--workers", "2", "--metrics-port", str(port)) as server:
        for _ in range(5):
            server.post("/v1/completions", {**COMPLETION, "max_tokens": 3})
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert sample(page, f'fastdeploy:requests_number_total{{model_name="{tmp_path}"}}') == 5
        assert sample(page, "fastdeploy:available_gpu_block_num") == 100
