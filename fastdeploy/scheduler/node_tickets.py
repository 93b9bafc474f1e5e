# SPDX-License-Identifier: Apache-2.0
"""The tickets of a node and how they begin and end; see `request_states.py`."""

from __future__ import annotations

from fastdeploy.scheduler.held_ticket import HeldState, HeldTicket
from fastdeploy.scheduler.liveness import Liveness
from fastdeploy.scheduler.node_events import (
    Claim,
    Drop,
    Fetch,
    FreeImage,
    HandOver,
    Key,
    NodeAction,
    StartEngine,
    StopEngine,
    TicketRead,
)
from fastdeploy.scheduler.node_outbox import Outbox
from fastdeploy.scheduler.request_states import (
    Claimed,
    Limits,
    Member,
    Refused,
    Release,
    Role,
    Stage,
    Tell,
    Ticket,
)

CLAIM_DELAY = 2  # sync periods in which owners notice that Redis has lost writes, and delete obsolete tickets


class NodeTickets:
    """The tickets of one node and what it knows of others; used from one thread.

    Attributes:
        incarnation: grows when the node was stopped; a new process begins with another one (`next_incarnation`).
        role: which tickets the node prefers.
        tickets: by (owner, number, leg), in order of claims.
        num_free_slots: slots of the arena that no ticket has.
        num_orphaned: requests that were ended because their owner was gone, for metrics.
    """

    def __init__(self, name: str, incarnation: int, role: Role, num_slots: int, limits: Limits, now: float) -> None:
        self.name = name
        self.incarnation = incarnation
        self.role = role
        self.tickets: dict[tuple[str, int, int], HeldTicket] = {}
        self.num_free_slots = num_slots
        self.num_orphaned = 0
        self._num_slots = num_slots
        self._limits = limits
        self._now = now
        self._is_redis_up = True
        self._recorded: int | None = None  # the incarnation of the last heartbeat
        self._liveness = Liveness(limits, now)
        self._claims_at = now + CLAIM_DELAY * limits.sync_s
        self._holding_at = now
        self._members: dict[str, Member] = {}
        self._owners: set[str] = set()  # those that live
        self._ended: dict[Key, tuple[int, float]] = {}  # the last leg that ended here, and until when it is remembered
        self._closed_until: dict[Stage, float] = {}  # after a refusal
        self._waits_for_end: set[Stage] = set()  # stages that stay closed until something has ended
        self._outbox = Outbox(limits.max_unsent)
        self._seq = 0
        self._may_start = False  # whether slots may have become free for tickets that wait, or tickets were announced
        self._actions: list[NodeAction] = []

    def claimable_stages(self) -> list[Stage]:
        """Return the queues to read, if there is room, in order of preference."""
        if not self._is_redis_up or self._now < self._claims_at or self.role is Role.DRAINING:
            return []
        roles = {member.role for member in self._members.values()}
        own = [stage for stage in Stage if self.role in (Role.MIXED, Role(stage.value))]
        others = [stage for stage in Stage if stage not in own and not roles & {Role.MIXED, Role(stage.value)}]
        stages = [*reversed(own), *others]
        waits_for_slots = any(held.state is HeldState.ANNOUNCED for held in self.tickets.values())
        return [stage for stage in stages if self._is_open(stage) and not (waits_for_slots and stage is Stage.PREFILL)]

    # Claims.

    def _on_ticket(self, event: TicketRead) -> None:
        ticket = event.ticket
        held = self._find(ticket.key, ticket.leg)
        if held is not None and held.state is HeldState.CLAIMED:
            held.entry = event.entry
            self._announce(held)
        elif held is not None or any(one.key == ticket.key and one.leg > ticket.leg for one in self.tickets.values()):
            self._actions.append(Drop(event.entry))
        elif reason := self._refusal(ticket):
            refused = Refused(*self._source(ticket.number, ticket.leg), "room", message=reason)
            self._actions.append(Claim(ticket.owner, refused, event.entry))
        else:
            self._claim(event)

    def _refusal(self, ticket: Ticket) -> str:
        """Return why this node does not take a ticket now; "" if it does."""
        ended_leg, _ = self._ended.get(ticket.key, (0, 0.0))
        if ticket.leg <= ended_leg:  # another run of it could be taken for the first one
            return "this leg has ended here"
        if self.role is Role.DRAINING:
            return "the node is draining"
        if ticket.num_attempts >= 2 and any(held.is_suspicious for held in self.tickets.values()):
            self._close(ticket.stage)
            return "the node runs another request that two nodes have lost"
        return ""

    def _claim(self, event: TicketRead) -> None:
        ticket = event.ticket
        for held in [*self.tickets.values()]:
            if held.key == ticket.key and held.state is not HeldState.HANDING:
                self._abort(held)
        roles = {member.role for member in self._members.values()}
        is_prefill = self.role is Role.PREFILL and ticket.stage is Stage.PREFILL and ticket.image is None
        hands_over = is_prefill and bool(roles & {Role.DECODE, Role.MIXED})
        num_slots = event.export_slots if hands_over else event.import_slots if ticket.image is not None else 0
        held = HeldTicket(ticket, event.entry, hands_over, min(num_slots, self._num_slots))
        self.tickets[(*ticket.key, ticket.leg)] = held
        self._announce(held)

    def _announce(self, held: HeldTicket) -> None:
        """Tell the owner, unless it could still read the record of an earlier incarnation, and judge this one by it."""
        if self._recorded != self.incarnation:
            return
        claimed = Claimed(*self._source(held.ticket.number, held.leg))
        self._actions.append(Claim(held.ticket.owner, claimed, held.entry))

    def _on_record_written(self, incarnation: int) -> None:
        was_known = self._recorded == self.incarnation
        self._recorded = incarnation
        if not was_known:
            for held in self.tickets.values():
                if held.state is HeldState.CLAIMED:
                    self._announce(held)

    def _on_claim_written(self, held: HeldTicket | None) -> None:
        if held is not None and held.state is HeldState.CLAIMED:
            held.state = HeldState.ANNOUNCED
            self._may_start = True

    def _start_announced(self) -> None:
        """Start announced tickets.

        Those that hand over wait for slots in the order of their claims. The others never wait, because the slots may
        belong to images that only they can free: without slots, an image is not fetched and the context is computed.
        """
        self._may_start = is_full = False
        for held in [held for held in self.tickets.values() if held.state is HeldState.ANNOUNCED]:
            fits = held.num_wanted_slots <= self.num_free_slots
            if held.hands_over and (is_full or not fits):
                is_full = True
                continue
            if fits:
                held.num_slots = held.num_wanted_slots
                self.num_free_slots -= held.num_slots
            if fits and held.ticket.image is not None:
                held.state = HeldState.PULLING
                self._actions.append(Fetch(held.ticket))
            else:
                self._release_image(held)
                self._start_engine(held)

    def _release_image(self, held: HeldTicket) -> None:
        image = held.ticket.image
        if image is not None:
            self._actions.append(Tell(image.node, Release(held.ticket.owner, held.ticket.number, image.leg)))

    def _start_engine(self, held: HeldTicket) -> None:
        held.state = HeldState.RUNNING
        self._actions.append(StartEngine(held.ticket, held.hands_over))
        if self.role is Role.DRAINING:
            self._actions.append(HandOver(held.key, held.leg))

    def _on_fetched(self, held: HeldTicket | None) -> None:
        if held is None or held.state not in (HeldState.PULLING, HeldState.ABORTED):
            return
        self._release_image(held)
        if held.state is HeldState.ABORTED:
            self._remove(held)
            return
        self._free_slots(held)
        self._start_engine(held)

    # Ends.

    def _abort(self, held: HeldTicket) -> None:
        """Stop whatever is done for a ticket and forget it."""
        if held.state is HeldState.CLAIMED:
            self._actions.append(Drop(held.entry))
        elif held.state is HeldState.RUNNING:
            self._actions.append(StopEngine(held.key, held.leg))
        if held.state is HeldState.PULLING:
            held.state = HeldState.ABORTED
        elif held.state is not HeldState.ABORTED:
            self._remove(held)

    def _remember(self, key: Key, leg: int) -> None:
        """Refuse this leg and earlier ones for a while."""
        ended_leg, _ = self._ended.get(key, (0, 0.0))
        self._ended[key] = max(leg, ended_leg), self._now + self._limits.remember_s

    def _remove(self, held: HeldTicket) -> None:
        del self.tickets[(*held.key, held.leg)]
        self._remember(held.key, held.leg)
        self._waits_for_end.clear()
        if held.num_slots > 0:
            self._free_slots(held)
            self._actions.append(FreeImage(held.key, held.leg))

    def _free_slots(self, held: HeldTicket, num_kept: int = 0) -> None:
        """Change the number of slots that a ticket has."""
        self.num_free_slots += held.num_slots - num_kept
        held.num_slots = num_kept
        self._may_start = True

    def _close(self, stage: Stage) -> None:
        """Claim nothing of a stage for a while, and not before something has ended."""
        self._closed_until[stage] = self._now + max(self._limits.refusal_s, self._limits.sync_s)
        self._waits_for_end.add(stage)

    def _is_open(self, stage: Stage) -> bool:
        can_end = any(held.state is not HeldState.HANDING for held in self.tickets.values())
        waits = can_end and stage in self._waits_for_end
        return not waits and self._now >= self._closed_until.get(stage, 0.0)

    # Helpers.

    def _find(self, key: Key, leg: int) -> HeldTicket | None:
        return self.tickets.get((*key, leg))

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _source(self, number: int, leg: int) -> tuple[int, int, str, int, int]:
        """Return the fields that all messages about a ticket begin with."""
        return number, leg, self.name, self.incarnation, self._next_seq()
