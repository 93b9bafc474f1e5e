# SPDX-License-Identifier: Apache-2.0
"""The engine process and its client, with a real child process and the mock engine in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.errors import ConfigError, EngineDeadError, InvalidRequestError
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.outputs import TokenDelta, TokenLogprobs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams, SpeculativeParams
from fastdeploy.core.seeds import choice_seed
from fastdeploy.ipc import messages
from fastdeploy.ipc.client import EngineClient
from fastdeploy.ipc.connection import MAX_UNREAD, EngineConnection
from fastdeploy.ipc.merge import merge_deltas
from tests.mock_engine import FACTORY, next_token, save_mock_model

Scenario = Callable[[EngineClient], Awaitable[None]]


@contextlib.asynccontextmanager
async def running(folder: Path, max_model_len: int = 400, **options: Any) -> AsyncIterator[EngineClient]:
    config = EngineConfig(model=str(save_mock_model(folder, **options)), max_model_len=max_model_len, seed=7)
    client = EngineClient(config, factory=FACTORY)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def request(request_id: str = "r", **params: Any) -> GenerationRequest:
    return GenerationRequest(request_id, [10, 11, 12], SamplingParams(**params))


async def collect(client: EngineClient, asked: GenerationRequest) -> dict[int, list[TokenDelta]]:
    found: dict[int, list[TokenDelta]] = {}
    async with contextlib.aclosing(client.generate(asked)) as stream:
        async for deltas in stream:
            for delta in deltas:
                found.setdefault(delta.index, []).append(delta)
    return found


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def expected_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    context = [10, 11, 12]
    for _ in range(count):
        context.append(next_token(context, seed, vocab_size))
    return context[3:]


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never came true: {what}")


def test_requests_come_back_with_their_tokens_whatever_runs_beside_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, tokens_per_step=3) as client:
            assert client.ready is not None
            vocab_size = client.ready.vocab_size
            asked = [request(f"r{i}", n=2, seed=i, max_tokens=20 + i) for i in range(8)]
            results = await asyncio.gather(*(collect(client, one) for one in asked))
            for i, result in enumerate(results):
                for index in (0, 1):
                    assert tokens(result[index]) == expected_tokens(choice_seed(i, index), 20 + i, vocab_size)
                    last = result[index][-1]
                    assert (last.finish_reason, last.seed) == ("length", choice_seed(i, index))
                    assert last.speculate_metrics is not None and last.speculate_metrics.accept_ratio == 0.75
            assert client.num_requests == 0
            assert client.stats.num_finished == {"length": 16}

    asyncio.run(scenario())


def test_leaving_a_stream_early_aborts_the_request_and_its_id_may_be_used_again(tmp_path: Path) -> None:
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


def test_leaving_a_stream_whose_end_waits_unread_frees_its_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            async with contextlib.aclosing(client.generate(request("r", max_tokens=30))) as stream:
                await anext(stream)
                await until(lambda: client._streams["r"].num_open == 0, "its end has arrived")
            assert client.num_requests == 0

    asyncio.run(scenario())


def test_request_that_nobody_reads_is_ended_and_its_id_freed(tmp_path: Path) -> None:
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
            await until(lambda: client.stats.num_finished == {"abort": 2}, "the engine let go of both")

    asyncio.run(scenario())


def test_connection_that_hears_of_the_death_before_it_starts_does_not_wait() -> None:
    async def scenario() -> None:
        connection = EngineConnection("ipc:///nowhere")
        connection.die("it ended")
        with pytest.raises(EngineDeadError, match="it ended"):
            await asyncio.wait_for(connection.start(), 30)
        await connection.close()

    asyncio.run(scenario())


def test_answer_that_waits_is_read_although_something_was_sent_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.002) as client:
            for turn in range(10):
                asked = asyncio.create_task(collect(client, request(f"r{turn}", max_tokens=5)))
                while client.num_requests == 0:
                    await asyncio.sleep(0)
                time.sleep(0.05)  # the loop sleeps, the engine goes on, its answer waits in the socket
                client.abort(f"r{turn}")
                last = (await asyncio.wait_for(asked, 30))[0][-1]
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


def test_requests_whose_grammar_is_being_compiled_hold_up_nobody_and_can_be_aborted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            (tmp_path / "compiling").touch()
            form = GuidedDecodingParams(regex="a+")
            kept, aborted, named = (
                asyncio.create_task(collect(client, request(name, guided_decoding=form, max_tokens=3)))
                for name in ("kept", "aborted", "named")
            )
            await asyncio.sleep(0)  # they are sent
            assert len(tokens((await collect(client, request(max_tokens=3)))[0])) == 3
            assert client.abort("aborted")
            assert await client.abort_requests(["named"]) == [("named", 0)]
            assert not kept.done() and not aborted.done() and not named.done()
            (tmp_path / "compiling").unlink()
            assert len(tokens((await kept)[0])) == 3
            for task in (aborted, named):
                [delta] = (await task)[0]
                assert (delta.finish_reason, delta.token_ids) == ("abort", [])

    asyncio.run(scenario())


def test_refusals_of_the_engine_reach_their_request_only(tmp_path: Path) -> None:
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


def test_killed_engine_fails_its_requests_and_later_ones_with_a_typed_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01, die_at_token=77) as client:
            victim = asyncio.create_task(collect(client, request("victim", max_tokens=300)))
            await until(lambda: client.num_requests == 1, "the victim is in flight")
            poison = GenerationRequest("poison", [77], SamplingParams())
            with pytest.raises(EngineDeadError, match="ended with status -9"):
                await collect(client, poison)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(victim, 2.0)
            await asyncio.wait_for(client.wait_dead(), 2.0)
            assert client.log_tail()[-1] == "the mock engine met its poisoned token"
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
def test_engine_that_cannot_start_says_why(
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


def test_engine_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
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


def test_messages_survive_the_wire_with_every_field() -> None:
    params = SamplingParams(
        n=2, seed=2**64 - 1, stop=["a"], logit_bias={5: -1.5}, bad_words_token_ids=[[1, 2]], logprobs=3,
        speculative=SpeculativeParams("off"),
    )  # fmt: skip
    asked = GenerationRequest("id", [1, 2], params, cache_salt="s", timeout_s=1.5)
    decoded = messages.decode_to_engine(messages.encode(messages.AddRequest(asked)))
    assert decoded == messages.AddRequest(asked)
    delta = TokenDelta("id", 1, [3], logprobs=[TokenLogprobs(3, -0.1, 1, [(3, -0.1)])], stop_reason="x")
    assert messages.decode_to_client(messages.encode(messages.Deltas([], [delta]))) == messages.Deltas([], [delta])


def test_deltas_of_one_choice_that_wait_are_joined() -> None:
    first = TokenDelta("r", 0, [1], logprobs=[TokenLogprobs(1, -1.0, 1)], prompt_logprobs=[None])
    second = TokenDelta("r", 0, [2, 3], drafted_by=["mtp"], logprobs=[TokenLogprobs(2, -1.0, 1)] * 2)
    last = TokenDelta("r", 0, [4], logprobs=[TokenLogprobs(4, -1.0, 1)], finish_reason="stop", stop_reason=4, seed=9)
    last.is_complete = True
    waiting: list[TokenDelta] = []
    for delta in (first, TokenDelta("r", 1, [7]), second, last):
        merge_deltas(waiting, delta)
    assert [delta.index for delta in waiting] == [0, 1]
    joined = waiting[0]
    assert (joined.token_ids, joined.drafted_by, joined.finish_reason) == ([1, 2, 3, 4], ["mtp"], "stop")
    assert (joined.stop_reason, joined.is_complete, joined.seed, joined.prompt_logprobs) == (4, True, 9, [None])
    assert joined.logprobs is not None and [entry.token_id for entry in joined.logprobs] == [1, 2, 2, 4]
    assert joined.sources() == [None, "mtp", None, None], "the first tokens of each step are its accepted drafts"


@contextlib.asynccontextmanager
async def connected(client: EngineClient, identity: bytes) -> AsyncIterator[EngineConnection]:
    connection = EngineConnection(client.address, identity)
    try:
        await connection.start()
        yield connection
    finally:
        await connection.close()


def test_abort_requests_ends_what_is_named_through_any_connection_and_counts_its_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client, connected(client, b"other") as other:
            names = ("a", "b-0", "b-1", "b-x", "c")
            tasks = {name: asyncio.create_task(collect(client, request(name, max_tokens=300))) for name in names}
            await until(lambda: client.stats.num_running == 5, "all run")
            ended = dict(await other.abort_requests(["a", "b", "unknown"]))
            assert ended.keys() == {"a", "b-0", "b-1"}
            for name, num_tokens in ended.items():
                deltas = (await tasks[name])[0]
                assert (deltas[-1].finish_reason, len(tokens(deltas))) == ("abort", num_tokens)
            assert {name for name, _ in await other.abort_requests(None)} == {"b-x", "c"}
            await asyncio.gather(*tasks.values())
            assert await client.abort_requests(None) == []

    asyncio.run(scenario())


def test_abort_requests_leaves_the_requests_of_other_owners_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.01) as client:
            mine, theirs = request("mine", max_tokens=300), request("theirs", max_tokens=300)
            mine.cache_salt, theirs.cache_salt = "key1-tenant", "key2-tenant"
            tasks = [asyncio.create_task(collect(client, one)) for one in (mine, theirs)]
            await until(lambda: client.stats.num_running == 2, "both run")
            assert [name for name, _ in await client.abort_requests(["mine", "theirs"], "key1-")] == ["mine"]
            assert (await tasks[0])[0][-1].finish_reason == "abort"
            assert client.num_requests == 1
            client.abort_all()
            await tasks[1]

    asyncio.run(scenario())


def test_requests_of_a_connection_that_is_gone_are_aborted_and_others_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.005) as client:
            kept = asyncio.create_task(collect(client, request("kept", seed=1, max_tokens=100)))
            async with connected(client, b"worker-1") as gone:
                lost = asyncio.create_task(collect(gone, request("lost", max_tokens=300)))
                await until(lambda: client.stats.num_running == 2, "both run")
                client.forget_client(b"worker-1")
                await until(lambda: client.stats.num_finished == {"abort": 1}, "the lost request is aborted")
                lost.cancel()
            assert len(tokens((await kept)[0])) == 100

    asyncio.run(scenario())


def test_death_of_the_engine_ends_a_wait_for_aborts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as client:
            process = client._child._process
            assert process is not None
            process.send_signal(signal.SIGSTOP)  # nothing is answered any more
            waiting = asyncio.create_task(client.abort_requests(None))
            await until(lambda: bool(client._answers), "the question is sent")
            process.kill()
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waiting, 30)
            with pytest.raises(EngineDeadError):
                await client.abort_requests(None)

    asyncio.run(scenario())


def test_many_streams_whose_steps_share_messages_lose_no_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path, step_s=0.001) as client:
            assert client.ready is not None
            asked = [request(str(i), max_tokens=300, seed=i) for i in range(64)]
            found = await asyncio.gather(*(collect(client, one) for one in asked))
            for seed, choices in enumerate(found):
                assert tokens(choices[0]) == expected_tokens(choice_seed(seed, 0), 300, client.ready.vocab_size)
            assert max(len(delta.steps or [()]) for delta in found[0][0]) > 1

    asyncio.run(scenario())
