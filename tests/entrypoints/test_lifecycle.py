# SPDX-License-Identifier: Apache-2.0
"""Start, disconnects, drain, and death of a real server process with the mock engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy.ipc.heartbeat import heartbeat_file
from fastdeploy.version import __version__
from tests.entrypoints.server_process import ServerProcess, mock_server, sample
from tests.mock_engine import save_mock_model

COMPLETION = {"model": "default", "prompt": "the", "max_tokens": 100, "seed": 1}
WAITING_FOR_4 = "Shutting down: waiting up to 30 s for 4 requests; press Ctrl-C again to end at once"


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.02)
    pytest.fail(f"never came true: {what}")


def metric(server: ServerProcess, name: str) -> float:
    return sample(server.get("/metrics").text, "fastdeploy:" + name) or 0.0


def run_to_end(*flags: str, env: dict[str, str] | None = None) -> ServerProcess:
    server = ServerProcess(list(flags), env=env)
    try:
        server.wait_end()
    finally:
        server.close()
    return server


def num_connections(server: ServerProcess) -> int:
    """Return the number of connections to the server's port."""
    port = f":{int(server.url.rsplit(':', 1)[1]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class StreamInThread:
    """Reads a streamed completion to its end in a thread."""

    def __init__(self, server: ServerProcess, **change: Any) -> None:
        self.lines: list[str] = []
        self.started = threading.Event()
        self._body = {**COMPLETION, "stream": True, **change}
        self._url = server.url + "/v1/completions"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.started.wait(30)

    def events(self) -> list[dict[str, Any]]:
        self._thread.join(30)
        assert self.lines and self.lines[-1] == "data: [DONE]", self.lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.lines.append(line)
                    self.started.set()


def test_start_up_shows_the_model_a_summary_notes_and_one_ready_line(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--enable-logprob") as server:
        assert server.stdout.count("Ready: http://127.0.0.1:") == 1
        assert "6400 tokens" in server.stdout and "speculation  off" in server.stdout
        assert "note: --enable-logprob True has no effect: log-probabilities are always available" in server.stdout
        assert server.stdout.splitlines()[0] == f"FastDeploy {__version__}, loading {tmp_path}"
        assert "weights" not in server.stderr, "progress is for terminals"
        assert server.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        (["--max-modle-len", "5"], {}, "--max-modle-len: unknown flag; did you mean '--max-model-len'?"),
        (["--max-model-len", "0"], {}, "--max-model-len: expected an integer in [1, 2147483647], or auto, got 0"),
        (["--splitwise-role", "decode"], {}, "--splitwise-role: 'decode' needs --scheduler-name splitwise"),
        (["--max-model-len", "4M"], {}, "--max-model-len: 4194304 is more than the model's limit of 2097152 tokens"),
        (["--workers", "0"], {}, "--workers: expected an integer in [1, 256], got 0"),
        ([], {"config_error": "no weights in it"}, "--model: no weights in it"),
    ],
)
def test_an_unusable_configuration_is_one_line_and_status_2(
    tmp_path: Path, flags: list[str], options: dict[str, Any], message: str
) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, **options)), *flags)
    assert server.process.returncode == 2
    errors = [line for line in server.stderr.splitlines() if not line.startswith("weights")]
    assert len(errors) == 1
    assert errors[0].startswith(f"fastdeploy: error: {message}")


@pytest.mark.parametrize(
    ("error", "reason"),
    [("MemoryError", "cannot allocate 5 bytes"), ("RuntimeError", "can't start new thread"), ("MemoryError", "")],
)
def test_too_little_memory_is_one_line_and_status_2(tmp_path: Path, error: str, reason: str) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, start_error=[error, reason and f"{reason}\nin a library"])))
    assert server.process.returncode == 2
    shown = reason or "no reason is given"
    assert [line for line in server.stderr.splitlines() if not line.startswith("weights")] == [
        f"fastdeploy: error: memory: not enough for the model and this configuration: {shown}"
    ]


