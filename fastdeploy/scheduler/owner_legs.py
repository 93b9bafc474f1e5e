# SPDX-License-Identifier: Apache-2.0
"""The requests of an owner and how their legs begin and end; see `request_states.py`."""

from __future__ import annotations

from fastdeploy.core.fair_queue import FairQueue
from fastdeploy.scheduler.liveness import Liveness
from fastdeploy.scheduler.owned_request import LOCAL_CLAIMANT, OwnedRequest, OwnedState
from fastdeploy.scheduler.owner_events import (
    AbortLocal,
    Dequeue,
    End,
    Enqueue,
    LegClaimed,
    LegLost,
    LossReason,
    OwnerAction,
    RunLocal,
    Submit,
)
from fastdeploy.scheduler.request_states import (
    Abort,
    Limits,
    Member,
    Release,
    Role,
    Stage,
    Tell,
)


class OwnerLegs:
    """The requests of one owner and what it knows of the nodes; used from one thread.

    Attributes:
        requests: those in flight, by number, in order of arrival.
        members: live nodes of the group, own one included.
        is_redis_up: whether commands reach Redis.
        observed: what metrics count, since its reader last emptied it.
    """

    def __init__(self, name: str, node: str, limits: Limits, splitwise: bool, now: float) -> None:
        """Create the machine of the owner `name`, whose own engine is that of `node`.

        Args:
            name: unique among all owners, those that ended included.
            splitwise: whether there are two stages.
            now: seconds of a monotonic clock.
        """
        self.name = name
        self.requests: dict[int, OwnedRequest] = {}
        self.members: dict[str, Member] = {}
        self.is_redis_up = True
        self.observed: list[LegClaimed | LegLost] = []
        self._node = node
        self._limits = limits
        self._splitwise = splitwise
        self._now = now
        self._lost_at = now  # when Redis was last lost
        self._liveness = Liveness(limits, now)
        self._has_local_engine = True
        self._waiting: dict[tuple[Stage, int], FairQueue[int]] = {}  # by stage and priority; may hold what has left
        self._queued: dict[Stage, set[int]] = {stage: set() for stage in Stage}
        self._told_to_abort: set[tuple[str, int, int]] = set()
        self._num_audits = 0
        self._actions: list[OwnerAction] = []

    # New requests.

    def _on_submit(self, event: Submit) -> None:
        request, limit = event.request, self._limits.max_waiting
        if limit is not None and sum(one.state is OwnedState.WAITING for one in self.requests.values()) >= limit:
            self._actions.append(End(event.number, "full", message=f"{limit} requests are waiting already"))
            return
        num_new = len(request.prompt_token_ids) - event.num_cached
        is_long = self._splitwise and num_new > self._limits.min_prompt
        stage = Stage.PREFILL if is_long else Stage.DECODE
        owned = OwnedRequest(event.number, request, self._now, stage, event.hint)
        self.requests[event.number] = owned
        self._waiting.setdefault((stage, request.priority), FairQueue()).push(
            request.client_id, event.number, request.client_weight
        )

    def _dispatch(self) -> None:
        """Give waiting requests to the owner's engine, or as many to the queues as the nodes may soon take."""
        if not self._waiting:
            return
        goes_local = not self.is_redis_up or self.is_alone
        if goes_local and not self._has_local_engine:
            return
        for (stage, priority), queue in sorted(self._waiting.items()):
            room = self._limits.tickets_per_node * (self._num_members(stage) or len(self.members))
            while queue and (goes_local or len(self._queued[stage]) < room):
                owned = self.requests.get(queue.pop())
                if owned is None or owned.state is not OwnedState.WAITING or owned.leg > 0:
                    continue
                if goes_local:
                    self._run_local(owned)
                else:
                    self._queue_next_leg(owned, stage)
            if not queue:
                del self._waiting[stage, priority]

    @property
    def is_alone(self) -> bool:
        """Return whether no other node takes requests."""
        others = [member for node, member in self.members.items() if node != self._node]
        return all(member.role is Role.DRAINING for member in others)

    def _num_members(self, stage: Stage) -> int:
        return sum(member.role in _roles(stage) for member in self.members.values())

    # Legs.

    def _set_state(self, owned: OwnedRequest, state: OwnedState) -> None:
        self._queued[owned.stage].discard(owned.number)
        owned.state = state
        if state is OwnedState.QUEUED:
            self._queued[owned.stage].add(owned.number)

    def _run_local(self, owned: OwnedRequest) -> None:
        """Begin the next leg on the owner's engine."""
        self._release_image(owned)
        owned.begin_leg(self._now)
        owned.note_start(self._now)
        owned.claimant = LOCAL_CLAIMANT
        self._set_state(owned, OwnedState.LOCAL)
        self._actions.append(RunLocal(owned.ticket(self.name, self._now)))

    def _queue_next_leg(self, owned: OwnedRequest, stage: Stage) -> None:
        """Begin the next leg in a queue; only the first one may be for a hinted node, if its role fits."""
        self._set_state(owned, OwnedState.WAITING)
        hinted = self.members.get(owned.hint)
        if owned.leg > 0 or hinted is None or hinted.role not in _roles(stage):
            owned.hint = ""
        owned.begin_leg(self._now)
        owned.stage = stage
        self._set_state(owned, OwnedState.QUEUED)
        self._enqueue(owned)

    def _enqueue(self, owned: OwnedRequest) -> None:
        """Write the ticket; while Redis is away nothing is written, and the audit after its return does it."""
        if self.is_redis_up:
            owned.num_entries += 1
            owned.last_audit = self._num_audits
            self._actions.append(Enqueue(owned.ticket(self.name, self._now), owned.hint))

    def _retry_stage(self, owned: OwnedRequest) -> Stage:
        """Return where a leg that resumes should begin: with a prefill node if it is long and has no image."""
        num_tokens = len(owned.request.prompt_token_ids) + sum(map(len, owned.tokens))
        has_prefill_node = self._splitwise and self._num_members(Stage.PREFILL) > 0
        is_long = owned.image is None and num_tokens > self._limits.step_tokens
        return Stage.PREFILL if has_prefill_node and is_long else Stage.DECODE

    def _lose(self, owned: OwnedRequest, reason: LossReason, text: str) -> None:
        """Count a loss of the present leg, and begin the next one or end the request; `text` is for the client."""
        self.observed.append(LegLost(reason))
        owned.losses.append(text)
        owned.num_attempts += not owned.leg_has_tokens
        if owned.num_attempts >= self._limits.max_attempts or len(owned.losses) >= self._limits.max_losses:
            self._end(owned, "attempts", message=f"every attempt failed: {'; '.join(owned.losses)}")
        else:
            self._queue_next_leg(owned, self._retry_stage(owned))

    def _withdraw(self, owned: OwnedRequest) -> None:
        """Take the present leg from whoever has it."""
        if owned.state is OwnedState.QUEUED:
            self._actions.append(Dequeue(owned.number, owned.leg))
        elif owned.state is OwnedState.LOCAL:
            self._actions.append(AbortLocal(owned.number, owned.leg))
        elif owned.claimant is not None:
            self._tell_abort(owned.claimant.node, owned.number, owned.leg)

    def _end(self, owned: OwnedRequest, kind: str = "", field: str = "", message: str = "") -> None:
        """Forget a request; unless all its choices have ended, take its leg back."""
        if not all(owned.ended):
            self._withdraw(owned)
        self._release_image(owned)
        self._set_state(owned, OwnedState.WAITING)
        del self.requests[owned.number]
        self._actions.append(End(owned.number, kind, field, message, tuple(owned.losses)))

    def _release_image(self, owned: OwnedRequest) -> None:
        if owned.image is not None:
            self._actions.append(Tell(owned.image.node, Release(self.name, owned.number, owned.image.leg)))
            owned.image = None

    def _tell_abort(self, node: str, number: int, leg: int) -> None:
        """Tell a node to abort a leg, once per sync period, however many messages of it arrive."""
        if (node, number, leg) not in self._told_to_abort:
            self._told_to_abort.add((node, number, leg))
            self._actions.append(Tell(node, Abort(self.name, number, leg)))

    def _select(self, *states: OwnedState) -> list[OwnedRequest]:
        return [owned for owned in self.requests.values() if owned.state in states]


def _roles(stage: Stage) -> tuple[Role, Role]:
    """Return the roles that read a queue."""
    return Role.MIXED, Role(stage.value)
