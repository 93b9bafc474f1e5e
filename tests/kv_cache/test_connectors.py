# SPDX-License-Identifier: Apache-2.0
"""The ipc connector reaches nodes of the same machine, network and user, and has each peer's arena mapped once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy.core.handover import KVImage
from fastdeploy.kv_cache.connectors.base import Host, TransferError
from fastdeploy.kv_cache.connectors.ipc import IpcConnector, this_host

HERE = Host("boot", "net:[1]", 1000)
IMAGE = KVImage("arena", [3, 4], [7, 8], 100, [[64], [36]])
PEER = {"path": "/run/p/arena"}


class Mapper:
    """An engine that maps arenas; `errors` are raised in turn."""

    def __init__(self, *errors: str) -> None:
        self.errors = list(errors)
        self.attached: list[tuple[str, str]] = []
        self.detached: list[str] = []

    async def attach(self, name: str, path: str) -> None:
        self.attached.append((name, path))
        await asyncio.sleep(0)
        if self.errors:
            raise TransferError("unreachable", self.errors.pop(0))

    def detach(self, name: str) -> None:
        self.detached.append(name)


def run(test: Callable[[IpcConnector, Mapper], Any], *errors: str) -> None:
    async def body() -> None:
        mapper = Mapper(*errors)
        await test(IpcConnector(mapper, HERE, "/run/n/arena"), mapper)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("host", "endpoint", "reaches"),
    [
        (HERE, PEER, True),
        (HERE, {}, False),
        (Host("other", "net:[1]", 1000), PEER, False),
        (Host("boot", "net:[2]", 1000), PEER, False),
        (Host("boot", "net:[1]", 0), PEER, False),
    ],
)
def test_only_nodes_of_this_machine_network_and_user_are_reached(
    host: Host, endpoint: dict[str, str], reaches: bool
) -> None:
    connector = IpcConnector(Mapper(), HERE, "/run/n/arena")
    assert connector.reaches(host, endpoint) is reaches
    assert connector.endpoint() == {"path": "/run/n/arena"}


def test_the_arena_of_a_peer_is_mapped_once() -> None:
    async def test(connector: IpcConnector, mapper: Mapper) -> None:
        images = await asyncio.gather(*(connector.fetch("p:1", PEER, IMAGE) for _ in range(3)))
        images.append(await connector.fetch("p:1", PEER, IMAGE))
        assert images == [KVImage("p:1", [3, 4], [7, 8], 100, [[64], [36]])] * 4
        assert mapper.attached == [("p:1", "/run/p/arena")]

    run(test)


def test_an_arena_that_could_not_be_mapped_is_tried_again() -> None:
    async def test(connector: IpcConnector, mapper: Mapper) -> None:
        with pytest.raises(TransferError, match="no such file"):
            await connector.fetch("p:1", PEER, IMAGE)
        assert (await connector.fetch("p:1", PEER, IMAGE)).arena == "p:1"
        assert len(mapper.attached) == 2

    run(test, "no such file")


def test_the_arena_of_a_peer_that_is_gone_is_unmapped() -> None:
    async def test(connector: IpcConnector, mapper: Mapper) -> None:
        await connector.fetch("p:1", PEER, IMAGE)
        await connector.fetch("d:1", PEER, IMAGE)
        connector.keep_only({"p:2", "d:1"})
        assert mapper.detached == ["p:1"]
        await connector.fetch("p:2", PEER, IMAGE)
        assert mapper.attached[2:] == [("p:2", "/run/p/arena")]

    run(test)


def test_this_machine_is_identified_in_the_same_way_by_all_processes() -> None:
    assert this_host() == this_host()
    assert this_host().network_namespace.startswith("net:[")
