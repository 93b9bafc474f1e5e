# SPDX-License-Identifier: Apache-2.0
"""A fault in the handling of one request, in the real engine process, is a 500 of that request and of no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.server_process import ServerProcess
from tests.faulty_engine import FACTORY, FAULTS

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "adaptive": false}'
FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "40", "--speculative-config", NGRAM)
BODY: dict[str, Any] = {"model": "demo", "prompt": "def f(", "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess(["demo", *FLAGS], factory=FACTORY)
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_500_of_its_request_while_another_one_runs(server: ServerProcess, fault: str) -> None:
    others: list[httpx.Response] = []
    body = {**BODY, "max_tokens": 100, "ignore_eos": True, "seed": 1}
    expected = server.post("/v1/completions", body).json()
    other = threading.Thread(target=lambda: others.append(server.post("/v1/completions", body)))
    other.start()
    response = server.post("/v1/completions", {**BODY, "max_tokens": 9, "guided_regex": fault})
    other.join()
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (500, "internal_error", "internal_error")
    assert error["message"].startswith("internal error (request cmpl-")
    assert [answer.status_code for answer in others] == [200]
    assert others[0].json()["choices"] == expected["choices"]
    assert server.get("/health").status_code == 200
