# SPDX-License-Identifier: Apache-2.0
"""Clients of a real engine process with the mock engine in it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ipc.client import EngineClient
from fastdeploy.ipc.connection import EngineConnection
from tests.mock_engine import FACTORY, next_token, save_mock_model


@contextlib.asynccontextmanager
async def running(folder: Path, max_model_len: int = 400, **options: Any) -> AsyncIterator[EngineClient]:
    """Run an engine process with the mock engine."""
    config = EngineConfig(model=str(save_mock_model(folder, **options)), max_model_len=max_model_len, seed=7)
    client = EngineClient(config, factory=FACTORY)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def request(request_id: str = "r", **params: Any) -> GenerationRequest:
    """Return a request of three prompt tokens."""
    return GenerationRequest(request_id, [10, 11, 12], SamplingParams(**params))


async def collect(client: EngineConnection, generation: GenerationRequest) -> dict[int, list[TokenDelta]]:
    """Return all deltas of a request, by choice."""
    found: dict[int, list[TokenDelta]] = {}
    async with contextlib.aclosing(client.generate(generation)) as stream:
        async for deltas in stream:
            for delta in deltas:
                found.setdefault(delta.index, []).append(delta)
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    """Return the tokens of consecutive deltas."""
    return [token_id for delta in deltas for token_id in delta.token_ids]


def expected_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Return what the mock engine emits for `request()`."""
    context = [10, 11, 12]
    for _ in range(count):
        context.append(next_token(context, seed, vocab_size))
    return context[3:]


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait up to 30 seconds for a condition."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never came true: {what}")


@contextlib.asynccontextmanager
async def connected(client: EngineClient, identity: bytes) -> AsyncIterator[EngineConnection]:
    """Open a second connection to the engine of `client`."""
    connection = EngineConnection(client.address, identity)
    try:
        await connection.start()
        yield connection
    finally:
        await connection.close()
