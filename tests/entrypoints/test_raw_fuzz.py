# SPDX-License-Identifier: Apache-2.0
"""Requests with damaged bytes: each gets a typed response or a closed connection, and no memory stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.entrypoints.raw_fuzzing import FLAGS, RawOutcome, find_raw_fault, make_raw_request, resident_bytes, send_raw
from tests.entrypoints.server_process import ServerProcess, mock_server
from tests.entrypoints.test_border_fuzz import check_nothing_is_left

WARM_UP, BATCH = 1000, 2000
MAX_GROWTH, MAX_GROWTH_BYTES = 0.05, 64 * 2**20


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("raw") / "model"
    folder.mkdir()
    with mock_server(folder, "--max-model-len", "200", *FLAGS, tokens_per_step=2) as running:
        yield running


def fuzz(server: ServerProcess, seed: int, count: int) -> RawOutcome:
    rng = random.Random(seed)
    address = urlsplit(server.url)
    assert address.hostname and address.port
    requests = [(make_raw_request(rng), rng.random() < 0.1) for _ in range(count)]
    outcome = asyncio.run(send_raw((address.hostname, address.port), requests))
    assert outcome.faults == []
    return outcome


def test_damaged_requests_get_typed_responses_or_a_closed_connection(fuzzed: ServerProcess) -> None:
    outcome = fuzz(fuzzed, 30, 1000)
    assert {200, 400, 404, 405, 408, 414, 431} <= set(outcome.statuses)
    assert outcome.statuses[200] > 50
    check_nothing_is_left(fuzzed)


def test_checks_of_the_raw_fuzz_can_fail() -> None:
    typed = b'{"error": {"message": "x", "type": "t", "param": null, "code": "c"}}'
    json_type = {"content-type": "application/json"}
    assert find_raw_fault(400, json_type, typed) is None and find_raw_fault(503, json_type, typed) is None
    assert find_raw_fault(500, json_type, typed) and find_raw_fault(502, json_type, typed)
    assert find_raw_fault(400, {"content-type": "text/plain"}, typed)
    assert find_raw_fault(400, json_type, b'{"error": {"message": "x"}}')


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_requests_leave_no_memory(fuzzed: ServerProcess) -> None:
    pids = [fuzzed.process.pid, *fuzzed.engine_pids()]
    assert len(pids) == 2
    fuzz(fuzzed, 1, WARM_UP)
    before = [resident_bytes(pid) for pid in pids]
    for seed in range(10):
        fuzz(fuzzed, 1000 + seed, BATCH)
        check_nothing_is_left(fuzzed)
    growth = [resident_bytes(pid) - old for pid, old in zip(pids, before)]
    print(f"growth after {10 * BATCH} requests, API and engine: {growth} bytes of {before}")
    assert all(more <= max(MAX_GROWTH * old, MAX_GROWTH_BYTES) for more, old in zip(growth, before))
