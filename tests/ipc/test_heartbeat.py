# SPDX-License-Identifier: Apache-2.0
"""Whether an engine that is stopped or hangs is noticed, and what is written about it, with the mock engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from fastdeploy.core.errors import EngineDeadError
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.ipc.client import EngineClient
from fastdeploy.ipc.heartbeat import heartbeat_file, silent_s
from tests.ipc.engine_clients import collect, connected, request, running, tokens, until

Records = pytest.LogCaptureFixture


def pid_of(client: EngineClient) -> int:
    process = client._child._process
    assert process is not None
    return process.pid


def let_time_pass(client: EngineClient, seconds: float) -> None:
    """Move the last beat into the past."""
    then_ns = time.monotonic_ns() - int(seconds * 1e9)
    os.utime(heartbeat_file(client.address), ns=(then_ns, then_ns))


def test_a_beat_is_the_monotonic_clock_and_no_file_is_no_silence(tmp_path: Path) -> None:
    file = heartbeat_file(f"ipc://{tmp_path}/engine")
    assert file == f"{tmp_path}/heartbeat"
    assert silent_s(file) == 0.0
    Path(file).touch()
    then_ns = time.monotonic_ns() - 7_000_000_000
    os.utime(file, ns=(then_ns, then_ns))
    assert 7.0 <= silent_s(file) < 60.0


def test_a_stopped_engine_is_stalled_until_it_continues_and_then_finishes_its_requests(
    tmp_path: Path, caplog: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client, connected(client, b"worker") as other:
            task = asyncio.create_task(collect(client, request(max_tokens=30)))
            await until(lambda: client.num_requests == 1, "the request is in flight")
            assert not client.is_stalled
            os.kill(pid_of(client), signal.SIGSTOP)
            let_time_pass(client, 7.0)
            await asyncio.sleep(1.1)  # a younger beat would be believed without a look
            assert not client.is_stalled
            let_time_pass(client, 11.0)
            await until(lambda: client.is_stalled and other.is_stalled, "both see it")
            await until(lambda: len(caplog.records) == 1, "it is reported")
            await asyncio.sleep(1.2)  # two more looks
            os.kill(pid_of(client), signal.SIGCONT)
            await until(lambda: not client.is_stalled, "it beats again")
            assert len(tokens((await task)[0])) == 30
            await until(lambda: len(caplog.records) == 2, "that is reported, too")
            assert not any("Thread 0x" in line for line in client.log_tail()), "a stopped process has no stacks to show"

    monkeypatch.setattr(logging.getLogger("fastdeploy"), "propagate", True)
    with caplog.at_level(logging.WARNING, "fastdeploy.server"):
        asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "the engine has not responded for 10 s; its process is stopped",
        "the engine responds again",
    ]


def test_an_engine_whose_native_call_keeps_the_global_lock_does_not_beat_and_shows_where_it_hangs(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with running(tmp_path, hang_at_token=77) as client:
            stream = asyncio.create_task(collect(client, GenerationRequest("r", [77], SamplingParams())))
            await until(lambda: (tmp_path / "hangs").exists(), "the engine is inside the native call")
            before_s = silent_s(heartbeat_file(client.address))
            await asyncio.sleep(1.5)
            assert silent_s(heartbeat_file(client.address)) > before_s + 1.4
            let_time_pass(client, 11.0)
            await until(lambda: any("in main" in line for line in client.log_tail()), "the stacks are in the log")
            await asyncio.sleep(1.2)  # two more looks
            stacks = [line for line in client.log_tail() if "(most recent call first)" in line]
            assert sum(line.startswith("Current thread 0x") or "Thread 0x" in line for line in stacks) >= 2
            assert any("in _hang" in line for line in client.log_tail())
            assert any("in _beat_forever" in line for line in client.log_tail())
            assert sum("in main" in line for line in client.log_tail()) == 1, "the stacks are written once"
            os.kill(pid_of(client), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await stream

    asyncio.run(scenario())
