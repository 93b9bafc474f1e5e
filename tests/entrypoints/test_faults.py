# SPDX-License-Identifier: Apache-2.0
"""A fault in the handling of one request, in real processes, is a 500 of that request and of no other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastdeploy.core.faults import POINTS
from fastdeploy.metrics.logs import ENGINE_LOG, SERVER_LOG
from tests.entrypoints.server_process import ServerProcess, real_server
from tests.fault_points import API_POINTS, BATCH_POINTS, CLUSTER_POINTS

MTP = '{"method": "mtp", "num_speculative_tokens": 4, "mtp_strategy": "with_ngram", "adaptive": false}'
FLAGS = ("demo", "--max-model-len", "512", "--num-gpu-blocks-override", "200", "--speculative-config", MTP)
BODY: dict[str, Any] = {"model": "demo", "prompt": "def f(", "max_tokens": 24, "ignore_eos": True}
OF_REQUESTS = [point for point in POINTS if point not in (*BATCH_POINTS, *CLUSTER_POINTS)]
FAULTS = ",".join(["propose:raise", "observe:raise", *(f"{point}:raise@the-{point}" for point in OF_REQUESTS)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with real_server(*FLAGS, env={"FD_DEBUG": "1", "FD_FAULT": FAULTS, "FD_LOG_DIR": str(folder)}) as running:
        yield running


@pytest.fixture(scope="module")
def choices(server: ServerProcess, folder: Path) -> list[Any]:
    """The choices of sixteen requests without a fault of their own; meanwhile, two steps lose their drafts."""
    answers = post_all(server, batch())
    assert [answer.status_code for answer in answers] == [200] * 16
    wait_for_log(folder, ENGINE_LOG, "the proposer failed; this step has no drafts\n  Traceback")
    wait_for_log(folder, ENGINE_LOG, "the drafting model failed; this step has no drafts\n  Traceback")
    return [answer.json()["choices"] for answer in answers]


def batch(point: str | None = None) -> list[dict[str, Any]]:
    """Return sixteen requests; the seventh is the one for which `point` is armed."""
    bodies = [{**BODY, "seed": seed, "logprobs": 1 if seed % 3 == 0 else None} for seed in range(16)]
    bodies[6] |= {"guided_regex": f"[a-z]{{10}}[0-9]+({point}){{0}}", "stop": ["9"], "request_id": f"the-{point}"}
    return bodies


def post_all(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(lambda body: server.post("/v1/completions", body), bodies))


def wait_for_log(folder: Path, name: str, text: str) -> None:
    """Wait until a log holds a text; the engine's is written by the server, as soon as it has read it."""
    end_s = time.monotonic() + 30
    while text not in (folder / name).read_text():
        assert time.monotonic() < end_s, text
        time.sleep(0.01)


@pytest.mark.parametrize("point", OF_REQUESTS)
def test_a_fault_is_a_500_of_its_request_in_a_batch_of_sixteen(
    server: ServerProcess, choices: list[Any], folder: Path, point: str
) -> None:
    answers = post_all(server, batch(point))
    failed = answers.pop(6)
    error = failed.json()["error"]
    assert (failed.status_code, error["type"], error["code"]) == (500, "internal_error", "internal_error")
    assert error["message"].startswith("internal error (request ")
    assert [answer.json().get("choices") for answer in answers] == choices[:6] + choices[7:]
    log = SERVER_LOG if point in API_POINTS else ENGINE_LOG
    wait_for_log(folder, log, f"fastdeploy.core.faults.InjectedFault: FD_FAULT: {point}\n")
    assert server.get("/health").status_code == 200


def test_a_fault_of_a_step_ends_the_server_with_a_typed_error() -> None:
    with real_server(*FLAGS, env={"FD_DEBUG": "1", "FD_FAULT": "run:raise"}) as running:
        answer = running.post("/v1/completions", BODY)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (503, "service_unavailable_error")
        assert error["message"] == "the engine process ended with status 1"
        assert running.wait_end() == 1
    assert "fastdeploy.core.faults.InjectedFault: FD_FAULT: run\n" in running.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"FD_FAULT": "comit:raise", "FD_DEBUG": "1"}, "got 'comit:raise'; did you mean 'commit'?; points: parse, "),
        ({"FD_FAULT": "commit:raise", "FD_DEBUG": "0"}, "FD_FAULT: is for tests and needs FD_DEBUG=1"),
    ],
)
def test_a_server_does_not_start_with_a_wrong_fault(env: dict[str, str], message: str) -> None:
    running = ServerProcess(["demo"], env=env)
    assert running.wait_end() == 2
    assert message in running.stderr