def test_other_errors_of_the_start_are_not_called_a_lack_of_memory(tmp_path: Path) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, start_error=["RuntimeError", "something else"])))
    assert server.process.returncode == 1
    assert "  | RuntimeError: something else" in server.stderr


def test_a_real_engine_under_a_limit_of_memory_is_one_line_and_status_2() -> None:
    command = f"ulimit -v 700000; exec {sys.executable} -m fastdeploy.entrypoints.openai.api_server demo --port 0"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("fastdeploy: error: memory: not enough for the model and this configuration: ")
    assert done.stderr.count("\n") == 1


def test_traceback_is_printed_only_with_fd_debug(tmp_path: Path) -> None:
    server = run_to_end(str(tmp_path / "missing"), env={"FD_DEBUG": "1"})
    assert "Traceback" in server.stderr and server.process.returncode != 0
    plain = run_to_end(str(tmp_path / "missing"))
    assert "Traceback" not in plain.stderr and plain.process.returncode == 2


def test_port_in_use_is_reported_before_the_model_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = run_to_end(str(save_mock_model(tmp_path)), "--port", port)
    assert server.process.returncode == 2
    expected = f"fastdeploy: error: --port: cannot listen on port {port} of 127.0.0.1: Address already in use"
    assert server.stderr.splitlines() == [expected]


def test_host_that_is_no_address_is_named(tmp_path: Path) -> None:
    server = run_to_end(str(save_mock_model(tmp_path)), "--host", "no such host")
    assert server.process.returncode == 2
    assert server.stderr.startswith("fastdeploy: error: --host: 'no such host' is not an address of this machine: ")


def test_engine_that_dies_while_starting_gives_status_1_and_the_end_of_its_log(tmp_path: Path) -> None:
    server = run_to_end(str(save_mock_model(tmp_path, die_at_start=True)))
    assert server.process.returncode == 1
    assert "the engine process ended with status 3" in server.stderr
    assert "the mock engine cannot start" in server.stderr


