# SPDX-License-Identifier: Apache-2.0
"""Random requests: every one gets a valid response, none an internal error, and none leaves anything behind."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.entrypoints.fuzzing import Outcome, find_fault, make_request, send_all
from tests.entrypoints.server_process import ServerProcess, mock_server, real_server

BATCH = 2000
REAL = ["demo", "--max-num-seqs", "8", "--max-model-len", "256", "--tool-call-parser", "hermes"]
DRAFTS = ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
REASONING = ["--reasoning-parser", "qwen3"]


def fuzz(server: ServerProcess, seed: int, count: int) -> Outcome:
    rng = random.Random(seed)
    outcome = asyncio.run(send_all(server.url, [make_request(rng) for _ in range(count)]))
    assert outcome.faults == []
    assert sum(outcome.statuses.values()) + outcome.num_left == count
    return outcome


def check_nothing_is_left(server: ServerProcess) -> None:
    """Send a last request, which updates the counters, and check that all blocks are free."""
    assert server.post("/v1/completions", {"prompt": "the", "max_tokens": 1}).status_code == 200
    load = server.get("/load").json()
    for _ in range(200):
        if load["num_running"] + load["num_waiting"] + load["num_requests"] == 0:
            break
        server.post("/v1/completions", {"prompt": "the", "max_tokens": 1})
        load = server.get("/load").json()
    assert (load["num_requests"], load["num_running"], load["num_waiting"]) == (0, 0, 0)
    assert load["num_free_blocks"] == load["num_blocks"]
    assert "Traceback" not in server.stderr


def test_all_requests_get_responses_and_leave_nothing_behind(server: ServerProcess) -> None:
    outcome = fuzz(server, 20, 600)
    assert {200, 400, 404} <= set(outcome.statuses) and outcome.num_left > 10
    check_nothing_is_left(server)


def test_the_real_engine_leaves_nothing_behind() -> None:
    with real_server(*REAL, *DRAFTS) as running:
        outcome = fuzz(running, 21, 150)
        assert outcome.statuses[200] > 20
        check_nothing_is_left(running)


def test_checks_of_the_fuzz_can_fail() -> None:
    error = '{"error": {"message": "x", "type": "t", "param": null, "code": "internal_error"}}'
    assert find_fault(500, "application/json", error) and find_fault(422, "application/json", error)
    assert find_fault(400, "application/json", '{"error": {"message": "x"}}')
    assert find_fault(200, "text/event-stream", "data: {}\n\n")
    assert find_fault(200, "text/event-stream", f"data: {error}\n\ndata: [DONE]\n\n")
    assert find_fault(400, "application/json", error) is None
    messages = '{"type": "error", "error": {"type": "x", "message": "m", "details": {"error_code": "c"}}%s}'
    assert find_fault(400, "application/json", messages % ', "request_id": "1"') is None
    assert find_fault(400, "application/json", messages % "") and find_fault(422, "application/json", messages % "")
    start, fault = 'event: message_start\ndata: {"type":"x"}\n\n', 'event: error\ndata: {"type":"api_error"}\n\n'
    assert find_fault(200, "text/event-stream", start) and find_fault(200, "text/event-stream", start + fault)
    assert find_fault(200, "text/event-stream", start + "event: message_stop\ndata: {}\n\n") is None


@pytest.mark.nightly
def test_twenty_thousand_requests(tmp_path: Path) -> None:
    with mock_server(tmp_path, "--max-model-len", "200", tokens_per_step=2) as running:
        for seed in range(9):
            fuzz(running, 100 + seed, BATCH)
            check_nothing_is_left(running)
    for flags in (DRAFTS, REASONING, []):
        with real_server(*REAL, *flags) as running:
            fuzz(running, 200, BATCH)
            check_nothing_is_left(running)
