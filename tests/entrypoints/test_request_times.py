# SPDX-License-Identifier: Apache-2.0
"""From when the times of a request count, and which of them answers show; the engine is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import httpx
import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.generation_defaults import GenerationDefaults
from fastdeploy.config.server_config import ServerConfig
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import RequestMetrics, TokenDelta
from fastdeploy.core.stats import EngineStats
from fastdeploy.entrypoints.openai.app import make_app
from fastdeploy.entrypoints.openai.request_metrics import per_request_metrics
from fastdeploy.entrypoints.openai.server import ApiServer
from fastdeploy.ipc.messages import Ready
from tests.detokenize.tokenizers_for_tests import make_tokenizer

BODIES = {
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
    "/v1/responses": {"input": "the", "max_output_tokens": 1},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "the"}], "max_tokens": 1},
}


class FakeEngine:
    """Ends each request with one token as soon as it may; keeps the requests."""

    def __init__(self) -> None:
        self.ready = Ready(200, 383, [1], {})
        self.dead_error = None
        self.is_stalled = False
        self.stats = EngineStats()
        self.requests: list[GenerationRequest] = []
        self.may_end = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[TokenDelta], None]:
        self.requests.append(request)
        await self.may_end.wait()
        yield [TokenDelta(request.request_id, 0, [5], finish_reason="length", metrics=RequestMetrics(0.0, 0.0))]


def make_server(engine: FakeEngine, **fields: object) -> ApiServer:
    config = ServerConfig(served_model_name=("m",), **fields)  # type: ignore[arg-type]
    tokenizer = make_tokenizer("byte_level")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ApiServer(
        config,
        EngineConfig(model="m"),
        engine,  # type: ignore[arg-type]
        tokenizer,
        GenerationDefaults(),
        chat_template=template,
    )


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", BODIES)
def test_a_request_has_arrived_when_its_body_has_and_before_it_waits_for_the_concurrency(path: str) -> None:
    async def run() -> None:
        engine = FakeEngine()
        server = make_server(engine, max_concurrency=1, max_waiting_time=-1)
        transport = httpx.ASGITransport(make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            begin_s = time.monotonic()
            first = asyncio.create_task(client.post(path, json=BODIES[path]))
            await until(lambda: engine.requests)
            second = asyncio.create_task(client.post(path, json=BODIES[path]))
            await until(lambda: server.limiter._waiting)
            admitted_s = time.monotonic()
            engine.may_end.set()
            assert [(await task).status_code for task in (first, second)] == [200, 200]
        arrivals = [request.arrived_s for request in engine.requests]
        assert None not in arrivals
        assert begin_s < arrivals[0] < arrivals[1] < admitted_s  # type: ignore[operator]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (RequestMetrics(0.25, 0.75, 2.75), (250.0, 750.0, 2000.0, 500.0, 2.0)),
        (RequestMetrics(0.25, None, 2.75), (250.0, None, None, None, None)),  # aborted in its prefill
        (RequestMetrics(None, None, 2.75), (None, None, None, None, None)),  # aborted while it waited
        (RequestMetrics(None, 0.75, 2.75), (None, 750.0, 2000.0, 500.0, None)),  # nobody knows when it began
    ],
)
def test_time_to_first_token_of_an_answer_contains_the_time_in_the_queue(
    metrics: RequestMetrics, expected: tuple[float | None, ...]
) -> None:
    async def run() -> None:
        server = make_server(FakeEngine(), enable_per_request_metrics=True)
        shown = per_request_metrics(server, TokenDelta("r", 0, metrics=metrics), 5)
        assert shown is not None
        assert (
            shown.queue_time_ms,
            shown.time_to_first_token_ms,
            shown.generation_time_ms,
            shown.mean_itl_ms,
            shown.tokens_per_second,
        ) == expected

    asyncio.run(run())
