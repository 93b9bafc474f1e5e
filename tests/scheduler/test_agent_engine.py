# SPDX-License-Identifier: Apache-2.0
"""The agent's side of the engine's socket: a scripted engine answers, and the right events are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.guided_decoding import GuidedDecodingParams
from fastdeploy.core.handover import Handover, KVImage
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.ipc import messages
from fastdeploy.kv_cache.connectors.base import TransferError
from fastdeploy.scheduler.agent_engine import AgentEngine, encode_image
from fastdeploy.scheduler.agent_legs import Leg, make_request
from fastdeploy.scheduler.node_events import (
    EngineHandedOver,
    EngineProgress,
    EngineRejected,
    EngineTokens,
    NodeEvent,
    SetRole,
)
from fastdeploy.scheduler.request_states import Role, Stage, Ticket

CLUSTER = {"group": "g", "layouts": {}, "num_slots": 4, "block_size": 64}
KEY, LEG, ID = ("o", 1), 1, "o/1/1"


class ScriptedEngine:
    """The other end of the socket, and an agent connected to it."""

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)
        self.batches: list[list[NodeEvent]] = []
        self.ended: list[Leg] = []
        self.lost: list[str] = []
        self.agent = AgentEngine(address, b"agent", self.lost.append)
        self.agent.on_events = self._on_events
        self.agent.on_ended = self.ended.append

    async def start(self) -> None:
        starting = asyncio.create_task(self.agent.start())
        assert await self.receive() == messages.Hello()
        await self.send(messages.Ready(100, 512, [1], {"cluster": CLUSTER}))
        await starting

    def close(self) -> None:
        self.agent.close()
        self._context.destroy(linger=0)

    @property
    def events(self) -> list[NodeEvent]:
        """Return what the state machine was told since the last call."""
        events = [event for batch in self.batches for event in batch]
        self.batches.clear()
        return events

    async def receive(self) -> messages.ToEngine:
        identity, payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        assert identity == b"agent"
        return messages.decode_to_engine(payload)

    async def send(self, *sent: messages.ToClient) -> None:
        """Send messages and wait until the agent has read them."""
        for message in sent:
            await self._socket.send_multipart([b"agent", messages.encode(message)])
        await self._socket.send_multipart([b"agent", messages.encode(messages.SetRole("mixed"))])  # a mark
        for _ in range(10_000):
            await asyncio.sleep(0.001)
            if [SetRole(Role.MIXED)] in self.batches:
                self.batches.remove([SetRole(Role.MIXED)])
                return
        pytest.fail("the agent does not read")

    def _on_events(self, events: Sequence[NodeEvent]) -> None:
        self.batches.append(list(events))

    async def add(self, ticket: Ticket, hands_over: bool = False, slots: int = 0) -> None:
        taken = self.agent.take_slots((*ticket.key, ticket.leg), slots)
        request = make_request(ticket, hands_over, taken)
        self.agent.start_leg(ticket, request)
        assert await self.receive() == messages.AddRequest(request)


def run(folder: Path, test: Callable[[ScriptedEngine], Awaitable[None]]) -> None:
    async def body() -> None:
        engine = ScriptedEngine(folder)
        try:
            await engine.start()
            await test(engine)
        finally:
            engine.close()

    asyncio.run(body())


def make_ticket(*resumed: list[int] | None, number: int = 1, prompt: int = 100, **params: Any) -> Ticket:
    request = GenerationRequest("c", [5] * prompt, SamplingParams(n=max(1, len(resumed)), **params))
    return Ticket("o", number, LEG, Stage.PREFILL, request, list(resumed) or [[]])


def plain(request_id: str, index: int, token_ids: list[int], first_index: int) -> messages.PlainDelta:
    return request_id, index, token_ids, [], 7, first_index


def test_the_deltas_of_one_message_are_one_event_per_choice(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket())
        last = TokenDelta(ID, 0, [8], finish_reason="stop", seed=7, first_index=2)
        await engine.send(messages.Deltas([plain(ID, 0, [5], 0), plain(ID, 0, [6, 7], 1)], [last]))
        (event,) = engine.events
        assert isinstance(event, EngineTokens)
        assert (event.key, event.leg, event.first_index) == (KEY, LEG, 0)
        delta = event.delta
        assert (delta.request_id, delta.token_ids, delta.finish_reason, delta.seed) == ("", [5, 6, 7, 8], "stop", 7)
        assert delta.steps == [(1, []), (2, []), (1, [])]
        assert [leg.output for leg in engine.ended] == [[5, 6, 7, 8]]
        assert engine.agent.legs == {}

    run(tmp_path, test)


def test_an_image_keeps_its_slots_until_it_is_freed(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket(), hands_over=True, slots=3)
        assert engine.agent.num_free_slots == 1
        image = KVImage("", [0, 1], [1, 1], 100)
        tokens = messages.Deltas([plain(ID, 0, [5], 0)], [])
        await engine.send(tokens, messages.HandedOver(ID, Handover(ID, [[5]], image, num_cached_tokens=64)))
        tokens_event, handed = engine.events
        assert isinstance(tokens_event, EngineTokens)
        assert handed == EngineHandedOver(KEY, LEG, encode_image(image), 2, 64)
        assert (engine.agent.num_free_slots, engine.agent.handover_s[1]) == (2, 1)
        engine.agent.free_image((*KEY, LEG))
        assert engine.agent.num_free_slots == 4

    run(tmp_path, test)


def test_a_choice_that_ends_here_leaves_the_others_to_another_node(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket([], []), hands_over=True, slots=2)
        await engine.send(messages.Deltas([], [TokenDelta(ID, 0, [1], finish_reason="stop")]))
        tokens, handed = engine.events
        assert isinstance(tokens, EngineTokens)
        assert handed == EngineHandedOver(KEY, LEG, None)
        assert engine.agent.num_free_slots == 4

    run(tmp_path, test)


def test_what_the_engine_says_of_an_aborted_run_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket(), hands_over=True, slots=2)
        engine.agent.stop_leg(KEY, LEG)
        assert engine.agent.num_free_slots == 4
        assert await engine.receive() == messages.AbortRequest(ID)
        await engine.add(make_ticket())
        aborted = TokenDelta(ID, 0, [], finish_reason="abort", first_index=1)
        await engine.send(
            messages.Deltas([plain(ID, 0, [5], 0)], [aborted]), messages.Deltas([plain(ID, 0, [6], 0)], [])
        )
        assert [event.delta.token_ids for event in engine.events if isinstance(event, EngineTokens)] == [[6]]

    run(tmp_path, test)


def test_an_aborted_run_may_also_end_by_a_hand_over_or_a_refusal(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        for end in (messages.HandedOver(ID, Handover(ID, [[5]])), messages.Rejected(ID, "full", "", "full")):
            await engine.add(make_ticket())
            engine.agent.stop_leg(KEY, LEG)
            assert await engine.receive() == messages.AbortRequest(ID)
            await engine.add(make_ticket())
            await engine.send(end, messages.Deltas([plain(ID, 0, [6], 0)], []))
            assert [type(event) for event in engine.events] == [EngineTokens]
            engine.agent.stop_leg(KEY, LEG)
            assert await engine.receive() == messages.AbortRequest(ID)
            await engine.send(messages.Deltas([], [TokenDelta(ID, 0, [], finish_reason="abort", first_index=1)]))
            assert engine.events == []

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("kind", "resumed", "form", "told"),
    [
        ("invalid", [], False, "invalid"),
        ("full", [], False, "room"),
        ("invalid", [], True, "invalid"),
        ("invalid", [7], True, "room"),  # it has compiled elsewhere: here it took too long
        ("invalid", [7], False, "invalid"),
    ],
)
def test_a_refusal_is_final_or_for_want_of_room(
    tmp_path: Path, kind: str, resumed: list[int], form: bool, told: str
) -> None:
    async def test(engine: ScriptedEngine) -> None:
        params = {"guided_decoding": GuidedDecodingParams(regex="a+")} if form else {}
        await engine.add(make_ticket(resumed, **params), hands_over=True, slots=1)
        await engine.send(messages.Rejected(ID, kind, "n", "is wrong"))
        assert engine.events == [EngineRejected(KEY, LEG, told, "n", "is wrong")]
        assert (engine.agent.legs, engine.agent.num_free_slots) == ({}, 4)

    run(tmp_path, test)


def test_an_internal_error_is_the_last_delta_of_every_choice(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket([], [7]))
        await engine.send(messages.Rejected(ID, "internal", "", "it broke"))
        ends = [(event.first_index, event.delta.finish_reason) for event in engine.events]  # type: ignore[union-attr]
        assert ends == [(0, "error"), (1, "error")]

    run(tmp_path, test)


def test_a_drain_hands_over_in_waves_and_without_slots_in_the_end(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        for number in (1, 2, 3):
            await engine.add(make_ticket(number=number, prompt=70))  # two blocks, and a spare one
        for number in (1, 2, 3):
            engine.agent.hand_over(("o", number), LEG, patience_s=1000 if number < 3 else 0)
        assert await engine.receive() == messages.HandOver("o/1/1", [0, 1, 2])
        assert await engine.receive() == messages.HandOver("o/3/1", [])
        await engine.send(messages.HandedOver("o/1/1", Handover("o/1/1", [[]], KVImage("", [0, 1], [1, 1], 70))))
        engine.agent.hand_over_waiting()  # two slots are free: too few
        engine.agent.free_image(("o", 1, LEG))
        second = await engine.receive()
        assert isinstance(second, messages.HandOver)
        assert (second.request_id, len(second.export_slots)) == ("o/2/1", 3)
        engine.agent.hand_over(("o", 3), LEG, patience_s=0)  # it has been asked for
        engine.agent.hand_over(("o", 9), LEG, patience_s=0)  # it has ended
        await engine.send(messages.HandedOver("o/3/1", Handover("o/3/1", [[]])))
        assert engine.events[-1] == EngineHandedOver(("o", 3), LEG, None)

    run(tmp_path, test)


def test_a_leg_that_hands_over_keeps_its_slots_when_the_node_drains(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket(), hands_over=True, slots=4)
        engine.agent.hand_over(KEY, LEG, patience_s=1000)
        assert await engine.receive() == messages.HandOver(ID, [])

    run(tmp_path, test)


def test_legs_that_end_while_they_wait_for_slots_are_forgotten(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket(number=2), hands_over=True, slots=4)
        await engine.add(make_ticket())
        engine.agent.hand_over(KEY, LEG, patience_s=1000)
        await engine.send(messages.Deltas([], [TokenDelta(ID, 0, [1], finish_reason="stop")]))
        engine.agent.free_image(("o", 2, LEG))
        engine.agent.hand_over(("o", 2), LEG, patience_s=1000)
        assert await engine.receive() == messages.HandOver("o/2/1", [])

    run(tmp_path, test)


def test_any_progress_of_the_engine_counts_for_the_legs_without_tokens(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.add(make_ticket())
        await engine.add(make_ticket(number=2))
        await engine.send(messages.Deltas([plain("o/2/1", 0, [5], 0)], []))
        engine.batches.clear()
        counters = [EngineStats(num_waiting_tokens=count) for count in (70, 70, 40)]
        await engine.send(
            *map(messages.Stats, counters), messages.Stats(EngineStats(num_waiting_tokens=40, num_steps=1))
        )
        assert engine.events == [EngineProgress(KEY, LEG, count) for count in (1, 2, 3)]

    run(tmp_path, test)


def test_a_request_is_prepared_or_refused(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        request = make_request(make_ticket())
        for answer in (messages.Prepared(ID, 64), messages.Rejected(ID, "invalid", "n", "is wrong")):
            preparing = asyncio.create_task(engine.agent.prepare(request))
            assert await engine.receive() == messages.Prepare(request)
            await engine.send(answer)
            if isinstance(answer, messages.Prepared):
                assert await preparing == 64
            else:
                with pytest.raises(TransferError, match="is wrong"):
                    await preparing
        assert engine.events == []
        engine.agent.cancel_prepared(ID)
        assert await engine.receive() == messages.CancelPrepared(ID)

    run(tmp_path, test)


def test_an_arena_is_attached_or_not(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        for error in ("", "no such file"):
            attaching = asyncio.create_task(engine.agent.attach("p:1", "/p/arena"))
            assert await engine.receive() == messages.AttachArena("p:1", "/p/arena")
            await engine.send(messages.ArenaAttached("p:1", error))
            if error:
                with pytest.raises(TransferError, match=error):
                    await attaching
            else:
                await attaching
        engine.agent.detach("p:1")
        assert await engine.receive() == messages.DetachArena("p:1")

    run(tmp_path, test)


def test_a_role_is_passed_on(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine.send(messages.SetRole("draining"))
        assert engine.events == [SetRole(Role.DRAINING)]

    run(tmp_path, test)


def test_a_message_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    async def test(engine: ScriptedEngine) -> None:
        await engine._socket.send_multipart([b"agent", b"\x91\xa1x"])
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if engine.lost:
                break
        assert len(engine.lost) == 1

    run(tmp_path, test)
