# SPDX-License-Identifier: Apache-2.0
"""The engine as its agent uses it: a client whose requests are legs of tickets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from fastdeploy.core.faults import fault_point
from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.stats import EngineStats, NodeStats
from fastdeploy.ipc import messages
from fastdeploy.ipc.engine_socket import EngineSocket
from fastdeploy.ipc.merge import join_delta, join_tokens
from fastdeploy.kv_cache.connectors.base import TransferError
from fastdeploy.scheduler.agent_legs import Leg, make_leg, num_blocks
from fastdeploy.scheduler.agent_slots import Slots
from fastdeploy.scheduler.node_events import (
    EngineHandedOver,
    EngineProgress,
    EngineRejected,
    EngineTokens,
    Key,
    NodeEvent,
    RunId,
    SetRole,
)
from fastdeploy.scheduler.request_states import Role, Ticket, leg_id

SPARE_BLOCKS = 1  # for tokens that the engine emits before it reads `HandOver`

T = TypeVar("T")

logger = logging.getLogger("fastdeploy.agent")


class AgentEngine:
    """Translates between the node's state machine and the engine's messages; used from one event loop.

    Attributes:
        ready: the engine's description, once the model is loaded.
        stats: its latest counters.
        role: that was asked for last; None if none was.
        legs: what it runs for this agent, by request id.
        handover_s: seconds from the decision to hand over until the image was ready, and their number.
        on_events: called with what the state machine is to be told.
        on_ended: called with a leg whose text has ended here.
        on_handed_over: called with a leg that the engine has given up, and its image, if there is one.
    """

    def __init__(self, address: str, identity: bytes, on_lost: Callable[[str], None]) -> None:
        """Create the client.

        Args:
            address: ZeroMQ address of the engine.
            identity: of this agent (`agent_identity`), which no other one has or had.
            on_lost: called with the reason if nothing more can be received.
        """
        self.ready: messages.Ready | None = None
        self.stats = EngineStats()
        self.role: Role | None = None
        self.legs: dict[str, Leg] = {}
        self.handover_s = (0.0, 0)
        self._slots = Slots(0)
        self._block_size = 1
        self._stopping: dict[str, set[int]] = {}  # choices of aborted requests whose last deltas have not come
        self._waiting: dict[RunId, float] = {}  # hand-overs that wait for slots, and until when
        self._prepared: dict[str, asyncio.Future[int]] = {}
        self._attached: dict[str, asyncio.Future[None]] = {}
        self._started: asyncio.Future[None] | None = None
        self.on_events: Callable[[Sequence[NodeEvent]], None] = _ignore
        self.on_ended: Callable[[Leg], None] = _ignore
        self.on_handed_over: Callable[[Leg, KVImage | None], None] = _ignore
        self._socket = EngineSocket(address, identity, self._on_message, on_lost)

    async def start(self) -> messages.Ready:
        """Connect and wait until the model is loaded."""
        self._started = asyncio.get_running_loop().create_future()
        self._socket.connect()
        await self._started
        assert self.ready is not None
        cluster = self.ready.description["cluster"]
        self._slots = Slots(cluster["num_slots"])
        self._block_size = cluster["block_size"]
        return self.ready

    @property
    def is_stalled(self) -> bool:
        """Return whether the engine is stopped or hangs."""
        return self._socket.is_stalled

    @property
    def num_slots(self) -> int:
        """Return the number of slots of the arena."""
        return self._slots.num_slots

    @property
    def num_free_slots(self) -> int:
        """Return the number of free slots of the arena."""
        return self._slots.num_free

    def report(self, stats: NodeStats) -> None:
        """Send the agent's counters."""
        self._socket.send(messages.AgentReport(stats))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    # Legs.

    def take_slots(self, run: RunId, count: int) -> list[int]:
        """Reserve slots for a leg that will be started."""
        return self._slots.take(run, count)

    def start_leg(self, ticket: Ticket, request: GenerationRequest) -> None:
        """Let the engine run the request of a ticket."""
        fault_point("agent_start", request.request_id)
        self.legs[request.request_id] = make_leg(ticket, request)
        self._socket.send(messages.AddRequest(request))

    def stop_leg(self, key: Key, leg: int) -> None:
        """Abort a leg; what the engine still says of it is ignored."""
        request_id = leg_id(*key, leg)
        if (found := self._remove(request_id)) is not None:
            self._stopping[request_id] = found.open
            self._slots.free(found.run)
            self._socket.send(messages.AbortRequest(request_id))

    def hand_over(self, key: Key, leg: int, patience_s: float) -> None:
        """Ask the engine to give up a leg, as soon as there are slots for its blocks, or without after a while."""
        found = self.legs.get(leg_id(*key, leg))
        if found is None or found.handing_s is not None:
            return
        if found.request.hands_over:  # it has slots
            self._send_hand_over(found, [])
        else:
            self._waiting.setdefault(found.run, time.monotonic() + patience_s)
            self.hand_over_waiting()

    def hand_over_waiting(self) -> None:
        """Hand over, in their order, the legs for which there are slots, and those that have waited long enough."""
        is_full = False
        for run, until in [*self._waiting.items()]:
            leg = self.legs[leg_id(*run)]
            count = num_blocks(leg.num_context_tokens, self._block_size) + SPARE_BLOCKS
            count = min(count, self._slots.num_slots)
            is_full = is_full or count > self._slots.num_free
            is_late = time.monotonic() >= until
            if is_late or not is_full:
                del self._waiting[run]
                self._send_hand_over(leg, [] if is_late else self._slots.take(run, count))

    def keep_waiting(self) -> None:
        """Forget the hand-overs that wait for slots, because the node runs on."""
        self._waiting.clear()

    def free_image(self, run: RunId) -> None:
        """Free the slots of a leg that has ended."""
        self._slots.free(run)
        self.hand_over_waiting()

    def _send_hand_over(self, leg: Leg, slots: list[int]) -> None:
        fault_point("agent_drain", leg.request.request_id)
        leg.handing_s = time.monotonic()
        self._socket.send(messages.HandOver(leg.request.request_id, slots))

    def _remove(self, request_id: str) -> Leg | None:
        leg = self.legs.pop(request_id, None)
        if leg is not None:
            self._waiting.pop(leg.run, None)
        return leg

    # Images.

    async def prepare(self, request: GenerationRequest) -> int:
        """Let the engine import the image of a request; return how many tokens have arrived or were cached.

        Raises:
            TransferError: the engine refuses the request.
        """
        future = self._prepared[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send(messages.Prepare(request))
            fault_point("agent_fetch", request.request_id)
            return await future
        finally:
            del self._prepared[request.request_id]

    def cancel_prepared(self, request_id: str) -> None:
        """Release what was imported for a request that will not be started."""
        self._socket.send(messages.CancelPrepared(request_id))

    async def attach(self, name: str, path: str) -> None:
        """Let the engine map the arena of a peer, served at this path, under this name.

        Raises:
            TransferError: it cannot be mapped.
        """
        future = self._attached[name] = asyncio.get_running_loop().create_future()
        try:
            self._socket.send(messages.AttachArena(name, path))
            await future
        finally:
            del self._attached[name]

    def detach(self, name: str) -> None:
        """Let the engine unmap the arena of a peer."""
        self._socket.send(messages.DetachArena(name))

    # What the engine says.

    def _on_message(self, message: messages.ToClient) -> None:
        match message:
            case messages.Deltas():
                self._on_deltas(message)
            case messages.Stats(stats):
                self._on_stats(stats)
            case messages.Rejected():
                self._on_rejected(message)
            case messages.HandedOver():
                self._on_handed_over(message)
            case messages.Prepared(request_id, num_imported_tokens):
                _finish(self._prepared.get(request_id), num_imported_tokens)
            case messages.ArenaAttached(name, error):
                failure = TransferError("unreachable", error) if error else None
                _finish(self._attached.get(name), None, failure)
            case messages.SetRole(role):
                self.role = Role(role)
                self.on_events([SetRole(self.role)])
            case messages.Ready():
                self.ready = message
                _finish(self._started, None)

    def _on_deltas(self, message: messages.Deltas) -> None:
        """Merge the deltas of each choice, and tell the state machine."""
        merged: dict[tuple[str, int], TokenDelta] = {}
        for request_id, index, token_ids, sources, seed, first_index in message.plain:
            earlier = merged.get((request_id, index))
            if earlier is None:
                delta = TokenDelta(request_id, index, token_ids, sources, seed=seed, first_index=first_index)
                merged[request_id, index] = delta
            else:
                join_tokens(earlier, token_ids, sources)
        for delta in message.others:
            earlier = merged.setdefault((delta.request_id, delta.index), delta)
            if earlier is not delta:
                join_delta(earlier, delta)
        events: list[NodeEvent] = []
        for delta in merged.values():
            events += self._on_delta(delta)
        if events:
            self.on_events(events)

    def _on_delta(self, delta: TokenDelta) -> list[NodeEvent]:
        request_id, delta.request_id = delta.request_id, ""  # the owner has the client's id
        if (stopping := self._stopping.get(request_id)) is not None:
            if delta.finish_reason is not None:
                stopping.discard(delta.index)
                if not stopping:
                    del self._stopping[request_id]
            return []
        leg = self.legs.get(request_id)
        if leg is None:
            return []
        leg.note(delta)
        if leg.request.hands_over and leg.handing_s is None:
            leg.handing_s = time.monotonic()
        events: list[NodeEvent] = [EngineTokens(leg.key, leg.ticket.leg, delta.first_index, delta)]
        if not leg.open:
            self._remove(request_id)
            self._slots.free(leg.run)
            self.on_ended(leg)
            if leg.has_others:
                events.append(EngineHandedOver(leg.key, leg.ticket.leg, None))
        return events

    def _on_handed_over(self, message: messages.HandedOver) -> None:
        fault_point("agent_handed", message.request_id)
        if self._stopping.pop(message.request_id, None) is not None:
            return
        leg = self._remove(message.request_id)
        if leg is None:
            return
        if leg.handing_s is not None:
            seconds, count = self.handover_s
            self.handover_s = seconds + time.monotonic() - leg.handing_s, count + 1
        handover = message.handover
        image = None if handover is None else handover.image
        slots = [] if image is None else image.slots
        self._slots.keep(leg.run, slots)
        self.on_handed_over(leg, image)
        content = encode_image(image) if image is not None and slots else None
        num_cached_tokens = 0 if handover is None else handover.num_cached_tokens
        self.on_events([EngineHandedOver(leg.key, leg.ticket.leg, content, len(slots), num_cached_tokens)])

    def _on_rejected(self, message: messages.Rejected) -> None:
        request_id, kind = message.request_id, message.kind
        _finish(self._prepared.get(request_id), 0, TransferError("refused", message.message))
        if self._stopping.pop(request_id, None) is not None:
            return
        leg = self._remove(request_id)
        if leg is None:
            return
        self._slots.free(leg.run)
        if kind == "internal":
            self.on_events(leg.fail(message.message))
            return
        has_begun = any(leg.ticket.resumed) and leg.request.params.form is not None
        is_final = kind == "invalid" and not has_begun  # its form has been compiled before: this one was too slow
        kind = "invalid" if is_final else "room"
        self.on_events([EngineRejected(leg.key, leg.ticket.leg, kind, message.field, message.message)])

    def _on_stats(self, stats: EngineStats) -> None:
        """Take the counters; the engine says nothing of single prompts, so that any progress counts for all of them."""
        old, self.stats = self.stats, stats
        has_progress = (stats.num_steps, stats.num_waiting_tokens) != (old.num_steps, old.num_waiting_tokens)
        events: list[NodeEvent] = []
        for leg in self.legs.values():
            leg.num_stats += 1
            if has_progress and not leg.has_tokens:
                leg.num_computed += 1
                events.append(EngineProgress(leg.key, leg.ticket.leg, leg.num_computed))
        self.on_events(events)


def _ignore(*_: object) -> None:
    """Do nothing, as long as there is no agent."""


def encode_image(image: KVImage) -> bytes:
    """Encode an image for `Image.content`."""
    return msgspec.msgpack.encode(image)


def decode_image(content: bytes) -> KVImage:
    """Decode `Image.content`; raise TransferError if it cannot be read."""
    try:
        image = msgspec.msgpack.decode(content, type=KVImage)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise TransferError("refused", f"the image cannot be read: {error}") from None
    if image.num_tokens < 1 or not image.slots or len(image.slots) != len(image.generations):
        raise TransferError("refused", "the image has no tokens, or not one generation per slot")
    return image


def _finish(future: asyncio.Future[T] | None, result: T, error: Exception | None = None) -> None:
    if future is None or future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
