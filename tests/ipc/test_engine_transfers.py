# SPDX-License-Identifier: Apache-2.0
"""Messages about requests and blocks that move between two engine servers, with the mock engine in both."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover, KVImage
from fastdeploy.core.stats import NodeStats
from fastdeploy.engine.engine_factory import make_engine as make_real_engine
from fastdeploy.ipc import messages
from fastdeploy.ipc.client import EngineClient
from fastdeploy.kv_cache.arena_socket import arena_file, open_arena
from tests.exactness.engines import config
from tests.ipc.served_engines import FIRST_AGENT, SECOND_AGENT, Client, ServedEngine, mock_engine, request, served
from tests.mock_engine import FACTORY, save_mock_model

SLOTS = [3, 5, 7, 9]


def alone(folder: Path, max_tokens: int) -> list[int]:
    """Return the text of `request()`, computed by one engine."""
    with served(folder, mock_engine(folder / "alone", hands_over=False)) as [one]:
        one.agent.send(messages.AddRequest(request(max_tokens=max_tokens)))
        one.agent.finish("r")
        return one.agent.tokens("r")


def attach(first: ServedEngine, second: ServedEngine) -> None:
    second.agent.send(messages.AttachArena("first", first.arena_path))
    assert second.agent.expect(messages.ArenaAttached) == messages.ArenaAttached("first", "")


def handed_over(node: ServedEngine, request_id: str = "r") -> Handover:
    message = node.agent.expect(messages.HandedOver)
    assert message.request_id == request_id and message.handover is not None
    return message.handover


def continued(handover: Handover, **params: object) -> GenerationRequest:
    image = handover.image and replace(handover.image, arena="first")
    return replace(request(handover.request_id, **params), resumed=handover.resumed, image=image)


def test_a_prompt_is_computed_by_one_engine_and_continued_by_another(tmp_path: Path) -> None:
    text = alone(tmp_path, max_tokens=20)
    engines = mock_engine(tmp_path / "p", export_s=0.05), mock_engine(tmp_path / "d", import_s=0.05)
    with served(tmp_path, *engines) as [first, second]:
        attach(first, second)
        first.agent.send(messages.AddRequest(replace(request(max_tokens=20), hands_over=True, export_slots=SLOTS)))
        handover = handed_over(first)
        assert handover == Handover("r", [text[:1]], KVImage("", [3, 5, 7], [1, 1, 1], 150))
        assert first.agent.tokens("r") == text[:1]
        ticket = continued(handover, max_tokens=20)
        second.agent.send(messages.Prepare(ticket))
        assert second.agent.receive() == messages.Prepared("r", 150)
        second.agent.send(messages.AddRequest(ticket))
        metrics = second.agent.finish("r").metrics
        assert second.agent.tokens("r", first_index=1) == text[1:]
        assert metrics is not None and metrics.num_transferred_tokens == 150
        assert engines[1].stats().num_imported_tokens == 150


def test_a_text_is_handed_over_in_the_middle_behind_all_of_its_tokens(tmp_path: Path) -> None:
    text = alone(tmp_path, max_tokens=300)
    engines = mock_engine(tmp_path / "p", step_s=0.001, export_s=0.1), mock_engine(tmp_path / "d")
    with served(tmp_path, *engines) as [first, second]:
        attach(first, second)
        first.agent.send(messages.AddRequest(request(max_tokens=300)))
        while len(first.agent.tokens("r")) < 20:
            first.agent.receive()
        once_and_again = messages.HandOver("r", [0, 1, 2, 3, 4, 5, 6, 7]), messages.HandOver("r", [])
        first.agent.send(*once_and_again)
        handover = handed_over(first)
        first.agent.send(messages.HandOver("gone", []))
        assert first.agent.receive() == messages.HandedOver("gone", None), "a request is handed over once"
        [resumed] = handover.resumed
        assert resumed == first.agent.tokens("r") == text[: len(resumed or ())]
        assert handover.image is not None and handover.image.num_tokens == 150 + len(resumed) - 1
        second.agent.send(messages.AddRequest(continued(handover, max_tokens=300)))
        second.agent.finish("r")
        assert resumed + second.agent.tokens("r", len(resumed)) == text


def test_a_prompt_is_handed_over_before_its_first_token(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "p", prefill_s_per_token=1e-3)) as [node]:
        node.agent.send(messages.AddRequest(request(num_prompt=1900, max_tokens=1)), messages.HandOver("r", [4]))
        handover = handed_over(node)
        assert handover.resumed == [[]]
        assert handover.image is None or handover.image == KVImage("", [4], [1], 64)
        assert node.agent.deltas("r") == []


def test_without_a_transfer_requests_are_handed_over_without_images(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "g", hands_over=False, hold=True, step_s=0.001)) as [node]:
        (tmp_path / "g" / "hold").touch()
        node.agent.send(messages.AddRequest(request(max_tokens=50)))
        node.agent.expect(messages.Deltas)
        node.agent.send(messages.HandOver("r", []))
        assert handed_over(node) == Handover("r", [node.agent.tokens("r")], None)
        node.agent.send(messages.AttachArena("x", node.arena_path))
        assert node.agent.expect(messages.ArenaAttached).error.endswith("No such file or directory")


def test_an_unknown_request_is_handed_over_as_unknown(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "m")) as [node]:
        node.agent.send(messages.HandOver("gone", []))
        assert node.agent.receive() == messages.HandedOver("gone", None)


def test_a_request_that_is_being_prepared_is_handed_over_as_it_came(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "m", import_s=0.2)) as [node]:
        attach_self(node)
        ticket = replace(request(), resumed=[[20, 21]], image=KVImage("first", [1], [99], 64))
        node.agent.send(messages.AddRequest(ticket), messages.HandOver("r", []))
        assert handed_over(node) == Handover("r", [[20, 21]], None)


def attach_self(node: ServedEngine) -> None:
    attach(node, node)


def test_prepared_requests_are_cancelled_aborted_and_refused_if_their_id_is_in_use(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "m", hold=True, step_s=0.001)) as [node]:
        (tmp_path / "m" / "hold").touch()
        node.agent.send(messages.Prepare(request()), messages.Prepare(request()))
        in_use = messages.Rejected("r", "invalid", "request_id", "'r' is in flight already")
        assert [node.agent.receive(), node.agent.receive()] == [messages.Prepared("r", 0), in_use]
        other = node.connect(b"other")
        other.send(messages.AddRequest(request()))
        assert other.receive() == in_use
        node.agent.send(messages.AbortRequest("r"), messages.Prepare(request()), messages.CancelPrepared("r"))
        assert node.agent.receive() == messages.Prepared("r", 0)
        node.agent.send(messages.AddRequest(request(max_tokens=9)))
        node.agent.expect(messages.Deltas)
        node.agent.send(messages.Prepare(request()))
        assert node.agent.receive() == in_use
        node.agent.send(messages.AddRequest(request("added", max_tokens=9)), messages.CancelPrepared("added"))
        assert node.agent.finish("added").finish_reason == "abort"
        node.agent.send(messages.AbortMany(1, None, ""))
        assert node.agent.finish("r").finish_reason == "abort"
        assert node.agent.expect(messages.Aborted) == messages.Aborted(1, [("r", 1)])


def test_what_an_agent_has_prepared_runs_and_hands_over_ends_with_it(tmp_path: Path) -> None:
    engine = mock_engine(tmp_path / "m", hold=True, step_s=0.001, export_s=2.0)
    (tmp_path / "m" / "hold").touch()
    with served(tmp_path, engine) as [node]:
        attach_self(node)
        for name in ("runs", "leaves"):
            node.agent.send(messages.AddRequest(replace(request(name, max_tokens=9), export_slots=[ord(name[0]) % 64])))
        node.agent.send(messages.Prepare(replace(request("waits"), image=KVImage("first", [1], [99], 64))))
        node.agent.expect(messages.Prepared)
        node.agent.send(messages.HandOver("leaves", []))
        while not engine.is_moving:
            time.sleep(0.001)
        again = node.connect(SECOND_AGENT)
        node.connect(b"owner").send(messages.ClientDisconnected(FIRST_AGENT))
        while node.server._clients >= {FIRST_AGENT}:
            time.sleep(0.001)
        again.send(messages.AddRequest(request("leaves", max_tokens=1)), messages.AttachArena("first", "/nowhere"))
        assert again.expect(messages.Rejected).message == "'leaves' is in flight already"
        assert again.expect(messages.ArenaAttached).error == "/nowhere: [Errno 2] No such file or directory"
        while node.server._in_flight:
            again.send(messages.AgentReport(NodeStats()))
        again.send(messages.Prepare(replace(request("waits"), image=KVImage("first", [1], [99], 64))))
        again.expect(messages.Prepared)
        again.send(messages.CancelPrepared("waits"))
        assert engine.transfer is not None and not engine.transfer._peers, "the former agent's arenas are detached"
        assert engine.stats().num_running == 0
        assert [type(message) for message in again.received if not isinstance(message, messages.Ready)] == [
            messages.Rejected,
            messages.ArenaAttached,
            messages.Prepared,
        ]


def wait_for_report(client: Client, expected: NodeStats | None) -> None:
    """Wait until the engine's statistics say this of the agent; they are sent whenever the engine becomes idle."""
    while client.stats.stats.node != expected:
        client.send(messages.HandOver("gone", []))
        client.receive()


