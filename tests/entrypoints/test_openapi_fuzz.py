# SPDX-License-Identifier: Apache-2.0
"""Requests generated from the OpenAPI document get responses that the document describes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import randoms
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from tests.entrypoints.error_table import VALID
from tests.entrypoints.openapi_fields import make_document
from tests.entrypoints.raw_fuzzing import resident_bytes
from tests.entrypoints.server_process import ServerProcess

MAX_GROWTH, MAX_GROWTH_BYTES = 0.05, 64 * 2**20


def no_fault_of_the_server(ctx: Any, response: Any, case: Any) -> None:
    """Allow no status from 500 on but 503 and, for the request's own `timeout`, 504."""
    assert response.status_code < 500 or response.status_code in (503, 504), response.text


CHECKS = [
    no_fault_of_the_server,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
NUM_OPERATIONS = {GenerationMode.POSITIVE: 21, GenerationMode.NEGATIVE: 11}


def some_fields(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return up to three fields: a request with a generated value in every field is nearly always refused."""
    return {name: body[name] for name in rng.sample(sorted(body), min(len(body), rng.randrange(4)))}


def run(server: ServerProcess, mode: GenerationMode, max_examples: int) -> int:
    """Send up to `max_examples` requests to every operation, wrong ones to those with a body; return their number."""
    schema = schemathesis.openapi.from_dict(make_document(has_flags=False))
    schema.config.update(base_url=server.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    if mode is GenerationMode.NEGATIVE:
        operations = [operation for operation in operations if operation.body]
    options = settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations:

        @seed(5)
        @options
        @given(case=operation.as_strategy(generation_mode=mode), rng=randoms(use_true_random=False))
        def send(case: Any, rng: random.Random) -> None:
            if mode is GenerationMode.POSITIVE and case.path in VALID:
                case.body = {**VALID[case.path], **some_fields(case.body, rng)}
            case.call_and_validate(checks=CHECKS, timeout=60)

        send()
    return len(operations)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_generated_requests_get_documented_responses(server: ServerProcess, mode: GenerationMode) -> None:
    assert run(server, mode, 30) == NUM_OPERATIONS[mode]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_many_generated_requests_get_documented_responses_and_leave_no_memory(
    server: ServerProcess, mode: GenerationMode
) -> None:
    pids = [server.process.pid, *server.engine_pids()]
    run(server, mode, 100)
    before = [resident_bytes(pid) for pid in pids]
    assert run(server, mode, 1000) == NUM_OPERATIONS[mode]
    growth = [resident_bytes(pid) - old for pid, old in zip(pids, before)]
    print(f"growth, API and engine: {growth} bytes of {before}")
    assert all(more <= max(MAX_GROWTH * old, MAX_GROWTH_BYTES) for more, old in zip(growth, before))
