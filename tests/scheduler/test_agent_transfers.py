# SPDX-License-Identifier: Apache-2.0
"""Images are fetched from nodes that keep them and are reached; everything else is counted and computed."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.kv_cache.connectors.base import Endpoint, Host, TransferError
from fastdeploy.scheduler import agent_transfers
from fastdeploy.scheduler.agent_engine import encode_image
from fastdeploy.scheduler.agent_legs import make_leg, make_request
from fastdeploy.scheduler.agent_transfers import Transfers
from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.request_states import Image, Role, Stage, Ticket

HOST = Host("boot", "net:[1]", 1000)
KV = KVImage("", [0, 1], [1, 1], 100)


class Engine:
    """Prepares requests: `num_tokens` arrive, or an error is raised."""

    def __init__(self, num_tokens: int | Exception) -> None:
        self.num_tokens = num_tokens
        self.prepared: list[KVImage | None] = []
        self.cancelled: list[str] = []

    async def prepare(self, request: GenerationRequest) -> int:
        self.prepared.append(request.image)
        if isinstance(self.num_tokens, Exception):
            raise self.num_tokens
        return self.num_tokens

    def cancel_prepared(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Connector:
    """Reaches nodes with an endpoint for it; waits for `wait_s` before an image is there."""

    name = "ipc"

    def __init__(self, error: str = "", wait_s: float = 0.0) -> None:
        self.error, self.wait_s = error, wait_s
        self.kept: Container[str] = ()

    def endpoint(self) -> dict[str, str]:
        return {}

    def reaches(self, host: Host, endpoint: Endpoint) -> bool:
        return host == HOST

    async def fetch(self, peer: str, endpoint: Endpoint, image: KVImage) -> KVImage:
        await asyncio.sleep(self.wait_s)
        if self.error:
            raise TransferError(self.error, "it fails")
        return KVImage(peer, image.slots, image.generations, image.num_tokens)

    def keep_only(self, peers: Container[str]) -> None:
        self.kept = peers


def make_ticket(content: bytes | None = None) -> Ticket:
    request = GenerationRequest("r", [5] * 100, SamplingParams())
    image = Image("p", 7, 1, encode_image(KV) if content is None else content)
    return Ticket("o", 1, 2, Stage.DECODE, request, [[6]], image=image)


def make_record(**fields: Any) -> NodeRecord:
    given = {"incarnation": 7, "host": HOST, "layouts": {"target": "a"}, "endpoints": {"ipc": {"path": "/p"}}, **fields}
    return NodeRecord(count=1, role=Role.PREFILL, group="g", **given)


def make_transfers(engine: Engine, connector: Connector) -> Transfers:
    return Transfers(engine, [connector], {"target": "a"}, 1000)  # type: ignore[arg-type]


def counts(transfers: Transfers) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    failures = {name: dict(reasons) for name, reasons in transfers.failures.items()}
    return failures, dict(transfers.recomputed_tokens)


def test_an_image_is_fetched_and_imported_as_its_peer_names_it() -> None:
    engine = Engine(100)
    transfers = make_transfers(engine, Connector())
    request = asyncio.run(transfers.fetch(make_ticket(), make_record()))
    assert request is not None and request.image is engine.prepared[0]
    assert request.image == KVImage("p:7", [0, 1], [1, 1], 100)
    assert (request.request_id, request.resumed) == ("o/1/2", [[6]])
    assert (counts(transfers), engine.cancelled) == (({}, {}), [])
    assert (transfers.transferred_bytes["ipc"], transfers.seconds["ipc"][1]) == ({"in": 2000, "out": 0}, 1)


def test_tokens_that_do_not_arrive_are_counted() -> None:
    transfers = make_transfers(Engine(64), Connector())
    assert asyncio.run(transfers.fetch(make_ticket(), make_record())) is not None
    assert counts(transfers) == ({}, {"incomplete": 36})
    assert transfers.transferred_bytes["ipc"]["in"] == 1280


@pytest.mark.parametrize(
    ("record", "connector", "reason", "name"),
    [
        (None, Connector(), "gone", "none"),
        (make_record(incarnation=8), Connector(), "gone", "none"),
        (make_record(layouts={"target": "b"}), Connector(), "layout", "none"),
        (make_record(layouts={}), Connector(), "layout", "none"),
        (make_record(endpoints={}), Connector(), "unreachable", "none"),
        (make_record(endpoints={"tcp": {}}), Connector(), "unreachable", "none"),
        (make_record(host=Host("boot", "net:[2]", 1000)), Connector(), "unreachable", "none"),
        (make_record(), Connector("refused"), "refused", "ipc"),
        (make_record(), Connector(wait_s=60.0), "timeout", "ipc"),
    ],
)
def test_a_failure_is_counted_with_its_reason(
    record: NodeRecord | None, connector: Connector, reason: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_transfers, "BASE_S", 0.01)
    engine = Engine(100)
    transfers = make_transfers(engine, connector)
    assert asyncio.run(transfers.fetch(make_ticket(), record)) is None
    assert counts(transfers) == ({name: {reason: 1}}, {reason: 100})
    assert (engine.prepared, engine.cancelled) == ([], ["o/1/2"])


def test_an_import_that_is_refused_is_cancelled() -> None:
    engine = Engine(TransferError("refused", "no"))
    transfers = make_transfers(engine, Connector())
    assert asyncio.run(transfers.fetch(make_ticket(), make_record())) is None
    assert (counts(transfers)[0], engine.cancelled) == ({"ipc": {"refused": 1}}, ["o/1/2"])


def test_an_image_that_cannot_be_read_costs_nothing_else() -> None:
    transfers = make_transfers(Engine(100), Connector())
    assert asyncio.run(transfers.fetch(make_ticket(b"\xc1"), make_record())) is None
    assert counts(transfers) == ({"none": {"refused": 1}}, {})


def test_an_unlike_layout_is_warned_of_once_per_node(caplog: pytest.LogCaptureFixture) -> None:
    transfers = make_transfers(Engine(100), Connector())
    for _ in range(3):
        asyncio.run(transfers.fetch(make_ticket(), make_record(layouts={"target": "b"})))
    assert caplog.text.count("another layout") == 1


def test_a_peer_that_has_failed_three_times_in_a_row_is_skipped_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, engine = Connector("refused"), Engine(100)
    transfers = make_transfers(engine, connector)

    def fetch() -> bool:
        return asyncio.run(transfers.fetch(make_ticket(), make_record())) is not None

    assert [fetch(), fetch()] == [False, False]
    connector.error = ""
    assert fetch()  # the count begins again
    connector.error = "refused"
    assert [fetch(), fetch(), fetch()] == [False, False, False]
    connector.error = ""
    assert not fetch()
    assert counts(transfers)[0] == {"ipc": {"refused": 5}, "none": {"skipped": 1}}
    transfers.keep_only({"p": make_record()})
    assert not fetch()
    transfers.keep_only({"p": make_record(incarnation=8)})  # what it failed with is gone
    assert connector.kept == {"p:8"}
    assert fetch()


def test_a_peer_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_transfers, "SKIP_S", 0.0)
    connector = Connector("refused")
    transfers = make_transfers(Engine(100), connector)
    for _ in range(3):
        asyncio.run(transfers.fetch(make_ticket(), make_record()))
    connector.error = ""
    assert asyncio.run(transfers.fetch(make_ticket(), make_record())) is not None


@pytest.mark.parametrize(
    ("image", "has_tokens", "recomputed", "num_bytes"),
    [
        (KVImage("", [0, 1], [1, 1], 100), True, {}, 2000),
        (KVImage("", [0], [1], 64), True, {"no_slots": 36}, 1000),
        (None, True, {"no_slots": 100}, 0),
        (None, False, {}, 0),  # nothing was computed
    ],
)
def test_computed_tokens_that_are_not_in_the_image_are_counted(
    image: KVImage | None, has_tokens: bool, recomputed: dict[str, int], num_bytes: int
) -> None:
    ticket = make_ticket()
    leg = make_leg(ticket, make_request(Ticket("o", 1, 2, Stage.DECODE, ticket.request, [[]])))
    if has_tokens:
        leg.note(TokenDelta("", 0, [9], first_index=0))
    transfers = make_transfers(Engine(0), Connector())
    transfers.count_handed_over(leg, image)
    assert dict(transfers.recomputed_tokens) == recomputed
    assert transfers.transferred_bytes["ipc"]["out"] == num_bytes
