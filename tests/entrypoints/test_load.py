# SPDX-License-Identifier: Apache-2.0
"""Many clients, slow clients, idle clients and clients that disconnect."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.server_process import ServerProcess, mock_server, real_server
from tests.entrypoints.test_lifecycle import COMPLETION, StreamInThread, metric, until

NUM_STREAMS = 64
PROMPTS = (
    "def read(path):\n    with open(path) as",
    "class Stack:\n    def push(self, item):\n",
    "The quick brown fox",
    "import os\nimport sys\n\n\ndef main():\n",
)


def rss_mib(pid: int) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


def address(server: ServerProcess) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def send(server: ServerProcess, receive_buffer: int | None = None, **change: Any) -> socket.socket:
    """Send a streamed request on a new socket and return the socket, unread."""
    body = json.dumps({**COMPLETION, "stream": True, **change}).encode()
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect(address(server))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    connection.settimeout(60)
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """Return the events of a chunked response, which must be complete."""
    rest, parts = raw.split(b"\r\n\r\n", 1)[1], []
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    *lines, done = b"".join(parts).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    """The real engine with the demonstration model and n-gram speculation."""
    speculation = '{"method": "ngram", "num_speculative_tokens": 4}'
    with real_server(
        "demo", "--max-num-seqs", str(NUM_STREAMS), "--max-model-len", "256", "--speculative-config", speculation
    ) as server:
        yield server


@pytest.fixture
def mock(tmp_path: Path) -> Iterator[ServerProcess]:
    """A mock engine with a little time per step."""
    with mock_server(tmp_path, step_s=0.01) as server:
        yield server


def demo_body(i: int) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[i % len(PROMPTS)] * (1 + i % 3),
        "max_tokens": 12 + i % 9,
        "temperature": (0, 0.8)[i % 2],
        "seed": i,
        "ignore_eos": True,
    }


def test_concurrent_streams_give_the_texts_of_solo_runs_and_leak_no_block(demo: ServerProcess) -> None:
    solo = [demo.post("/v1/completions", demo_body(i)).json()["choices"][0]["text"] for i in range(NUM_STREAMS)]

    def streamed(i: int) -> str:
        events = events_of(read_to_end(send(demo, **demo_body(i))))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        return "".join(event["choices"][0]["text"] for event in events)

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        assert list(threads.map(streamed, range(NUM_STREAMS))) == solo
    load = demo.get("/load").json()
    assert (load["num_requests"], load["num_running"], load["num_waiting"]) == (0, 0, 0)
    assert load["num_free_blocks"] == load["num_blocks"] == metric(demo, "available_gpu_block_num")
    assert metric(demo, 'request_success_total{finish_reason="length"}') == 2 * NUM_STREAMS


def test_api_process_stays_within_its_memory(demo: ServerProcess) -> None:
    for i in range(20):
        demo.post("/v1/completions", {**demo_body(i), "logprobs": 5})
    assert rss_mib(demo.process.pid) < 120


def test_requests_beyond_max_concurrency_get_429_and_retry_after(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-concurrency", "4", step_s=0.01) as server, ExitStack() as stack:
        running = [stack.enter_context(send(server, max_tokens=300)) for _ in range(4)]
        until(lambda: server.get("/load").json()["num_requests"] == 4, "four are running")
        assert server.get("/load").json()["server_load"] == 4
        for _ in range(10):
            refused = server.post("/v1/completions", COMPLETION)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "server_overloaded"
        for connection in running:
            assert read_to_end(connection).count(b"data: [DONE]") == 1
        assert server.post("/v1/completions", {**COMPLETION, "max_tokens": 2}).status_code == 200


def test_client_that_does_not_read_costs_little_memory_and_blocks_no_other(tmp_path: Path) -> None:
    endless = {"max_tokens": 1_000_000, "logprobs": 3}
    with mock_server(tmp_path, "--max-model-len", "1100000", tokens_per_step=100) as server:
        read_to_end(send(server, max_tokens=2000, logprobs=3))
        before = rss_mib(server.process.pid)
        with ExitStack() as stack:
            stalled = [stack.enter_context(send(server, receive_buffer=4096, **endless)) for _ in range(3)]
            aborted = 'request_success_total{finish_reason="abort"}'
            until(lambda: metric(server, aborted) == 3, "the unread streams are aborted", 120)
            assert rss_mib(server.process.pid) - before < 3 * 20
            assert b"data: [DONE]" in read_to_end(send(server, max_tokens=2000))
            assert metric(server, "num_requests_running") == 0
            error = events_of(read_to_end(stalled[0]))[-1]["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "stream")
            assert "tokens unread" in error["message"]
        until(lambda: server.get("/load").json()["num_requests"] == 0, "no request is running")


def test_slow_reader_gets_the_complete_text(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-model-len", "20000", tokens_per_step=50) as server:
        whole = server.post("/v1/completions", {**COMPLETION, "max_tokens": 15000}).json()["choices"][0]["text"]
        with send(server, receive_buffer=4096, max_tokens=15000) as connection:
            until(lambda: metric(server, "num_requests_running") == 0, "the engine is done before the client reads")
            events = events_of(read_to_end(connection))
        assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_half_closed_connections_leave_nothing_behind(mock: ServerProcess) -> None:
    for _ in range(5):
        with send(mock, max_tokens=2000) as connection:
            connection.shutdown(socket.SHUT_WR)
            read_to_end(connection)
    with socket.create_connection(address(mock)) as connection:  # half a request, then nothing more
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{")
        connection.shutdown(socket.SHUT_WR)
        read_to_end(connection)
    until(lambda: metric(mock, "available_gpu_block_num") == 100, "all blocks are free")
    assert mock.get("/load").json()["num_requests"] == 0


def test_a_thousand_idle_connections_block_no_request(mock: ServerProcess) -> None:
    with ExitStack() as stack:
        for i in range(1000):
            connection = stack.enter_context(socket.create_connection(address(mock)))
            if i % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: ")  # the head is never completed
        streams = [StreamInThread(mock, request_id=f"r{i}", max_tokens=20) for i in range(4)]
        for stream in streams:
            assert stream.events()[-1]["choices"][0]["finish_reason"] == "length"


def test_disconnected_clients_free_their_blocks_while_others_run(mock: ServerProcess) -> None:
    kept = StreamInThread(mock, request_id="kept", max_tokens=100)
    for _ in range(20):
        send(mock, max_tokens=2000).close()
    until(lambda: metric(mock, "num_requests_running") <= 1, "only the connected one runs")
    assert kept.events()[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: metric(mock, "available_gpu_block_num") == 100, "all blocks are free")
