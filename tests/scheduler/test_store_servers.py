# SPDX-License-Identifier: Apache-2.0
"""Which servers are refused at start, and how sentinels, clusters, TLS and Unix sockets are used."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
import redis

from fastdeploy.core.errors import ConfigError
from fastdeploy.scheduler.store import Store, StoreError
from tests.cluster.redis_server import RedisServer, free_port
from tests.scheduler.fake_redis import bulk, fake_redis
from tests.scheduler.redis_stores import CLAIMED, DECODE, INBOX, OWNER, config, opened, run_with, ticket

LEAST_RIGHTS = "~{topic}:* +@read +@write +@connection +@transaction +@blocking +info +eval"


async def check(store: Store) -> None:
    assert await store.check_server() == []


async def work(store: Store) -> None:
    """Send a ticket through a queue and its claim through an inbox."""
    await check(store)
    await store.create_queues("n1")
    await store.create_inbox(INBOX)
    await store.beat_owner(OWNER, 1, 5.0)
    await store.enqueue(ticket(1))
    ((entry, _),) = await store.read_tickets(DECODE, "n1", "n1.1", 5.0)
    assert await store.claim(OWNER, [CLAIMED], entry)
    assert len(await store.read_inbox(INBOX, b"0", 5.0)) == 1
    assert await store.read_owners() == {OWNER}
    await store.forget(["n1"], [])
    await store.note_prefixes("n1", [b"a"])
    await store.create_queues("n1")
    assert await store.read_pending("n1", "n1.1", 1.0) == []


async def refused(store: Store) -> str:
    """Return the field and the message of the error."""
    with pytest.raises(ConfigError) as caught:
        await store.check_server()
    return str(caught.value)


# What is refused.


def test_a_server_without_password_is_accepted_and_nothing_is_left_there(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        run_with(server, check)
        assert server.execute("DBSIZE") == 0


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_wrong_password(tmp_path: Path, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-password: ") and "refuses the user or the password" in message
        assert "wrong1" not in message

    with RedisServer(tmp_path, requirepass="right") as server:
        run_with(server, scenario, url=f"{server.address}?protocol={protocol}", scheduler_password="wrong1")
        run_with(server, check, url=f"{server.address}?protocol={protocol}", scheduler_password="right")


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_missing_password(tmp_path: Path, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-password: ") and "demands a password" in message

    with RedisServer(tmp_path, requirepass="right") as server:
        run_with(server, scenario, url=f"{server.address}?protocol={protocol}")


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_wrong_user_in_the_url(tmp_path: Path, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-url: ") and "refuses the user or the password" in message
        assert "right" not in message and "bob" not in message

    with RedisServer(tmp_path, requirepass="right") as server:
        run_with(server, scenario, url=f"redis://bob:right@127.0.0.1:{server.port}?protocol={protocol}")


def test_a_password_for_a_server_that_has_none_is_accepted_only_as_redis_does(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        assert (await refused(store)).startswith("--scheduler-password: ")

    with RedisServer(tmp_path) as server:
        run_with(server, scenario, url=f"{server.address}?protocol=2", scheduler_password="any")
        run_with(server, check, scheduler_password="any")


def test_the_rights_that_the_message_names_are_enough_and_each_is_needed(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-username: ") and LEAST_RIGHTS in message

    rights = LEAST_RIGHTS.split()
    with RedisServer(tmp_path) as server:
        url = f"redis://node:secret@127.0.0.1:{server.port}"
        server.execute("ACL", "SETUSER", "node", "on", ">secret", *rights)
        run_with(server, work, url=url)
        for right in ("~{topic}:*", "+@read", "+@write", "+@transaction", "+info", "+eval"):
            server.execute("ACL", "SETUSER", "node", "resetkeys", "-@all", *(one for one in rights if one != right))
            run_with(server, scenario, url=url)
        server.execute("ACL", "SETUSER", "node", *rights, "resetkeys", "~{another}:*")
        run_with(server, scenario, url=url)
        server.execute("ACL", "SETUSER", "node", "resetkeys", "~{topic}:q:*")
        run_with(server, scenario, url=url)


def test_a_replica(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        assert "is a replica; expected its master" in await refused(store)

    with RedisServer(tmp_path / "a") as master, RedisServer(tmp_path / "b") as server:
        server.execute("REPLICAOF", "127.0.0.1", master.port)
        run_with(server, scenario)


def test_a_database_that_does_not_exist(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-url: ") and message.endswith("has no database 16")

    with RedisServer(tmp_path) as server:
        run_with(server, scenario, url=f"redis://127.0.0.1:{server.port}/16")
        run_with(server, work, url=f"redis://127.0.0.1:{server.port}/15")


def test_a_policy_that_evicts_is_noted(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        (note,) = await store.check_server()
        assert "maxmemory-policy allkeys-lru" in note and "set it to noeviction" in note

    with RedisServer(tmp_path, maxmemory_policy="allkeys-lru") as server:
        run_with(server, scenario)


@pytest.mark.parametrize("version", ["6.2.14", "5.0.3", "", "x.y"])
def test_a_version_below_7(version: str) -> None:
    async def scenario() -> None:
        info = bulk(f"# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n")
        async with fake_redis(lambda _: info) as url, opened(config(url)) as store:
            message = await refused(store)
            assert message.endswith(f"has version {version or 'unknown'}; 7.0 is needed")

    asyncio.run(scenario())


def test_a_full_server_is_no_error_of_the_configuration(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        with pytest.raises(StoreError, match="has reached its maxmemory"):
            await store.check_server()

    with RedisServer(tmp_path, maxmemory=1) as server:
        run_with(server, scenario)


# Unix sockets and TLS.


def test_a_unix_socket(tmp_path: Path) -> None:
    with RedisServer(tmp_path, requirepass="p:w") as server:
        run_with(server, work, url=f"unix://:p%3Aw@{server.socket}?db=3")


def test_tls_with_an_own_authority(tmp_path: Path) -> None:
    async def without_authority(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-url: ") and "certificate verify failed" in message

    async def without_tls(store: Store) -> None:
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.check_server()

    certificate, key = make_certificate(tmp_path)
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_cert_file": str(certificate)}
    with RedisServer(tmp_path, tls_port=free_port(), tls_auth_clients="no", **files) as server:
        run_with(server, work, url=f"rediss://127.0.0.1:{server.port}?ca={certificate}")
        run_with(server, work, url=f"redis://127.0.0.1:{server.port}/1?tls=1&ca={certificate}")
        run_with(server, without_authority, url=f"rediss://127.0.0.1:{server.port}")
        run_with(server, without_tls, url=f"redis://127.0.0.1:{server.port}")


def test_tls_with_a_certificate_of_the_client(tmp_path: Path) -> None:
    async def without_certificate(store: Store) -> None:
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.check_server()

    certificate, key = make_certificate(tmp_path)
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_cert_file": str(certificate)}
    with RedisServer(tmp_path, tls_port=free_port(), **files) as server:
        url = f"rediss://127.0.0.1:{server.port}?ca={certificate}"
        run_with(server, work, url=f"{url}&cert={certificate}&key={key}")
        run_with(server, without_certificate, url=url)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate for 127.0.0.1, which is its own authority, and of its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = [
        "-subj",
        "/CN=redis",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=120)
    return certificate, key


# Sentinels and clusters.


def test_sentinels_lead_to_the_new_master_after_a_failover(tmp_path: Path) -> None:
    master, replica = RedisServer(tmp_path / "a", repl_diskless_sync_delay=0), RedisServer(tmp_path / "b")
    with master, replica:
        replica.execute("REPLICAOF", "127.0.0.1", master.port)
        while replica.execute("INFO", "replication").get("master_link_status") != "up":
            time.sleep(0.02)  # the sentinel asks at its start, and then only every 10 s
        settings = [f"monitor main 127.0.0.1 {master.port} 1", "down-after-milliseconds main 60000"]
        with RedisServer(tmp_path / "c", is_sentinel=True, sentinel=settings) as sentinel:

            async def scenario(store: Store) -> None:
                await work(store)
                before = (await store.beat_owner(OWNER, 1, 60.0)).server
                assert master.execute("WAIT", 1, 20_000) == 1  # the replica has the heartbeat
                await _fail_over(sentinel, replica)
                master.kill()
                await _until_it_answers(store)
                beat = await store.beat_owner(OWNER, 2, 60.0)
                assert beat.server != before
                assert beat.old_value == b"1"
                assert replica.execute("ROLE")[0] == b"master"

            dead = free_port()
            url = f"sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/main"
            run_with(sentinel, scenario, url=url)


async def _fail_over(sentinel: RedisServer, replica: RedisServer) -> None:
    """Fail over as soon as the sentinel has heard of the replica and its state."""
    for _ in range(400):
        try:
            sentinel.execute("SENTINEL", "FAILOVER", "main")
            break
        except redis.ResponseError as error:
            assert "NOGOODSLAVE" in str(error)
            await asyncio.sleep(0.05)
    while replica.execute("INFO", "replication")["role"] != "master":
        await asyncio.sleep(0.05)


async def _until_it_answers(store: Store) -> None:
    for _ in range(200):
        try:
            await store.read_owners()
        except StoreError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError("the new master was not found")


def test_sentinels_with_a_password_get_that_of_the_server(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "a", requirepass="right") as master:
        settings = [f"monitor main 127.0.0.1 {master.port} 1", "auth-pass main right"]
        with RedisServer(tmp_path / "b", is_sentinel=True, sentinel=settings, requirepass="right") as sentinel:
            run_with(sentinel, work, url=f"sentinel://:right@127.0.0.1:{sentinel.port}/main")


def test_sentinels_that_do_not_fit(tmp_path: Path) -> None:
    async def unknown(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-url: ") and "has no master named 'other'" in message

    async def no_sentinel(store: Store) -> None:
        assert f"127.0.0.1:{master.port} is no sentinel" in await refused(store)

    async def plain(store: Store) -> None:
        assert "is a sentinel; use sentinel://" in await refused(store)

    async def absent(store: Store) -> None:
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.check_server()

    with RedisServer(tmp_path / "a") as master:
        settings = [f"monitor main 127.0.0.1 {master.port} 1"]
        with RedisServer(tmp_path / "b", is_sentinel=True, sentinel=settings) as sentinel:
            run_with(sentinel, unknown, url=f"sentinel://127.0.0.1:{sentinel.port}/other")
            run_with(sentinel, plain, url=f"redis://127.0.0.1:{sentinel.port}")
        run_with(master, no_sentinel, url=f"sentinel://127.0.0.1:{master.port}/main")
        run_with(master, absent, url=f"sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()}/main")


def test_a_cluster(tmp_path: Path) -> None:
    async def no_slots(store: Store) -> None:
        with pytest.raises(StoreError, match="has no server for our keys"):
            await store.check_server()

    async def plain(store: Store) -> None:
        assert "is a Redis Cluster; use cluster://" in await refused(store)

    options = {"cluster_enabled": "yes", "cluster_port": free_port()}
    with RedisServer(tmp_path, **options) as server:
        url = f"cluster://127.0.0.1:{server.port}?protocol=2"
        run_with(server, no_slots, url=url)
        server.execute("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        run_with(server, _until_it_answers, url=url)
        run_with(server, work, url=url)
        run_with(server, plain)


def test_a_server_that_is_no_cluster(tmp_path: Path) -> None:
    async def scenario(store: Store) -> None:
        message = await refused(store)
        assert message.startswith("--scheduler-url: ") and "is no cluster" in message

    with RedisServer(tmp_path) as server:
        run_with(server, scenario, url=f"cluster://127.0.0.1:{server.port}")


def test_the_server_of_a_cluster_is_looked_up_again_when_the_keys_have_moved(tmp_path: Path) -> None:
    """The servers are moved as an operator does it: by the slots of both."""
    second_bus = free_port()
    first = RedisServer(tmp_path / "a", cluster_enabled="yes", cluster_port=free_port())
    second = RedisServer(tmp_path / "b", cluster_enabled="yes", cluster_port=second_bus)
    with first, second:

        async def scenario(store: Store) -> None:
            await work(store)
            new_owner = second.execute("CLUSTER", "MYID")
            for server in (second, first):
                server.execute("FLUSHALL")
                server.execute("CLUSTER", "SETSLOT", slot, "NODE", new_owner)
            with pytest.raises(StoreError, match="another server of it has our keys"):
                await store.beat_owner(OWNER, 2, 5.0)
            await _until_it_answers(store)
            await work(store)
            assert second.execute("DBSIZE") > 0

        first.execute("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        first.execute("CLUSTER", "MEET", "127.0.0.1", second.port, second_bus)
        slot = first.execute("CLUSTER", "KEYSLOT", "{topic}")
        asyncio.run(_until_they_know_each_other(first, second))
        run_with(first, scenario, url=f"cluster://127.0.0.1:{first.port}")


async def _until_they_know_each_other(*servers: RedisServer) -> None:
    while not all(b"cluster_state:ok" in _cluster_info(one) for one in servers):
        await asyncio.sleep(0.05)


def _cluster_info(server: RedisServer) -> bytes:
    with server.client() as client:
        client.response_callbacks.clear()
        return bytes(client.execute_command("CLUSTER", "INFO"))