@pytest.mark.timeout(60)
def test_the_agents_report_goes_to_all_clients_and_a_role_to_the_agent(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "m")) as [node]:
        api = node.connect(b"api")
        node.agent.send(messages.AgentReport(NodeStats(node="n1", role="decode")))
        api.send(messages.SetRole("draining"))
        assert node.agent.receive() == messages.SetRole("draining")
        wait_for_report(api, NodeStats(node="n1", role="decode"))
        again = node.connect(SECOND_AGENT)
        first, ready = again.received
        assert first == messages.SetRole("draining"), "a new agent begins with the role that was set last"
        assert isinstance(ready, messages.Ready)
        api.send(messages.SetRole("mixed"))
        assert again.receive() == messages.SetRole("mixed")
        api.send(messages.ClientDisconnected(FIRST_AGENT))
        wait_for_report(api, None)  # what the former agent has reported is no longer so


def test_slots_that_do_not_exist_or_twice_give_no_image(tmp_path: Path) -> None:
    with served(tmp_path, mock_engine(tmp_path / "m", hold=True, step_s=0.001)) as [node]:
        (tmp_path / "m" / "hold").touch()
        for slots in ([64], [-1], [2, 2]):
            node.agent.send(messages.AddRequest(request(max_tokens=9)))
            node.agent.expect(messages.Deltas)
            node.agent.send(messages.HandOver("r", slots))
            assert handed_over(node).image is None
        node.agent.send(messages.AddRequest(replace(request(), export_slots=[64])))
        assert node.agent.receive() == messages.Rejected(
            "r", "invalid", "export_slots", "expected different slots in [0, 63], got [64]"
        )


