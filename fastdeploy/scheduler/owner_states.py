# SPDX-License-Identifier: Apache-2.0
"""The state machine of an owner: what happens to the requests of one API process; see `request_states.py`."""

from __future__ import annotations

import math

from fastdeploy.scheduler.owned_request import LOCAL_CLAIMANT, Claimant, OwnedRequest, OwnedState
from fastdeploy.scheduler.owner_events import (
    AbortLocal,
    Audit,
    Audited,
    Cancelled,
    Deliver,
    Dequeue,
    EnqueueFailed,
    LegClaimed,
    LocalDied,
    LossReason,
    OwnerAction,
    OwnerEvent,
    Standing,
    Submit,
)
from fastdeploy.scheduler.owner_legs import OwnerLegs
from fastdeploy.scheduler.request_states import (
    Handed,
    Held,
    Holding,
    Image,
    Looked,
    Member,
    NodeMessage,
    RedisLost,
    RedisReturned,
    Refused,
    Renew,
    Resend,
    Role,
    Tell,
    Tick,
    Tokens,
)


class OwnerStates(OwnerLegs):
    """The state machine; used from one thread."""

    def handle(self, event: OwnerEvent, now: float) -> list[OwnerAction]:
        """Change the state as the event asks and return what is to be done, in this order.

        To be called at least once per sync period: a longer pause than the expire period means that this process was
        stopped, and that nodes have dropped its requests.
        """
        was_stopped = now - self._now > self._limits.expire_s
        self._now = now
        if was_stopped:
            self._restart_all()
        match event:
            case Submit():
                self._on_submit(event)
            case Cancelled(number):
                if number in self.requests:
                    self._end(self.requests[number])
            case Holding():
                self._on_holding(event)
            case NodeMessage():
                self._on_message(event)
            case Tick(local_room):
                self._on_tick(local_room)
            case Looked():
                self._on_looked(event)
            case RedisLost():
                if self.is_redis_up:
                    self.is_redis_up, self._lost_at = False, now
            case RedisReturned():
                self._on_redis_returned()
            case EnqueueFailed(number, leg):
                self._on_enqueue_failed(number, leg)
            case Audited(count, found):
                self._on_audited(count, found)
            case LocalDied():
                self._on_local_died()
        self._dispatch()
        actions, self._actions = self._actions, []
        return actions

    # Messages of nodes, and of the owner's own engine.

    def _on_message(self, message: NodeMessage) -> None:
        owned = self.requests.get(message.number)
        if owned is not None and owned.is_unclaimed(message.leg):
            self._on_claimed(owned, message)
        if owned is None or not owned.is_current(message):
            self._answer_foreign(owned, message)
            return
        match message:
            case Tokens():
                self._on_tokens(owned, message)
            case Handed(image=image):
                if owned.num_cached_tokens is None:
                    owned.num_cached_tokens = message.num_cached_tokens
                self._on_handed(owned, image, message.seq)
            case Refused():
                self._on_refused(owned, message)

    def _answer_foreign(self, owned: OwnedRequest | None, message: NodeMessage) -> None:
        """Tell the sender to abort, unless the present leg needs the image that this leg made."""
        if message.node == LOCAL_CLAIMANT.node:
            self._actions.append(AbortLocal(message.number, message.leg))
        elif owned is None or not owned.made(message.leg, message.node, message.incarnation):
            self._tell_abort(message.node, message.number, message.leg)

    def _on_claimed(self, owned: OwnedRequest, message: NodeMessage) -> None:
        """Make the sender the claimant; any message of the present leg is a claim, because the first may be lost."""
        if owned.num_entries > 1:
            self._actions.append(Dequeue(owned.number, owned.leg))
        since = owned.arrived_at if owned.leg == 1 else owned.leg_at
        self.observed.append(LegClaimed(owned.stage, self._now - since))
        owned.claimant, owned.claim_seq = Claimant(message.node, message.incarnation), message.seq
        owned.claimed_at = owned.leg_progress_at = self._now
        owned.note_start(self._now)
        self._set_state(owned, OwnedState.RUNNING)
        self.members.setdefault(message.node, Member(message.incarnation, Role.MIXED))  # the next look says more

    def _on_tokens(self, owned: OwnedRequest, message: Tokens) -> None:
        choice = message.delta.index
        if not 0 <= choice < len(owned.tokens):
            return  # a broken message
        if message.first_index > len(owned.tokens[choice]):
            self._ask_again(owned, choice)
            return
        if owned.image is not None and owned.image.leg < owned.leg:
            owned.image = None  # its reader has released it
        delta = owned.accept(message.first_index, message.delta)
        if delta is None:
            return
        owned.note_progress(self._now)
        self._actions.append(Deliver(owned.number, delta))
        if all(owned.ended):
            self._end(owned)

    def _ask_again(self, owned: OwnedRequest, choice: int) -> None:
        """Ask for the tokens of a gap, at most once per sync period."""
        if owned.claimant is None or owned.ended[choice] or owned.claimant == LOCAL_CLAIMANT:
            return
        if owned.resend_at is None or self._now - owned.resend_at >= self._limits.sync_s:
            owned.resend_at = self._now
            resend = Resend(self.name, owned.number, owned.leg, choice, len(owned.tokens[choice]))
            self._actions.append(Tell(owned.claimant.node, resend))

    def _on_handed(self, owned: OwnedRequest, image: Image | None, seq: int) -> None:
        owned.image, owned.image_seq, owned.image_at = image, seq, self._now
        owned.note_progress(self._now)
        self._queue_next_leg(owned, self._retry_stage(owned))

    def _on_refused(self, owned: OwnedRequest, message: Refused) -> None:
        if message.kind == "invalid":
            self._end(owned, "invalid", message.field, message.message)
        elif owned.state is not OwnedState.LOCAL:
            self._queue_next_leg(owned, owned.stage)
        elif owned.has_tokens:
            self._queue_next_leg(owned, self._retry_stage(owned))
        else:
            self._end(owned, "full", message=message.message)

    def _on_holding(self, message: Holding) -> None:
        """Compare what a node has with what it should have."""
        for held in message.held:
            self._on_held(message, held)
        legs = {(held.number, held.leg) for held in message.held}
        for owned in list(self.requests.values()):
            claimant = owned.claimant
            if claimant == Claimant(message.node, message.incarnation) and message.seq > owned.claim_seq:
                if (owned.number, owned.leg) not in legs:
                    self._lose(owned, LossReason.FORGOTTEN, f"node {message.node} no longer has it")
            elif owned.state is OwnedState.QUEUED and (image := owned.image) is not None:
                is_maker = (image.node, image.incarnation) == (message.node, message.incarnation)
                if is_maker and message.seq > owned.image_seq and (owned.number, image.leg) not in legs:
                    self._lose_image(owned)
        if message.lost_writes:
            self._audit()

    def _on_held(self, message: Holding, held: Held) -> None:
        owned = self.requests.get(held.number)
        sender = NodeMessage(held.number, held.leg, message.node, message.incarnation, message.seq)
        if owned is not None and owned.is_unclaimed(held.leg):
            self._on_claimed(owned, sender)
        if owned is None or not owned.is_current(sender):
            self._answer_foreign(owned, sender)
            return
        if held.image is not None:
            self._on_handed(owned, held.image, message.seq)
            return
        if held.num_computed > owned.num_computed:
            owned.num_computed = held.num_computed
            owned.note_progress(self._now)
        for choice, (tokens, next_index) in enumerate(zip(owned.tokens, held.next_indices)):
            if next_index > len(tokens):
                self._ask_again(owned, choice)

    # Losses.

    def _on_looked(self, look: Looked) -> None:
        for node in self._liveness.find_gone(self.members, look.members, self._now):
            del self.members[node]
        self.members |= look.members
        for owned in self._select(OwnedState.RUNNING):
            claimant = owned.claimant
            if claimant is not None and (loss := self._find_loss(look, claimant, owned.claimed_at)) is not None:
                self._lose(owned, *loss)
        for owned in self._select(OwnedState.QUEUED):
            if (image := owned.image) is not None:
                maker = Claimant(image.node, image.incarnation)
                if self._find_loss(look, maker, owned.image_at) is not None:
                    self._lose_image(owned)

    def _find_loss(self, look: Looked, claimant: Claimant, since: float) -> tuple[LossReason, str] | None:
        """Return why a node has lost all that it had, also in words; None if it lives.

        Args:
            since: when the message arrived that named its incarnation: an earlier look shows what was before.
        """
        if look.began_at <= since:
            return None
        if claimant.node not in self.members:
            return LossReason.NODE_LOST, f"node {claimant.node} is gone"
        member = look.members.get(claimant.node)
        is_other = member is not None and member.incarnation != claimant.incarnation
        if is_other and self._liveness.trusts_keys(self._now):
            return LossReason.NODE_RESTARTED, f"node {claimant.node} has restarted"
        return None

    def _lose_image(self, owned: OwnedRequest) -> None:
        """Write the same leg's ticket again, without its image; who has claimed the other one fails to fetch it."""
        owned.image = None
        self._actions.append(Dequeue(owned.number, owned.leg))
        self._set_state(owned, OwnedState.WAITING)
        owned.stage = self._retry_stage(owned)
        self._set_state(owned, OwnedState.QUEUED)
        self._enqueue(owned)

    def _on_local_died(self) -> None:
        self._has_local_engine = False
        for owned in list(self.requests.values()):
            if owned.state is OwnedState.LOCAL:
                self._set_state(owned, OwnedState.WAITING)  # nobody is left to be told
                self._lose(owned, LossReason.ENGINE_DIED, "the engine of its own node has ended")

    def _restart_all(self) -> None:
        """Take every request back after this process was stopped; that is no loss."""
        self._liveness.distrust_keys(self._now)
        for owned in self._select(OwnedState.QUEUED, OwnedState.RUNNING):
            self._withdraw(owned)
            self._queue_next_leg(owned, self._retry_stage(owned))

    def _on_redis_returned(self) -> None:
        self.is_redis_up = True
        self._liveness.distrust_keys(self._now)
        self._audit()

    def _audit(self) -> None:
        self._num_audits += 1
        self._actions.append(Audit(self._num_audits))

    def _on_audited(self, count: int, found: frozenset[Standing]) -> None:
        """Delete tickets that should not stand in their queue, and write again those that are missing in theirs."""
        queued = {(one.number, one.leg, one.stage, one.hint): one for one in self._select(OwnedState.QUEUED)}
        misplaced = {(number, leg) for number, leg, _, _ in found - queued.keys()}
        self._actions += [Dequeue(number, leg) for number, leg in sorted(misplaced)]
        for ticket, owned in queued.items():
            is_missing = ticket not in found and owned.last_audit < count
            if is_missing or (owned.number, owned.leg) in misplaced:
                owned.hint = ""
                self._enqueue(owned)

    def _on_enqueue_failed(self, number: int, leg: int) -> None:
        """Run a new request locally, as if Redis had been away before; others wait for the next audit."""
        owned = self.requests.get(number)
        if owned is not None and owned.is_unclaimed(leg) and leg == 1 and self._has_local_engine:
            self._run_local(owned)

    # Time.

    def _on_tick(self, local_room: int) -> None:
        self._told_to_abort.clear()
        for owned in list(self.requests.values()):
            self._check_clocks(owned)
        if self._has_local_engine:
            for owned in self._find_stranded()[: max(0, local_room)]:
                self._withdraw(owned)
                self._run_local(owned)
        self._renew_images()

    def _check_clocks(self, owned: OwnedRequest) -> None:
        limits, now = self._limits, self._now
        is_unclaimed = owned.state in (OwnedState.WAITING, OwnedState.QUEUED)
        max_waiting_s = math.inf if limits.max_waiting_s is None else limits.max_waiting_s
        if owned.deadline is not None and now >= owned.deadline:
            self._end(owned, "timeout", message=f"not finished within {owned.request.timeout_s} s")
        elif now - owned.progress_at > limits.ttl_s:
            self._end(owned, "stalled", message=f"no progress for {limits.ttl_s} s")
        elif is_unclaimed and not owned.has_tokens and now - owned.arrived_at > max_waiting_s:
            self._end(owned, "waited", message=f"waited longer than {limits.max_waiting_s} s")
        elif owned.state is OwnedState.RUNNING and now - owned.leg_progress_at > limits.stall_s:
            self._withdraw(owned)
            self._lose(owned, LossReason.STALLED, f"no progress for {limits.stall_s} s")
        elif owned.state is OwnedState.QUEUED and owned.hint and now - owned.leg_at > limits.hint_s:
            self._actions.append(Dequeue(owned.number, owned.leg))
            owned.hint = ""
            self._enqueue(owned)

    def _find_stranded(self) -> list[OwnedRequest]:
        """Return the requests that should go on locally, the oldest first."""
        if self.is_redis_up:
            return self._select(OwnedState.QUEUED) if self.is_alone else []
        patience = self._limits.patience_s
        if patience is None or self._now - self._lost_at < patience:
            return []
        stranded = self._select(OwnedState.QUEUED, OwnedState.RUNNING)
        return [owned for owned in stranded if self._now - owned.leg_progress_at >= patience]

    def _renew_images(self) -> None:
        for owned in self._select(OwnedState.QUEUED):
            if (image := owned.image) is not None:
                self._actions.append(Tell(image.node, Renew(self.name, owned.number, image.leg)))
