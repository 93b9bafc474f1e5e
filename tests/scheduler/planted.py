# SPDX-License-Identifier: Apache-2.0
"""Mistakes for the property test to find, each a change of one or two methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from fastdeploy.core.outputs import TokenDelta
from fastdeploy.scheduler.liveness import Heartbeat, Liveness
from fastdeploy.scheduler.node_events import Claimed, ClaimWritten
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.owned_request import Claimant, OwnedRequest, OwnedState
from fastdeploy.scheduler.owner_events import LossReason
from fastdeploy.scheduler.owner_states import OwnerStates
from fastdeploy.scheduler.request_states import Looked, NodeMessage, Tokens
from tests.scheduler.sim_node import SimNode


def do_nothing(*args: Any, **fields: Any) -> None:
    pass


def forget_audits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerStates, "_audit", do_nothing)


def acknowledge_before_hand_over(patch: pytest.MonkeyPatch) -> None:
    """The ticket is deleted first; the node may die before it tells the owner."""

    def claim(self: SimNode, owner: str, message: Any, entry: str) -> None:
        queue, milliseconds, count = entry.split()
        self._try("ack_and_delete", queue, (int(milliseconds), int(count)))
        self._try("xadd", f"out:{owner}", message)
        if isinstance(message, Claimed):
            self.run(0.0, self.handle, ClaimWritten((owner, message.number), message.leg))

    patch.setattr(SimNode, "_claim", claim)


def ignore_legs(patch: pytest.MonkeyPatch) -> None:
    def is_current(self: OwnedRequest, message: NodeMessage) -> bool:
        return Claimant(message.node, message.incarnation) == self.claimant

    patch.setattr(OwnedRequest, "is_current", is_current)
    patch.setattr(OwnedRequest, "is_unclaimed", lambda self, leg: self.state is OwnedState.QUEUED)


def renew_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerStates, "_renew_images", do_nothing)


def keep_two_claimants(patch: pytest.MonkeyPatch) -> None:
    """What any node says that has claimed the present leg is taken."""
    is_current = OwnedRequest.is_current
    claims: set[tuple[int, int, int, str]] = set()

    def keep(self: OwnedRequest, message: NodeMessage) -> bool:
        claim = id(self), message.number, message.leg, message.node
        if isinstance(message, Claimed):
            claims.add(claim)
        return is_current(self, message) or (message.leg == self.leg and claim in claims)

    patch.setattr(OwnedRequest, "is_current", keep)


def judge_all_dead_after_a_restart_of_redis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Liveness, "distrust_keys", lambda self, now: setattr(self, "_trusts_keys_at", now))


def leave_unannounced_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimNode, "_read_pending", do_nothing)


def overlook_lost_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heartbeat, "lost_writes", lambda *_: False)


def accept_other_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnedRequest, "is_current", lambda self, message: message.leg == self.leg)


def abort_foreign_requests_when_a_key_was_missing(patch: pytest.MonkeyPatch) -> None:
    on_redis_returned = NodeStates._on_redis_returned

    def abort(self: NodeStates) -> None:
        for held in [*self.tickets.values()]:
            self._abort(held)
        on_redis_returned(self)

    patch.setattr(NodeStates, "_on_redis_returned", abort)


def continue_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """The end of a choice is not kept, so that the next leg goes on with it."""
    accept = OwnedRequest.accept

    def forget_end(self: OwnedRequest, first_index: int, delta: TokenDelta) -> TokenDelta | None:
        new = accept(self, first_index, delta)
        if not all(self.ended):
            self.ended = [False] * len(self.ended)
        return new

    patch.setattr(OwnedRequest, "accept", forget_end)


def accept_gaps(patch: pytest.MonkeyPatch) -> None:
    on_tokens = OwnerStates._on_tokens

    def accept(self: OwnerStates, owned: OwnedRequest, message: Tokens) -> None:
        first_index = min(message.first_index, len(owned.tokens[message.delta.index]))
        on_tokens(self, owned, msgspec.structs.replace(message, first_index=first_index))

    patch.setattr(OwnerStates, "_on_tokens", accept)


def overlook_new_incarnations(patch: pytest.MonkeyPatch) -> None:
    replace_restarts(patch, lambda look, claimant, since: False)


def notice_only_larger_incarnations(patch: pytest.MonkeyPatch) -> None:
    def is_restart(look: Looked, claimant: Claimant, since: float) -> bool:
        return look.began_at > since and look.members[claimant.node].incarnation > claimant.incarnation

    replace_restarts(patch, is_restart)


def take_incarnations_of_any_look(patch: pytest.MonkeyPatch) -> None:
    """A look that began before the claim arrived may show the incarnation before."""

    def is_restart(look: Looked, claimant: Claimant, since: float) -> bool:
        return look.members[claimant.node].incarnation != claimant.incarnation

    replace_restarts(patch, is_restart)


def replace_restarts(patch: pytest.MonkeyPatch, is_restart: Callable[[Looked, Claimant, float], bool]) -> None:
    """Judge by another rule what a look that shows the claimant's node says of its incarnation."""
    find_loss = OwnerStates._find_loss

    def find(self: OwnerStates, look: Looked, claimant: Claimant, since: float) -> tuple[LossReason, str] | None:
        if claimant.node not in look.members:
            return find_loss(self, look, claimant, since)
        trusts = self._liveness.trusts_keys(self._now)
        return (LossReason.NODE_RESTARTED, "restarted") if trusts and is_restart(look, claimant, since) else None

    patch.setattr(OwnerStates, "_find_loss", find)


def take_incarnations_from_the_clock(patch: pytest.MonkeyPatch) -> None:
    """A clock that has stepped back gives a new process a smaller one, which is then overlooked."""

    def choose(self: SimNode) -> None:
        self.incarnation = self.states.incarnation = int(self.sim.redis.wall_time() * 1000) + 10_000

    patch.setattr(SimNode, "_choose_incarnation", choose)
    notice_only_larger_incarnations(patch)


def send_no_lists(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeStates, "_send_holding", do_nothing)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a forgotten audit": forget_audits,
    "ack before hand-over": acknowledge_before_hand_over,
    "a missing leg check": ignore_legs,
    "a lease never renewed": renew_no_lease,
    "two claimants kept": keep_two_claimants,
    "all nodes judged dead after a Redis restart": judge_all_dead_after_a_restart_of_redis,
    "an unannounced claim left": leave_unannounced_claims,
    "a silent loss of writes unnoticed": overlook_lost_writes,
    "events accepted from another node": accept_other_nodes,
    "foreign requests aborted because a key was missing": abort_foreign_requests_when_a_key_was_missing,
    "a text continued after its end": continue_after_the_end,
    "a gap accepted": accept_gaps,
    "a new incarnation overlooked": overlook_new_incarnations,
    "only larger incarnations noticed": notice_only_larger_incarnations,
    "incarnations of any look": take_incarnations_of_any_look,
    "incarnations from the clock": take_incarnations_from_the_clock,
    "no list of what a node has": send_no_lists,
}
