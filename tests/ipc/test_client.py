# SPDX-License-Identifier: Apache-2.0
"""Streams of an engine client, and start and end of its engine process, with the mock engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.seeds import choice_seed
from fastdeploy.ipc import messages
from fastdeploy.ipc.client import EngineClient
from fastdeploy.ipc.connection import EngineConnection
from fastdeploy.ipc.streams import MAX_UNREAD, DeltaStream
from tests.ipc.engine_clients import collect, expected_tokens, request, running, tokens, until
from tests.mock_engine import FACTORY, save_mock_model

Scenario = Callable[[EngineClient], Awaitable[None]]


def test_concurrent_requests_get_their_own_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, tokens_per_step=3) as client:
            assert client.ready is not None
            vocab_size = client.ready.vocab_size
            requests = [request(f"r{i}", n=2, seed=i, max_tokens=20 + i) for i in range(8)]
            results = await asyncio.gather(*(collect(client, generation) for generation in requests))
            for i, result in enumerate(results):
                for index in (0, 1):
                    assert tokens(result[index]) == expected_tokens(choice_seed(i, index), 20 + i, vocab_size)
                    last = result[index][-1]
                    assert (last.finish_reason, last.seed) == ("length", choice_seed(i, index))
                    assert last.speculate_metrics is not None and last.speculate_metrics.accept_ratio == 0.75
            assert client.num_requests == 0
            assert client.stats.num_finished == {"length": 16}

    asyncio.run(scenario())


def test_closing_a_stream_early_aborts_the_request_and_frees_its_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client:
            async with contextlib.aclosing(client.generate(request("r", seed=1, max_tokens=300))) as stream:
                await anext(stream)
                with pytest.raises(InvalidRequestError, match="in flight"):
                    await collect(client, request("r"))
            await until(lambda: client.stats.num_finished == {"abort": 1}, "the engine aborted")
            await until(lambda: client.num_requests == 0, "the id is free")
            assert client.stats.num_running == 0
            again = await collect(client, request("r", seed=1, max_tokens=3))
            assert len(tokens(again[0])) == 3

    asyncio.run(scenario())


def test_closing_a_stream_with_an_unread_end_frees_its_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            async with contextlib.aclosing(client.generate(request("r", max_tokens=30))) as stream:
                await anext(stream)
                await until(lambda: client._streams["r"].num_open == 0, "its end has arrived")
            assert client.num_requests == 0

    asyncio.run(scenario())


def test_request_with_too_many_unread_tokens_is_aborted_and_its_id_freed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, tokens_per_step=MAX_UNREAD // 8, max_model_len=MAX_UNREAD * 4) as client:
            for leaves_early in (True, False):
                async with contextlib.aclosing(client.generate(request("r", max_tokens=MAX_UNREAD * 3))) as stream:
                    await anext(stream)
                    await until(lambda: client._streams["r"].error is not None, "it is ended")
                    if not leaves_early:
                        with pytest.raises(InvalidRequestError, match="tokens unread"):
                            await anext(stream)
                            await anext(stream)
                assert client.num_requests == 0
            await until(lambda: client.stats.num_finished == {"abort": 2}, "both are aborted")

    asyncio.run(scenario())


def test_connection_marked_dead_before_its_start_does_not_wait() -> None:
    async def scenario() -> None:
        connection = EngineConnection("ipc:///nowhere")
        connection.mark_dead("it ended")
        with pytest.raises(EngineDeadError, match="it ended"):
            await asyncio.wait_for(connection.start(), 30)
        await connection.close()

    asyncio.run(scenario())


def test_unread_tokens_with_many_alternatives_count_as_with_twenty() -> None:
    stream = DeltaStream("r", 1)
    for num_top, count in ((0, 2), (3, 10), (20, 52), (150_000, 94)):
        entry = TokenLogprobs(5, -1.0, 1, [(5, -1.0)] * num_top)
        stream.put(TokenDelta("r", 0, [5, 6], logprobs=[entry, entry]))
        assert stream.num_unread == count, num_top


def test_a_stream_may_pass_its_deltas_on_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    received: list[TokenDelta] = []

    class Renaming(DeltaStream):
        def put(self, delta: TokenDelta) -> None:
            super().put(delta)
            delta.request_id = "of the client"
            received.append(delta)

    async def scenario() -> None:
        async with running(tmp_path) as client:
            client.run(request("of the engine", max_tokens=1), Renaming("of the engine", 1))
            await until(lambda: client.num_requests == 0, "the stream is dropped at its end")

    asyncio.run(scenario())
    assert received[-1].finish_reason == "length"
    assert "cannot read" not in caplog.text


def test_received_message_is_read_although_something_was_sent_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.002) as client:
            for i in range(10):
                task = asyncio.create_task(collect(client, request(f"r{i}", max_tokens=5)))
                while client.num_requests == 0:
                    await asyncio.sleep(0)
                time.sleep(0.05)  # the loop is blocked while the engine runs and its message waits in the socket
                client.abort(f"r{i}")
                last = (await asyncio.wait_for(task, 30))[0][-1]
                assert last.finish_reason in ("length", "abort")  # abort where the machine was too busy to finish

    asyncio.run(scenario())


def test_abort_ends_the_stream_with_that_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client:
            task = asyncio.create_task(collect(client, request("r", max_tokens=300)))
            await until(lambda: client.num_requests == 1, "the request is in flight")
            assert client.abort("r") and not client.abort("unknown")
            assert (await task)[0][-1].finish_reason == "abort"

    asyncio.run(scenario())


def test_compiling_a_grammar_delays_no_other_request_and_can_be_aborted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            (tmp_path / "compiling").touch()
            constraint = GuidedDecodingParams(regex="a+")
            kept, aborted, named = (
                asyncio.create_task(collect(client, request(name, guided_decoding=constraint, max_tokens=3)))
                for name in ("kept", "aborted", "named")
            )
            await asyncio.sleep(0)  # they are sent
            assert len(tokens((await collect(client, request(max_tokens=3)))[0])) == 3
            assert client.abort("aborted")
            assert await client.abort_requests(["named"]) == [("named", 0)]
            for task in (aborted, named):
                assert (await task)[0][-1].finish_reason == "abort"
            assert not kept.done()
            (tmp_path / "compiling").unlink()
            assert len(tokens((await kept)[0])) == 3

    asyncio.run(scenario())


def test_refusal_fails_its_request_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            client._handle(messages.Ready(1, 1, [], {}))  # a second Ready changes nothing
            other = asyncio.create_task(collect(client, request("other", max_tokens=5)))
            stream = client.generate(request("twin", max_tokens=5))
            await anext(stream)
            client._handle(messages.Rejected("twin", "invalid", "stop", "no"))
            with pytest.raises(InvalidRequestError, match="stop: no"):
                while True:
                    await anext(stream)
            assert len(tokens((await other)[0])) == 5

    asyncio.run(scenario())


def test_killed_engine_fails_current_and_later_requests_with_a_typed_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01, die_at_token=77) as client:
            victim = asyncio.create_task(collect(client, request("victim", max_tokens=300)))
            await until(lambda: client.num_requests == 1, "the victim is in flight")
            poison = GenerationRequest("poison", [77], SamplingParams())
            with pytest.raises(EngineDeadError, match="ended with status -9"):
                await collect(client, poison)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(victim, 2.0)
            await asyncio.wait_for(client.wait_until_dead(), 2.0)
            assert client.log_tail()[-1] == "the mock engine dies at this token"
            with pytest.raises(EngineDeadError):
                await collect(client, request("late"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"config_error": "no weights here"}, ConfigError, "model: no weights here"),
        ({"die_at_start": True}, EngineDeadError, "ended with status 3"),
    ],
)
def test_engine_that_cannot_start_reports_the_reason(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    async def scenario() -> None:
        with pytest.raises(error, match=message):
            async with running(tmp_path, **options):
                pass

    asyncio.run(scenario())


def test_progress_of_loading_is_reported(tmp_path: Path) -> None:
    async def scenario() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        client = EngineClient(EngineConfig(model=str(save_mock_model(tmp_path))), factory=FACTORY)
        await client.start(lambda what, fraction: seen.append((what, fraction)))
        await client.close()
        return seen

    assert asyncio.run(scenario()) == [("weights", 0.0), ("weights", 0.5), ("weights", 1.0)]


def test_a_launched_engine_loads_the_model_before_anybody_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(save_mock_model(tmp_path))), factory=FACTORY)
        try:
            await client.launch()
            launched = client._child._process
            await until(lambda: client._connect().done(), "the model is loaded")
            await client.start()
            assert client.ready is not None and client._child._process is launched
        finally:
            await client.close()

    asyncio.run(scenario())


def test_the_error_of_a_launched_engine_is_raised_by_start_and_nobody_else_reports_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(waits: bool) -> None:
        config = EngineConfig(model=str(save_mock_model(tmp_path, config_error="no weights in it")))
        client = EngineClient(config, factory=FACTORY)
        try:
            await client.launch()
            await until(lambda: client._connect().done(), "the engine refuses its configuration")
            if waits:
                with pytest.raises(ConfigError, match="no weights in it"):
                    await client.start()
        finally:
            await client.close()

    for waits in (True, False):
        asyncio.run(scenario(waits))
        gc.collect()
    assert not caplog.records


def test_idle_engine_blocks_instead_of_spinning(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            await collect(client, request(max_tokens=3))
            process = client._child._process
            assert process is not None

            def cpu_ticks() -> int:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
                return int(fields[11]) + int(fields[12])

            before = cpu_ticks()
            await asyncio.sleep(0.5)
            assert cpu_ticks() - before <= 5, "a spinning process would have used some 50 ticks"

    asyncio.run(scenario())


def test_engine_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio
        from fastdeploy.config.engine_config import EngineConfig
        from fastdeploy.ipc.client import EngineClient

        async def main():
            client = EngineClient(EngineConfig(model={str(save_mock_model(tmp_path))!r}), factory={FACTORY!r})
            await client.start()
            print(client._child._process.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _is_alive(engine_pid):
        time.sleep(0.05)
    assert not _is_alive(engine_pid)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_many_streams_with_several_steps_per_message_lose_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.001) as client:
            assert client.ready is not None
            requests = [request(str(i), max_tokens=300, seed=i) for i in range(64)]
            found = await asyncio.gather(*(collect(client, generation) for generation in requests))
            for seed, choices in enumerate(found):
                assert tokens(choices[0]) == expected_tokens(choice_seed(seed, 0), 300, client.ready.vocab_size)
            assert max(len(delta.steps or [()]) for delta in found[0][0]) > 1

    asyncio.run(scenario())
