# SPDX-License-Identifier: Apache-2.0
"""Every way in which Redis fails is one error that says what is wrong, and the store works again afterwards."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Thread

import pytest
import redis

from fastdeploy.config.cluster_config import ClusterConfig
from fastdeploy.scheduler.request_states import Stage
from fastdeploy.scheduler.store import Entry, GroupMissingError, Store, StoreError
from tests.cluster.redis_server import DEFAULT_SAVE, RedisServer, free_port
from tests.scheduler.fake_redis import fake_redis
from tests.scheduler.redis_stores import CLAIMED, DECODE, INBOX, KEYS, OWNER, config, opened, record, run_with, ticket

IMPATIENT = {"scheduler_expire_period": 1000, "scheduler_sync_period": 100}


async def beats(store: Store) -> None:
    await store.beat_owner(OWNER, 1, 5.0)


async def fails(store: Store, words: str, command: Callable[[Store], Awaitable[object]] = beats) -> StoreError:
    with pytest.raises(StoreError, match=words) as caught:
        await command(store)
    assert not isinstance(caught.value, GroupMissingError)
    return caught.value


def test_nothing_listens() -> None:
    async def scenario() -> None:
        async with opened(config(f"redis://user:secret@127.0.0.1:{free_port()}")) as store:
            error = await fails(store, "cannot be reached.*Connect call failed")
            assert "secret" not in str(error)

    asyncio.run(scenario())


def test_a_killed_server_is_found_again(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        server.kill()
        await fails(store, "cannot be reached")
        await fails(store, "cannot be reached")
        server.start()
        await beats(store)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_a_stopped_server_does_not_answer_in_time(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        server.pause()
        await fails(store, "did not answer within 1 s")
        server.resume()
        await beats(store)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario, **IMPATIENT)


def test_a_full_server_names_maxmemory(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.create_inbox(INBOX)
        entry = await store.enqueue(ticket(1))
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        server.execute("CONFIG", "SET", "maxmemory", 1)
        for command in (
            beats,
            lambda store: store.enqueue(ticket(2)),
            lambda store: store.claim(OWNER, [CLAIMED], entry),
            lambda store: store.create_inbox("another"),
            lambda store: store.create_queues("n2"),
        ):
            await fails(store, "is full: it has reached its maxmemory", command)
        server.execute("CONFIG", "SET", "maxmemory", 0)
        assert [one.number for _, one in await store.read_pending("n1", "n1.1", 60)] == [1]  # no half claim
        assert await store.read_inbox(INBOX, b"0", 0) == []
        await beats(store)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


async def reads(store: Store) -> None:
    await store.read_owners()


async def claims(store: Store) -> None:
    await store.claim(OWNER, [CLAIMED], Entry(KEYS.queue(Stage.DECODE), b"1-1"))


@pytest.mark.parametrize(
    ("settings", "command", "words"),
    [
        (["CONFIG SET min-replicas-to-write 1"], beats, "too few replicas follow it"),
        (["CONFIG SET min-replicas-to-write 1"], claims, "too few replicas follow it"),
        (["REPLICAOF 127.0.0.1 1"], beats, "is a read-only replica"),
        (["REPLICAOF 127.0.0.1 1"], claims, "is a read-only replica"),
        (
            ["REPLICAOF 127.0.0.1 1", "CONFIG SET replica-serve-stale-data no"],
            reads,
            "is a replica that has lost its master",
        ),
    ],
)
def test_a_server_that_refuses_commands_says_why(
    tmp_path: Path, settings: list[str], command: Callable[[Store], Awaitable[None]], words: str
) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        for setting in settings:
            server.execute(*setting.split())
        await fails(store, words, command)
        server.execute("CONFIG", "SET", "min-replicas-to-write", 0)
        server.execute("REPLICAOF", "NO", "ONE")
        await beats(store)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_a_server_that_cannot_save_its_data(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        shutil.rmtree(tmp_path / "data")
        server.execute("BGSAVE")
        while server.execute("INFO", "persistence")["rdb_last_bgsave_status"] == "ok":
            time.sleep(0.01)
        await fails(store, "cannot save its data to disk")

    with RedisServer(tmp_path / "data", save=DEFAULT_SAVE) as server:
        run_with(server, scenario)


def test_a_server_that_is_busy_with_a_script(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        script = Thread(target=_run_forever, args=(server,))
        script.start()
        while not await _is_busy(store):
            await asyncio.sleep(0.01)
        await fails(store, "is busy with a script")
        server.execute("SCRIPT", "KILL")
        script.join()
        await beats(store)

    with RedisServer(tmp_path, lua_time_limit=20) as server:
        run_with(server, scenario)


def _run_forever(server: RedisServer) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        server.execute("EVAL", "while true do end", 0)


async def _is_busy(store: Store) -> bool:
    try:
        await beats(store)
    except StoreError as error:
        return error.code == "BUSY"
    return False


def test_permissions_that_are_taken_away(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        server.execute("ACL", "SETUSER", "node", "-set")
        await fails(store, "no longer permits what it permitted")
        server.execute("ACL", "SETUSER", "node", "+set")
        await beats(store)
        server.execute("ACL", "SETUSER", "node", "resetkeys")
        await fails(store, "no longer permits what it permitted")

    with RedisServer(tmp_path, user=["node on >secret ~* +@all"]) as server:
        run_with(server, scenario, url=f"redis://node:secret@127.0.0.1:{server.port}")


def test_a_password_that_is_changed(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        server.execute("CONFIG", "SET", "requirepass", "another")
        with redis.Redis(port=server.port, password="another") as client:
            client.client_kill_filter(skipme=True, _type="normal")
        await asyncio.sleep(0.05)
        error = await fails(store, "refuses the user or the password")
        assert "secret1" not in str(error)

    with RedisServer(tmp_path, requirepass="secret1") as server:
        run_with(server, scenario, url=f"redis://:secret1@127.0.0.1:{server.port}")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "is still loading its data"),
        (b"-CLUSTERDOWN The cluster is down\r\n", "is a cluster that is down"),
        (b"-MOVED 1 127.0.0.1:1\r\n", "another server of it has our keys"),
        (b"-ERR max number of clients reached\r\n", "max number of clients reached"),
        (b"-SOMETHING new\r\n", r"does not execute a command \(SOMETHING new\)"),
        (b"garbage\r\n", "cannot be reached: Protocol Error"),
        (b"", "cannot be reached: Connection closed by server"),
        (b"*99999\r\n", "did not answer within 1 s"),
    ],
)
def test_other_answers(answer: bytes, words: str) -> None:
    async def scenario() -> None:
        async with fake_redis(lambda _: answer) as url, opened(_impatient(url)) as store:
            await fails(store, words)

    asyncio.run(scenario())


def _impatient(url: str) -> ClusterConfig:
    return config(url, **IMPATIENT)


def test_a_queue_that_is_deleted_under_its_reader_is_missing(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        reading = asyncio.create_task(store.read_tickets(DECODE, "n1", "n1.1", 5.0))
        while not server.execute("INFO", "clients")["blocked_clients"]:
            await asyncio.sleep(0.01)
        server.execute("FLUSHALL")
        with pytest.raises(GroupMissingError, match="has lost a queue"):
            await reading

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_a_value_of_another_program_is_no_reason_to_fail_otherwise(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        server.execute("SET", KEYS.nodes, "text")
        error = await fails(store, "has a value of another program", lambda store: store.read_nodes())
        assert "WRONGTYPE" in str(error)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


# Connections.


def test_a_read_that_waits_does_not_delay_writes(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(INBOX)
        reading = asyncio.create_task(store.read_inbox(INBOX, b"0", 5.0))
        while not server.execute("INFO", "clients")["blocked_clients"]:
            await asyncio.sleep(0.01)
        for count in range(10):
            await store.beat_owner(OWNER, count, 5.0)
        assert not reading.done()
        await store.send_to_owner(OWNER, [CLAIMED])
        assert len(await reading) == 1

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_no_command_gets_the_answer_of_one_that_was_cancelled(tmp_path: Path) -> None:
    """The commands are cancelled at each of their steps: while they connect, write, and read."""

    async def scenario(store: Store) -> None:
        for num_steps in range(120):
            cancelled = asyncio.create_task(store.beat_node("n1", record(num_steps), 5.0, ["a", "b", "c"]))
            for _ in range(num_steps % 40):
                await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await store.note_prefixes(f"n{num_steps}", [b"a"])
            assert await store.find_prefixes([b"a", b"b"]) == [f"n{num_steps}", ""]
            if num_steps % 3 == 0:
                await store.close()  # so that the next one has to connect
        while server.execute("INFO", "clients")["connected_clients"] > 3:  # two of the store, and that of this command
            await asyncio.sleep(0.01)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_no_command_gets_the_answer_of_one_that_has_timed_out(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await store.note_prefixes("n1", [b"a"])
        server.pause()
        await fails(store, "did not answer", lambda store: store.find_prefixes([b"b"]))
        server.resume()
        assert await store.find_prefixes([b"a"]) == ["n1"]

    with RedisServer(tmp_path) as server:
        run_with(server, scenario, **IMPATIENT)


def test_a_connection_that_the_server_has_closed_is_replaced(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        await beats(store)
        server.execute("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await asyncio.sleep(0.1)
        await beats(store)

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)


def test_a_name_that_leads_to_another_server_is_looked_up_again(tmp_path: Path) -> None:
    """A master that becomes a replica keeps its connections, while its name may already lead to the new master."""

    async def scenario(store: Store) -> None:
        await beats(store)
        num_connections = server.execute("INFO", "stats")["total_connections_received"]
        server.execute("REPLICAOF", "127.0.0.1", 1)
        await fails(store, "is a read-only replica")
        server.execute("REPLICAOF", "NO", "ONE")
        await beats(store)
        own = 3  # those of this function
        assert server.execute("INFO", "stats")["total_connections_received"] == num_connections + 1 + own

    with RedisServer(tmp_path) as server:
        run_with(server, scenario)