def accepts_connections(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_requests_get_503_while_the_model_loads(tmp_path: Path) -> None:
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    server = ServerProcess([str(save_mock_model(tmp_path, load_s=6)), "--port", str(port)])
    try:
        server.url = f"http://127.0.0.1:{port}"
        until(lambda: accepts_connections(port), "the port is open before the model is loaded", 30)
        health = server.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        refused = server.post("/v1/completions", COMPLETION)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the model is loading")
        server.terminate()
        assert server.wait_end() == 0
    finally:
        server.close()


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_client_frees_its_blocks(tmp_path: Path, stream: bool) -> None:
    with mock_server(tmp_path, step_s=0.02) as server:
        body = {**COMPLETION, "max_tokens": 2000, "stream": stream, "n": 2}
        if stream:
            with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
                next(lines)
                assert metric(server, "num_requests_running") == 2
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/completions", json=body, timeout=0.5)
        until(lambda: metric(server, 'request_success_total{finish_reason="abort"}') == 2, "both choices aborted")
        assert metric(server, "num_requests_running") == 0
        assert metric(server, "available_gpu_block_num") == 100
        assert server.get("/load").json()["num_requests"] == 0


def test_sigterm_lets_running_requests_finish_and_exits_0(tmp_path: Path) -> None:
    with mock_server(tmp_path, step_s=0.02) as server:
        [engine] = server.engine_pids()
        streams = [StreamInThread(server, request_id=f"r{i}") for i in range(4)]
        server.terminate()
        until(lambda: WAITING_FOR_4 in server.stdout, "it says what it waits for")
        refused = server.post("/v1/completions", COMPLETION)
        error = refused.json()["error"]
        assert (refused.status_code, error["message"], error["code"]) == (
            503,
            "the server is shutting down",
            "shutting_down",
        )
        assert server.get("/health").json() == {"status": "draining"}
        for stream in streams:
            events = stream.events()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.wait_end() == 0
        assert is_gone(engine)


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
def test_requests_that_outlast_the_graceful_time_end_with_a_typed_error(tmp_path: Path, flags: list[str]) -> None:
    """Also those that have no tokens yet, and those that wait until others have ended."""
    flags = ["--timeout-graceful-shutdown", "0.5", "--max-concurrency", "4", "--max-waiting-time", "-1", *flags]
    with mock_server(tmp_path, *flags, step_s=0.05) as server, ThreadPoolExecutor(8) as threads:
        stream = StreamInThread(server, max_tokens=2000)
        wholes = [threads.submit(server.post, "/v1/completions", {**COMPLETION, "max_tokens": 2000}) for _ in range(8)]
        until(lambda: num_connections(server) == 9, "all have arrived")
        until(lambda: server.get("/load").json()["num_requests"] >= 2, "some are admitted")
        server.terminate()
        expected = {
            "message": "the server shut down before the request was finished (--timeout-graceful-shutdown 0.5)",
            "type": "service_unavailable_error",
            "param": None,
            "code": "shutting_down",
        }
        assert stream.events()[-1] == {"error": expected}
        for whole in wholes:
            assert (whole.result(30).status_code, whole.result().json()["error"]["code"]) == (503, "shutting_down")
        assert server.wait_end() == 0
        assert re.search(r"Shutting down: waiting up to 0\.5 s for [234] requests; press Ctrl-C again", server.stdout)


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
def test_second_interrupt_ends_the_server_and_its_children_at_once(tmp_path: Path, flags: list[str]) -> None:
    with mock_server(tmp_path, "--timeout-graceful-shutdown", "0", *flags, step_s=0.05, hold=True) as server:
        (tmp_path / "hold").touch()
        children = server.engine_pids()
        assert len(children) == (1 if not flags else 3)
        with httpx.stream("POST", server.url + "/v1/completions", json={**COMPLETION, "stream": True}) as response:
            lines = response.iter_lines()  # kept: a generator that is dropped closes the connection
            next(lines)
            server.process.send_signal(signal.SIGINT)
            waiting = "Shutting down: waiting for 1 request; press Ctrl-C again to end at once"
            until(lambda: waiting in server.stdout, "it says what it waits for")
            server.process.send_signal(signal.SIGINT)
            assert server.wait_end() == -signal.SIGINT
            until(lambda: all(is_gone(pid) for pid in children), "the children have ended")


def test_a_server_without_requests_ends_without_waiting(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        server.terminate()
        assert server.wait_end() == 0
        assert server.stdout.splitlines()[-1] == "Shutting down"


def test_api_keys_are_not_in_the_environment_of_child_processes(tmp_path: Path) -> None:
    env = {"FD_API_KEY": "the-secret", "OPENAI_API_KEY": "another-secret", "FD_LOG_LEVEL": "WARNING"}
    with mock_server(tmp_path, "--workers", "2", env=env) as server:
        children = server.engine_pids()
        assert len(children) == 3
        for pid in children:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"secret" not in environment and b"FD_LOG_LEVEL=WARNING" in environment
            assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert server.post("/v1/completions", COMPLETION).status_code == 401
        headers = {"Authorization": "Bearer the-secret"}
        assert server.post("/v1/completions", COMPLETION, headers=headers).status_code == 200


@pytest.mark.parametrize("flags", [[], ["--workers", "2"]])
def test_while_the_engine_is_stopped_health_is_503_and_new_requests_are_refused(
    tmp_path: Path, flags: list[str]
) -> None:
    with mock_server(tmp_path, *flags, step_s=0.02) as server:
        [engine] = [p for p in server.engine_pids() if b"engine_process" in Path(f"/proc/{p}/cmdline").read_bytes()]
        stream = StreamInThread(server)
        os.kill(engine, signal.SIGSTOP)
        address = Path(f"/proc/{engine}/cmdline").read_text().split("\0--address\0")[1].split("\0")[0]
        then_ns = time.monotonic_ns() - 11_000_000_000
        os.utime(heartbeat_file(address), ns=(then_ns, then_ns))  # as if it had been stopped 11 s ago
        time.sleep(1.1)  # a process believes in a younger beat that it has seen
        until(lambda: server.get("/health").json() == {"status": "stalled"}, "it is noticed")
        for path in ("/health", "/ping"):
            assert (server.get(path).status_code, server.get(path).json()) == (503, {"status": "stalled"})
        refused = server.post("/v1/completions", COMPLETION)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], refused.headers["retry-after"]) == (503, "stalled", "1")
        assert error["message"] == "the engine does not respond"
        until(lambda: "its process is stopped" in server.stderr, "it is logged")
        os.kill(engine, signal.SIGCONT)
        until(lambda: server.get("/health").status_code == 200, "it continues")
        assert stream.events()[-1]["choices"][0]["finish_reason"] == "length"


