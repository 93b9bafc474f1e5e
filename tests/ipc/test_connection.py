# SPDX-License-Identifier: Apache-2.0
"""Several connections to one engine process: aborts by id or salt, and connections that are lost."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from fastdeploy.core.errors import EngineDeadError, ShuttingDownError
from fastdeploy.core.generation_request import add_prompt_number
from tests.ipc.engine_clients import collect, connected, request, running, tokens, until


def test_abort_requests_ends_requests_of_any_connection_and_counts_their_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client, connected(client, b"other") as other:
            names = ("a", add_prompt_number("b", 0), f"c§{add_prompt_number('b', 1)}", "b-0", "c")
            tasks = {name: asyncio.create_task(collect(client, request(name, max_tokens=300))) for name in names}
            await until(lambda: client.stats.num_running == 5, "all run")
            ended = dict(await other.abort_requests(["a", "b", "unknown"]))
            assert ended.keys() == set(names[:3])
            for name, num_tokens in ended.items():
                deltas = (await tasks[name])[0]
                assert (deltas[-1].finish_reason, len(tokens(deltas))) == ("abort", num_tokens)
            assert {name for name, _ in await other.abort_requests(None)} == {"b-0", "c"}
            await asyncio.gather(*tasks.values())
            assert await client.abort_requests(None) == []

    asyncio.run(scenario())


def test_abort_requests_does_not_end_requests_with_another_salt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client:
            mine, theirs = request("mine", max_tokens=300), request("theirs", max_tokens=300)
            mine.cache_salt, theirs.cache_salt = "key1-tenant", "key2-tenant"
            tasks = [asyncio.create_task(collect(client, one)) for one in (mine, theirs)]
            await until(lambda: client.stats.num_running == 2, "both run")
            assert [name for name, _ in await client.abort_requests(["mine", "theirs"], "key1-")] == ["mine"]
            assert (await tasks[0])[0][-1].finish_reason == "abort"
            assert client.num_requests == 1
            client.abort("theirs")
            await tasks[1]

    asyncio.run(scenario())


def test_ended_requests_fail_with_the_given_error_and_leave_the_engine_and_later_ones_fail_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client, connected(client, b"other") as other:
            tasks = [asyncio.create_task(collect(client, request(name, max_tokens=300))) for name in "ab"]
            kept = asyncio.create_task(collect(other, request("kept", max_tokens=30)))
            await until(lambda: client.stats.num_running == 3, "all run")
            client.end_requests(ShuttingDownError("the end"))
            for task in (*tasks, asyncio.create_task(collect(client, request("late")))):
                with pytest.raises(ShuttingDownError, match="the end"):
                    await task
            assert client.num_requests == 0
            assert len(tokens((await kept)[0])) == 30
            await until(lambda: client.stats.num_finished == {"abort": 2, "length": 1}, "the engine aborted two")

    asyncio.run(scenario())


def test_requests_of_a_lost_connection_are_aborted_and_others_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.005) as client:
            kept = asyncio.create_task(collect(client, request("kept", seed=1, max_tokens=100)))
            async with connected(client, b"worker-1") as gone:
                lost = asyncio.create_task(collect(gone, request("lost", max_tokens=300)))
                await until(lambda: client.stats.num_running == 2, "both run")
                client.disconnect_client(b"worker-1")
                await until(lambda: client.stats.num_finished == {"abort": 1}, "the lost request is aborted")
                lost.cancel()
            assert len(tokens((await kept)[0])) == 100

    asyncio.run(scenario())


def test_waiting_for_aborts_fails_when_the_engine_process_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            process = client._child._process
            assert process is not None
            process.send_signal(signal.SIGSTOP)  # it answers nothing any more
            waiting = asyncio.create_task(client.abort_requests(None))
            await until(lambda: bool(client._pending_calls), "the message is sent")
            process.kill()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waiting, 30)
            with pytest.raises(EngineDeadError):
                await client.abort_requests(None)

    asyncio.run(scenario())
