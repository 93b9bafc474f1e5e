# SPDX-License-Identifier: Apache-2.0
"""The state machine of a node: what an agent does with the tickets that it claims; see `request_states.py`."""

from __future__ import annotations

from collections.abc import Iterable

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.held_ticket import HeldState, HeldTicket
from fastdeploy.scheduler.node_events import (
    ClaimWritten,
    EngineHandedOver,
    EngineProgress,
    EngineRejected,
    EngineTokens,
    Fetched,
    FreeImage,
    HandOver,
    NodeAction,
    NodeEvent,
    OwnersLooked,
    ReadPending,
    RecordWritten,
    Register,
    Sent,
    SetRole,
    TicketRead,
)
from fastdeploy.scheduler.node_tickets import CLAIM_DELAY, NodeTickets
from fastdeploy.scheduler.request_states import (
    Abort,
    Handed,
    Holding,
    Image,
    Looked,
    RedisLost,
    RedisReturned,
    Refused,
    Release,
    Renew,
    Resend,
    Role,
    Tell,
    Tick,
    Tokens,
    ToNode,
)


class NodeStates(NodeTickets):
    """The state machine; used from one thread."""

    def handle(self, event: NodeEvent, now: float) -> list[NodeAction]:
        """Change the state as the event asks and return what is to be done, in this order.

        To be called at least once per sync period: a longer pause than the expire period means that this process was
        stopped, and that owners have begun other legs.
        """
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[NodeEvent], now: float) -> list[NodeAction]:
        """Handle events of one time, whose messages to an owner then leave in one write."""
        was_stopped = now - self._now > self._limits.expire_s
        self._now = now
        if was_stopped:
            self._restart()
        for event in events:
            self._on_event(event)
        if self._may_start:
            self._start_announced()
        if self._is_redis_up:
            self._actions += self._outbox.flush()
        actions, self._actions = self._actions, []
        return actions

    def _on_event(self, event: NodeEvent) -> None:
        match event:
            case TicketRead():
                self._on_ticket(event)
            case ClaimWritten(key, leg):
                self._on_claim_written(self._find(key, leg))
            case RecordWritten(incarnation):
                self._on_record_written(incarnation)
            case Sent(owner, result):
                self._outbox.note_sent(owner, result)
            case OwnersLooked(alive):
                self._on_owners_looked(alive)
            case Fetched(key, leg):
                self._on_fetched(self._find(key, leg))
            case EngineTokens():
                self._on_engine_tokens(event)
            case EngineProgress(key, leg, num_computed):
                if (held := self._find(key, leg)) is not None:
                    held.num_computed = num_computed
            case EngineHandedOver():
                self._on_handed_over(event)
            case EngineRejected():
                self._on_engine_rejected(event)
            case SetRole(role):
                self._on_role(role)
            case Abort() | Release() | Renew() | Resend():
                self._on_owner_message(event)
            case Tick():
                self._on_tick()
            case Looked(members):
                self._members = members
            case RedisLost():
                self._is_redis_up = False
            case RedisReturned():
                self._on_redis_returned()

    @property
    def owners(self) -> set[str]:
        """Return the owners whose keys should be looked for, besides those that membership records list."""
        return {*self._owners, *(owner for owner, _, _ in self.tickets), *self._outbox.owners}

    # What the engine says.

    def _on_engine_tokens(self, event: EngineTokens) -> None:
        held = self._find(event.key, event.leg)
        if held is None or held.state is not HeldState.RUNNING:
            return
        held.note_sent(self._now, event.first_index, event.delta, self._limits.remember_s)
        self._send_tokens(held, event.first_index, event.delta)
        if all(held.ended):
            self._remove(held)

    def _send_tokens(self, held: HeldTicket, first_index: int, delta: TokenDelta) -> None:
        message = Tokens(*self._source(held.ticket.number, held.leg), first_index, delta)
        self._outbox.add(held.ticket.owner, message)

    def _on_handed_over(self, event: EngineHandedOver) -> None:
        held = self._find(event.key, event.leg)
        if held is None or held.state is not HeldState.RUNNING:
            self._actions.append(FreeImage(event.key, event.leg))
            return
        if event.content is not None:
            self._free_slots(held, event.num_slots)
            held.state = HeldState.HANDING
            held.image = Image(self.name, self.incarnation, held.leg, event.content)
            held.lease_until = self._now + self._limits.lease_s
        source = self._source(held.ticket.number, held.leg)
        message = Handed(*source, held.image, event.num_cached_tokens)
        self._outbox.add(held.ticket.owner, message)
        if held.image is None:
            self._remove(held)

    def _on_engine_rejected(self, event: EngineRejected) -> None:
        if (held := self._find(event.key, event.leg)) is not None:
            self._refuse(held, event.kind, event.field, event.message)

    def _refuse(self, held: HeldTicket, kind: str, field: str, message: str) -> None:
        """Give a claimed ticket back to its owner."""
        self._outbox.add(held.ticket.owner, Refused(*self._source(held.ticket.number, held.leg), kind, field, message))
        self._abort(held)
        if kind == "room":
            self._close(held.ticket.stage)

    def _on_role(self, role: Role) -> None:
        self.role = role
        others = {member.role for name, member in self._members.items() if name != self.name}
        is_for_others = role is Role.PREFILL and bool(others & {Role.DECODE, Role.MIXED})
        if role is Role.DRAINING or is_for_others:
            running = [held for held in self.tickets.values() if held.state is HeldState.RUNNING]
            leaving = [held for held in running if role is Role.DRAINING or not held.hands_over]
            self._actions += [HandOver(held.key, held.leg) for held in leaving]
        self._actions.append(Register(self.incarnation))

    # What owners say.

    def _on_owner_message(self, message: ToNode) -> None:
        key, held = (message.owner, message.number), self._find((message.owner, message.number), message.leg)
        match message:
            case Abort(leg=leg):
                self._remember(key, leg)
                for one in [one for one in self.tickets.values() if one.key == key and one.leg <= leg]:
                    self._abort(one)
            case Release():
                if held is not None and held.state is HeldState.HANDING:
                    self._remove(held)
            case Renew():
                if held is not None:
                    held.lease_until = self._now + self._limits.lease_s
            case Resend(choice=choice, first_index=first_index):
                self._on_resend(message, held, choice, first_index)

    def _on_resend(self, message: Resend, held: HeldTicket | None, choice: int, first_index: int) -> None:
        """Send tokens again; a leg whose tokens are no longer known is given back."""
        if held is None:
            refused = Refused(
                *self._source(message.number, message.leg), "room", message="its tokens are no longer known"
            )
            self._outbox.add(message.owner, refused)
        elif held.state is HeldState.RUNNING:
            sent = held.sent_since(choice, first_index)
            if sent is None:
                self._refuse(held, "room", "", "its tokens are no longer known")
            else:
                for first, delta in sent:
                    self._send_tokens(held, first, delta)

    # Redis, other processes, and time.

    def _on_owners_looked(self, alive: frozenset[str]) -> None:
        for owner in self._liveness.find_gone(self.owners, alive, self._now):
            self._lose_owner(owner)
        appeared = alive - self._owners
        self._owners |= alive
        for owner in sorted(appeared):  # they audit: a queue that this node has created may have been lost before
            self._send_holding(owner, lost_writes=True)

    def _lose_owner(self, owner: str) -> None:
        """Drop what an owner has here; should it live, a last list tells it to begin next legs."""
        self._owners.discard(owner)
        self._outbox.discard(owner)
        for held in [held for held in self.tickets.values() if held.ticket.owner == owner]:
            self.num_orphaned += held.state not in (HeldState.HANDING, HeldState.ABORTED)
            self._abort(held)
        self._send_holding(owner)

    def _on_redis_returned(self) -> None:
        """Make everything known again; owners audit before anybody claims."""
        self._is_redis_up = True
        self._liveness.distrust_keys(self._now)
        self._claims_at = self._now + CLAIM_DELAY * self._limits.sync_s
        self._actions.append(Register(self.incarnation))
        for held in self.tickets.values():
            held.lease_until = max(held.lease_until, self._now + self._limits.lease_s)
            if held.state is HeldState.CLAIMED:
                self._announce(held)
        for owner in sorted(self.owners):
            self._send_holding(owner, lost_writes=True)

    def _restart(self) -> None:
        """Begin a new incarnation after this process was stopped; what it had has been given to others."""
        self._outbox.clear()
        for held in [*self.tickets.values()]:
            if held.state is HeldState.CLAIMED:
                self._remove(held)  # its entry stays pending
            else:
                self._abort(held)
        self._ended.clear()
        self.incarnation += 1
        self._seq = 0
        self._liveness.distrust_keys(self._now)
        self._claims_at = self._now + CLAIM_DELAY * self._limits.sync_s
        self._actions.append(Register(self.incarnation))

    def _on_tick(self) -> None:
        now = self._now
        self._ended = {key: (leg, until) for key, (leg, until) in self._ended.items() if until > now}
        for held in [*self.tickets.values()]:
            image = held.ticket.image
            if held.state is HeldState.PULLING and image is not None:
                self._actions.append(Tell(image.node, Renew(held.ticket.owner, held.ticket.number, image.leg)))
            elif held.state is HeldState.HANDING and held.lease_until < now and self._is_redis_up:
                self._remove(held)
        if self._is_redis_up and now >= self._claims_at:
            self._actions.append(ReadPending())
        if self._is_redis_up and now >= self._holding_at:
            self._holding_at = now + self._limits.holding_s
            for owner in sorted(self._owners):
                self._send_holding(owner)

    def _send_holding(self, owner: str, lost_writes: bool = False) -> None:
        tickets = [one for one in self.tickets.values() if one.ticket.owner == owner]
        held = [one.report() for one in tickets if one.state is not HeldState.ABORTED]
        self._outbox.add(owner, Holding(self.name, self.incarnation, self._next_seq(), held, lost_writes))