@pytest.mark.parametrize("name", ["first", "other"])
def test_detached_arenas_deliver_nothing(tmp_path: Path, name: str) -> None:
    with served(tmp_path, mock_engine(tmp_path / "p"), mock_engine(tmp_path / "d", import_s=0.05)) as [first, second]:
        attach(first, second)
        first.agent.send(messages.AddRequest(replace(request(max_tokens=20), hands_over=True, export_slots=SLOTS)))
        ticket = continued(handed_over(first), max_tokens=20)
        second.agent.send(messages.Prepare(ticket), messages.DetachArena(name))
        assert second.agent.receive() == messages.Prepared("r", 150), "what has begun is copied to its end"
        second.agent.send(messages.CancelPrepared("r"), messages.Prepare(ticket))
        assert second.agent.receive() == messages.Prepared("r", 0 if name == "first" else 150)
        second.agent.send(messages.CancelPrepared("r"))


def test_the_engine_process_serves_its_arena_beside_its_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = EngineConfig(model=str(save_mock_model(tmp_path, num_slots=5)), max_model_len=400, hands_over=True)
        client = EngineClient(config, factory=FACTORY)
        try:
            await client.start()
            arena = await asyncio.to_thread(open_arena, arena_file(client.address), 10.0)
            assert arena.num_slots == 5
            arena.close()
            assert client.ready is not None and client.ready.description["cluster"]["num_slots"] == 5
        finally:
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "image",
    [
        KVImage("first", [0], [0], -100),
        KVImage("first", [], [], 64),
        KVImage("first", [-1, 2**62], [-1, 2**63], 128, [[-1], [2**40]]),
        KVImage("nobody", [0], [0], 64),
    ],
)
def test_images_that_make_no_sense_deliver_nothing(tmp_path: Path, image: KVImage) -> None:
    cfg = config("mtp", 3)
    engine = make_real_engine(replace(cfg, is_clustered=True, hands_over=True))
    with served(tmp_path, engine) as [node]:
        attach(node, node)
        ticket = replace(request(num_prompt=100, max_tokens=4), image=image)
        node.agent.send(messages.Prepare(ticket), messages.AddRequest(ticket))
        assert node.agent.finish("r").finish_reason == "length"
        assert [m for m in node.agent.received if isinstance(m, messages.Prepared)] in ([], [messages.Prepared("r", 0)])
    engine.check_integrity()
