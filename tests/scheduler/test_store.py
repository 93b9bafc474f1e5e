# SPDX-License-Identifier: Apache-2.0
"""What the store writes to a real Redis, what it reads, and how long keys live."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy.scheduler.keys import Keys
from fastdeploy.scheduler.request_states import Abort, Stage
from fastdeploy.scheduler.store import GroupMissingError, Store, StoreError
from tests.cluster.redis_server import RedisServer
from tests.scheduler.redis_stores import CLAIMED, DECODE, INBOX, KEYS, OWNER, config, opened, record, run_with, ticket

SHARED = KEYS.queue(Stage.DECODE)


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    running_server.execute("FLUSHALL")
    return running_server


# Liveness.


def test_a_heartbeat_returns_the_value_before_it(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        assert (await store.beat_owner(OWNER, 1, 5.0)).old_value is None
        assert (await store.beat_owner(OWNER, 2, 5.0)).old_value == b"1"

    run_with(server, scenario)


def test_a_heartbeat_tells_whether_all_streams_exist(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox("first")
        assert (await store.beat_node("n1", record(), 5.0, ["first"])).has_streams
        assert not (await store.beat_node("n1", record(), 5.0, ["first", "second"])).has_streams

    run_with(server, scenario)


def test_a_heartbeat_renews_the_streams_that_it_names(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(INBOX)
        server.execute("EXPIRE", INBOX, 5)
        await store.beat_owner(OWNER, 1, 5.0)
        assert server.execute("TTL", INBOX) > 800

    run_with(server, scenario)


def test_the_server_is_another_one_after_a_restart(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        first = await store.beat_owner(OWNER, 1, 5.0)
        assert (await store.beat_owner(OWNER, 2, 5.0)).server == first.server
        server.restart()
        with pytest.raises(StoreError, match="cannot be reached"):  # the connection is only now found to be closed
            await store.beat_owner(OWNER, 3, 5.0)
        assert (await store.beat_owner(OWNER, 3, 5.0)).server != first.server

    run_with(server, scenario)


def test_nodes_of_other_groups_and_records_that_cannot_be_read_are_left_out(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.beat_node("n1", record(), 5.0, [])
        await store.beat_node("n2", record(group="another"), 5.0, [])
        await store.beat_node("n3", record(), 5.0, [])
        server.execute("SET", KEYS.node("n3"), b"\x01garbage")
        assert await store.read_nodes() == {"n1": record()}

    run_with(server, scenario)


def test_a_node_whose_key_has_expired_is_not_read(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.beat_node("n1", record(), 5.0, [])
        await store.beat_owner(OWNER, 1, 5.0)
        server.execute("DEL", KEYS.node("n1"), KEYS.owner(OWNER))
        assert await store.read_nodes() == {}
        assert await store.read_owners() == frozenset()

    run_with(server, scenario)


def test_forgotten_nodes_lose_their_hint_queue_and_idle_consumers(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        for number, consumer in enumerate(("n1.1", "n1.2", "n10.1")):
            await store.enqueue(ticket(number))
            ((entry, _),) = await store.read_tickets(DECODE, "n1", consumer, 0)
            if number > 0:
                await store.drop(entry)
        await store.forget(["n1"], [])
        names = sorted(one[b"name"] for one in _consumers(server, SHARED))
        assert names == [b"n1.1", b"n10.1"]  # n1.1 has an entry that another node takes over
        assert server.execute("EXISTS", KEYS.queue(Stage.DECODE, "n1")) == 0
        await store.create_queues("n2")
        assert len(await store.read_pending("n2", "n2.1", 0)) == 1

    run_with(server, scenario)


def _consumers(server: RedisServer, queue: str) -> list[dict[bytes, object]]:
    answers = server.execute("XINFO", "CONSUMERS", queue, "nodes")
    return [one if isinstance(one, dict) else dict(zip(one[::2], one[1::2])) for one in answers]


def test_a_node_that_ends_leaves_only_shared_queues(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(KEYS.node_inbox("n1"))
        await store.create_queues("n1")
        await store.beat_node("n1", record(), 5.0, [])
        await store.beat_owner(OWNER, 1, 5.0)
        await store.create_inbox(INBOX)
        await store.delete_node("n1")
        await store.delete_owner(OWNER)
        shared = {KEYS.queue(stage).encode() for stage in Stage}
        assert set(server.execute("KEYS", "*")) == shared

    run_with(server, scenario)


# Inboxes.


def test_a_message_to_a_missing_inbox_is_not_written(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        assert await store.send_to_owner(OWNER, [CLAIMED]) is False
        assert await store.send_to_node("n1", [Abort(OWNER, 1, 1)]) is False
        assert server.execute("DBSIZE") == 0

    run_with(server, scenario)


def test_an_inbox_is_read_after_the_cursor_in_order(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(INBOX)
        for _ in range(3):
            assert await store.send_to_owner(OWNER, [CLAIMED])
        first, second, third = await store.read_inbox(INBOX, b"0", 0)
        assert await store.read_inbox(INBOX, first[0], 0) == [second, third]
        await store.delete_entries(INBOX, [first[0], third[0]])
        assert await store.read_inbox(INBOX, b"0", 0) == [second]

    run_with(server, scenario)


def test_creating_an_inbox_again_keeps_its_entries(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(INBOX)
        await store.send_to_owner(OWNER, [CLAIMED])
        await store.create_inbox(INBOX)
        assert len(await store.read_inbox(INBOX, b"0", 0)) == 1

    run_with(server, scenario)


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_read_that_waits_for_nothing_returns_nothing(server: RedisServer, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        await store.create_inbox(INBOX)
        await store.create_queues("n1")
        assert await store.read_inbox(INBOX, b"0", 0.01) == []
        assert await store.read_tickets(DECODE, "n1", "n1.1", 0.01) == []

    run_with(server, scenario, url=f"{server.address}?protocol={protocol}")


# Queues.


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_ticket_is_read_by_one_consumer(server: RedisServer, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        entry = await store.enqueue(ticket(1))
        assert await store.read_tickets(DECODE, "n1", "n1.1", 0) == [(entry, ticket(1))]
        assert await store.read_tickets(DECODE, "n1", "n1.2", 0) == []

    run_with(server, scenario, url=f"{server.address}?protocol={protocol}")


def test_a_hinted_ticket_is_read_by_its_node_and_before_others(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.create_queues("n2")
        await store.enqueue(ticket(1))
        await store.enqueue(ticket(2), hint="n1")
        assert [one.number for _, one in await store.read_tickets(DECODE, "n2", "n2.1", 0)] == [1]
        await store.enqueue(ticket(3))
        assert [one.number for _, one in await store.read_tickets(DECODE, "n1", "n1.1", 0)] == [2, 3]

    run_with(server, scenario)


def test_reading_returns_at_most_one_ticket_per_queue(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        for number, stage in ((1, Stage.PREFILL), (2, Stage.DECODE), (3, Stage.DECODE)):
            await store.enqueue(ticket(number, stage=stage))
        found = await store.read_tickets([Stage.DECODE, Stage.PREFILL], "n1", "n1.1", 0)
        assert [one.number for _, one in found] == [2, 1]
        assert await store.queue_lengths() == {Stage.PREFILL: 1, Stage.DECODE: 2}

    run_with(server, scenario)


def test_with_one_queue_there_is_no_stage_but_decode(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        assert await store.queue_lengths() == {Stage.DECODE: 0}
        assert store.queues("n1") == [KEYS.queue(Stage.DECODE, "n1"), SHARED]
        assert sorted(server.execute("KEYS", "*")) == sorted(queue.encode() for queue in store.queues("n1"))

    run_with(server, scenario, scheduler_name="global")


def test_a_queue_that_is_missing_is_created_by_the_ticket_and_lacks_its_group(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.enqueue(ticket(1))
        with pytest.raises(GroupMissingError, match="has lost a queue"):
            await store.read_tickets(DECODE, "n1", "n1.1", 0)
        with pytest.raises(GroupMissingError, match="has lost a queue"):
            await store.read_pending("n1", "n1.1", 0)
        await store.create_queues("n1")
        assert [one.number for _, one in await store.read_tickets(DECODE, "n1", "n1.1", 0)] == [1]

    run_with(server, scenario)


@pytest.mark.parametrize("protocol", [2, 3])
def test_pending_tickets_are_read_again_and_idle_ones_are_taken_over(server: RedisServer, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.create_queues("n2")
        entry = await store.enqueue(ticket(1))
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        assert await store.read_pending("n1", "n1.1", 60.0) == [(entry, ticket(1))]
        assert await store.read_pending("n2", "n2.1", 60.0) == []
        assert await store.read_pending("n2", "n2.1", 0) == [(entry, ticket(1))]
        assert await store.read_pending("n1", "n1.1", 60.0) == []

    run_with(server, scenario, url=f"{server.address}?protocol={protocol}")


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_pending_ticket_that_its_owner_has_deleted_is_pending_no_longer(server: RedisServer, protocol: int) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        entry = await store.enqueue(ticket(1))
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        await store.dequeue([entry])
        assert await store.read_pending("n1", "n1.1", 60.0) == []
        assert _num_pending(server) == 0

    run_with(server, scenario, url=f"{server.address}?protocol={protocol}")


def _num_pending(server: RedisServer) -> int:
    return sum(int(str(one[b"pending"])) for one in _consumers(server, SHARED))


def test_a_claim_tells_the_owner_and_deletes_the_ticket(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.create_inbox(INBOX)
        entry = await store.enqueue(ticket(1))
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        assert await store.claim(OWNER, [CLAIMED], entry) is True
        assert len(await store.read_inbox(INBOX, b"0", 0)) == 1
        assert await store.find_tickets(OWNER) == []
        assert _num_pending(server) == 0

    run_with(server, scenario)


def test_a_claim_for_an_owner_that_is_gone_deletes_the_ticket(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        entry = await store.enqueue(ticket(1))
        await store.read_tickets(DECODE, "n1", "n1.1", 0)
        assert await store.claim(OWNER, [CLAIMED], entry) is False
        assert server.execute("EXISTS", INBOX) == 0
        assert await store.find_tickets(OWNER) == []
        assert _num_pending(server) == 0

    run_with(server, scenario)


def test_an_owner_finds_its_tickets_in_every_queue(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.beat_node("n1", record(), 5.0, [])
        first = await store.enqueue(ticket(1), hint="n1")
        second = await store.enqueue(ticket(2, stage=Stage.PREFILL), hint="gone")
        third = await store.enqueue(ticket(3))
        await store.enqueue(ticket(4, owner="n2.0.b"))
        server.execute("XADD", SHARED, "*", "m", b"garbage")
        found = await store.find_tickets(OWNER)
        expected = [(third, 3, ""), (second, 2, "gone"), (first, 1, "n1")]
        assert [(entry, one.number, hint) for entry, one, hint in found] == expected

    run_with(server, scenario)


def test_more_tickets_than_one_page_are_found(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        entries = [await store.enqueue(ticket(number)) for number in range(401)]
        found = await store.find_tickets(OWNER)
        assert [one.number for _, one, _ in found] == list(range(401))
        await store.dequeue(entries)
        assert await store.queue_lengths() == {Stage.PREFILL: 0, Stage.DECODE: 0}

    run_with(server, scenario)


def test_a_ticket_that_cannot_be_decoded_is_deleted(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        server.execute("XADD", SHARED, "*", "m", b"\x01garbage")
        assert await store.read_tickets(DECODE, "n1", "n1.1", 0) == []
        assert (store.bad_messages.num_dropped, server.execute("XLEN", SHARED), _num_pending(server)) == (1, 0, 0)
        server.execute("XADD", SHARED, "*", "another field", b"1")
        assert await store.read_tickets(DECODE, "n1", "n1.1", 0) == []
        assert (store.bad_messages.num_dropped, server.execute("XLEN", SHARED), _num_pending(server)) == (2, 0, 0)

    run_with(server, scenario)
    assert len(caplog.records) == 1


# Prefixes, and what is true of all keys.


def test_the_last_node_of_a_prefix_is_found(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.note_prefixes("n1", [b"a", b"b"])
        await store.note_prefixes("n2", [b"b"])
        assert await store.find_prefixes([b"a", b"b", b"c"]) == ["n1", "n2", ""]
        assert await store.find_prefixes([]) == []

    run_with(server, scenario)


def test_every_key_has_a_time_to_live_and_its_topic_in_braces(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.beat_node("n1", record(), 5.0, [])
        await store.beat_owner(OWNER, 1, 5.0)
        await store.enqueue(ticket(1))
        await store.enqueue(ticket(1), hint="n2")
        await store.create_queues("n1")
        await store.create_inbox(INBOX)
        await store.send_to_owner(OWNER, [CLAIMED])
        await store.note_prefixes("n1", [b"a"])

    run_with(server, scenario, scheduler_ttl=77)
    ttls = {key.decode(): server.execute("TTL", key) for key in server.execute("KEYS", "*")}
    assert len(ttls) == 11
    assert all(key.startswith("{topic}:") for key in ttls)
    short = [ttls.pop(key) for key in (KEYS.prefix(b"a"), KEYS.node("n1"), KEYS.owner(OWNER))]
    assert [ttl <= most for ttl, most in zip(short, (300, 5, 5))] == [True] * 3
    assert {ttl in (76, 77) for ttl in ttls.values()} == {True}


def test_topics_and_groups_do_not_see_each_other(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.enqueue(ticket(1))
        for keys in (Keys("topic", "another"), Keys("another", "group")):
            async with opened(config(server.address), keys) as other:
                await other.create_queues("n1")
                assert await other.read_tickets(DECODE, "n1", "n1.1", 0) == []
                assert await other.find_tickets(OWNER) == []

    run_with(server, scenario)


def test_a_ticket_needs_one_command_of_its_owner_and_two_of_its_node(server: RedisServer) -> None:
    async def scenario(store: Store) -> None:
        await store.create_queues("n1")
        await store.create_inbox(INBOX)
        before = store.num_commands
        await store.enqueue(ticket(1))
        assert store.num_commands - before == 1
        before = store.num_commands
        ((entry, _),) = await store.read_tickets(DECODE, "n1", "n1.1", 0)
        assert store.num_commands - before == 1
        await store.claim(OWNER, [CLAIMED], entry)
        assert store.num_commands - before == 2

    run_with(server, scenario)