def test_sigusr1_writes_the_stacks_of_all_threads_of_the_process_that_gets_it(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--workers", "2") as server:
        row = re.search(r"^  processes    (server \d+, API \d+ \d+, engine \d+)$", server.stdout, re.MULTILINE)
        assert row, server.stdout
        pids = [int(number) for number in re.findall(r"\d+", row[1])]
        assert pids[0] == server.process.pid and sorted(pids[1:]) == sorted(server.engine_pids())
        for count, pid in enumerate(pids, 1):
            os.kill(pid, signal.SIGUSR1)
            until(lambda count=count: server.stderr.count("Current thread 0x") == count, f"stacks of {pid}")  # type: ignore[misc]
        until(lambda: "in _beat_forever" in server.stderr, "those of the engine")
        for module in ("api_server.py", "api_worker.py", "engine_process.py"):
            assert re.search(rf'File ".*/{module}", line \d+ in ', server.stderr), module
        assert server.get("/health").status_code == 200


def test_killed_engine_ends_every_stream_with_a_typed_error_and_the_server_with_status_1(tmp_path: Path) -> None:
    with mock_server(tmp_path, step_s=0.02) as server:
        [engine] = server.engine_pids()
        streams = [StreamInThread(server, request_id=f"r{i}", max_tokens=2000) for i in range(3)]
        os.kill(engine, signal.SIGKILL)
        for stream in streams:
            error = stream.events()[-1]["error"]
            assert error["type"] == "service_unavailable_error"
            assert "the engine process ended with status -9" in error["message"]
        assert server.wait_end() == 1
        assert "fastdeploy: error: the engine process ended with status -9; the last lines of its log:" in server.stderr


def test_engine_does_not_outlive_a_server_that_was_killed(tmp_path: Path) -> None:
    with mock_server(tmp_path, step_s=0.02) as server:
        [engine] = server.engine_pids()
        server.process.kill()
        until(lambda: is_gone(engine), "the engine has ended")


def test_poisoned_request_shows_the_end_of_the_engine_s_log(tmp_path: Path) -> None:
    with mock_server(tmp_path, die_at_token=300) as server:
        response = server.post("/v1/completions", {**COMPLETION, "prompt": [300]})
        assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
        assert server.wait_end() == 1
        assert "  | the mock engine dies at this token" in server.stderr


def test_logs_go_to_the_folder_as_json(tmp_path: Path) -> None:
    model, logs = tmp_path / "model", tmp_path / "logs"
    model.mkdir()
    env = {"FD_LOG_DIR": str(logs), "FD_LOG_FORMAT": "json"}
    with mock_server(model, env=env) as server:
        response = server.post("/v1/completions", {**COMPLETION, "max_tokens": 7}).json()
        server.terminate()
        assert server.wait_end() == 0
    [line] = [json.loads(line) for line in (logs / "api_server.log").read_text().splitlines()]
    assert (line["request_id"], line["completion_tokens"], line["finish_reason"]) == (response["id"], 7, "length")
    assert (logs / "engine.log").exists()


def test_metrics_port_serves_the_metrics(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with mock_server(tmp_path, "--metrics-port", str(port)) as server:
        server.post("/v1/completions", {**COMPLETION, "max_tokens": 7})
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert sample(text, "fastdeploy:generation_tokens_total") == 7


def test_api_process_does_not_load_paddle(tmp_path: Path) -> None:
    with mock_server(tmp_path) as server:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
        assert "paddle" not in Path(f"/proc/{server.process.pid}/maps").read_text()
