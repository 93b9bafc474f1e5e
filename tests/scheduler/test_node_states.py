# SPDX-License-Identifier: Apache-2.0
"""Transitions of a node that the schedules of the property test reach rarely or never."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.held_ticket import HeldState
from fastdeploy.scheduler.liveness import Heartbeat, Liveness, next_incarnation
from fastdeploy.scheduler.node_events import (
    Claim,
    ClaimWritten,
    Drop,
    EngineHandedOver,
    EngineTokens,
    Fetch,
    Fetched,
    FreeImage,
    HandOver,
    OwnersLooked,
    RecordWritten,
    Send,
    Sent,
    SetRole,
    StartEngine,
    StopEngine,
    TicketRead,
)
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.request_states import (
    MAX_INT,
    Abort,
    Holding,
    Image,
    Limits,
    Looked,
    Member,
    RedisReturned,
    Refused,
    Release,
    Renew,
    Resend,
    Role,
    Stage,
    Tell,
    Tick,
    Ticket,
)

PREFILL, DECODE = Stage.PREFILL, Stage.DECODE


class Node:
    """A machine with a clock, whose writes succeed at once; `started` collects (number, leg, hands over)."""

    def __init__(self, role: Role = Role.PREFILL, slots: int = 4, **limits: Any) -> None:
        self.now = 0.0
        self.states = NodeStates("n", 1, role, slots, Limits(**limits), self.now)
        self.started: list[tuple[int, int, bool]] = []
        self.look(n=role, d=Role.DECODE)
        self.tell(RecordWritten(1))

    def look(self, **roles: Role) -> None:
        self.tell(Looked({name: Member(1, role) for name, role in roles.items()}, self.now))

    def tell(self, event: Any) -> list[Any]:
        actions = self.states.handle(event, self.now)
        for action in [*actions]:
            match action:
                case Claim(owner, message):
                    if not isinstance(message, Refused):
                        actions += self.tell(ClaimWritten((owner, message.number), message.leg))
                case Send(owner):
                    actions += self.tell(Sent(owner, "written"))
                case StartEngine(ticket, hands_over):
                    self.started.append((ticket.number, ticket.leg, hands_over))
        return actions

    def read(self, number: int, leg: int = 1, stage: Stage = PREFILL, slots: int = 0, **fields: Any) -> list[Any]:
        request = GenerationRequest(str(number), [1, 2], SamplingParams())
        ticket = Ticket("o", number, leg, stage, request, [[]], **fields)
        return self.tell(TicketRead(ticket, f"entry {number}", slots, slots))

    def wait(self, seconds: float) -> list[Any]:
        actions, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            actions += [*self.tell(OwnersLooked(frozenset("o"))), *self.tell(Tick())]
        return actions

    def emit(self, number: int, first: int, *token_ids: int, finish: str | None = None) -> list[Any]:
        delta = TokenDelta("", 0, list(token_ids), finish_reason=finish)
        return self.tell(EngineTokens(("o", number), 1, first, delta))


def sent(actions: list[Any]) -> list[Any]:
    return [message for action in actions if isinstance(action, Send) for message in action.messages]


@pytest.mark.parametrize(
    ("role", "others", "stages"),
    [
        (Role.MIXED, {"p": Role.PREFILL, "d": Role.DECODE}, [DECODE, PREFILL]),
        (Role.DECODE, {"p": Role.PREFILL}, [DECODE]),
        (Role.DECODE, {"m": Role.MIXED}, [DECODE]),
        (Role.DECODE, {"d": Role.DECODE}, [DECODE, PREFILL]),
        (Role.PREFILL, {"d": Role.DECODE}, [PREFILL]),
        (Role.PREFILL, {"d": Role.DRAINING}, [PREFILL, DECODE]),
        (Role.DRAINING, {"d": Role.DECODE}, []),
    ],
)
def test_a_node_claims_the_other_stage_while_nobody_else_does(
    role: Role, others: dict[str, Role], stages: list[Stage]
) -> None:
    node = Node(role)
    assert node.states.claimable_stages() == []  # owners may not have cleaned the queues yet
    node.wait(1.0)
    node.look(n=role, **others)
    assert node.states.claimable_stages() == stages


def test_tickets_that_hand_over_wait_for_slots_in_the_order_of_their_claims() -> None:
    node = Node(slots=4)
    node.read(0, slots=3)
    node.read(1, slots=2)
    node.read(2, slots=1)
    node.read(3, stage=DECODE, slots=3, image=Image("p", 1, 1))  # must not wait for images that it may have to free
    assert node.started == [(0, 1, True), (3, 1, False)]
    node.wait(1.0)
    assert PREFILL not in node.states.claimable_stages()
    node.emit(0, 0, 7, finish="stop")
    assert node.started[2:] == [(1, 1, True), (2, 1, True)]


@pytest.mark.parametrize(
    ("role", "others", "hands_over"),
    [
        (Role.DRAINING, {}, True),
        (Role.PREFILL, {"d": Role.DECODE}, True),
        (Role.PREFILL, {"p": Role.PREFILL}, False),  # nobody else would go on with it
        (Role.DECODE, {"d": Role.DECODE}, False),
        (Role.MIXED, {"d": Role.DECODE}, False),
    ],
)
def test_what_runs_is_handed_over_when_its_role_ends(role: Role, others: dict[str, Role], hands_over: bool) -> None:
    node = Node(Role.DECODE)
    node.look(n=Role.DECODE, **others)
    node.read(0, stage=DECODE)
    assert (HandOver(("o", 0), 1) in node.tell(SetRole(role))) is hands_over


def test_a_prompt_larger_than_the_arena_takes_all_of_it() -> None:
    node = Node(slots=4)
    node.read(0, slots=9)
    assert (node.started, node.states.num_free_slots) == ([(0, 1, True)], 0)


def test_a_node_alone_with_its_role_does_not_hand_over() -> None:
    node = Node()
    node.look(n=Role.PREFILL)
    node.read(0, slots=2)
    assert node.started == [(0, 1, False)]


def test_an_image_is_kept_for_its_lease_and_freed_once() -> None:
    node = Node(lease_s=4.0)
    for number in range(3):
        node.read(number, slots=1)
        node.emit(number, 0, 7)
        node.tell(EngineHandedOver(("o", number), 1, b"", 1))
    node.tell(Release("o", 0, 1))
    assert node.states.num_free_slots == 2
    node.wait(3.0)
    node.tell(Renew("o", 1, 1))
    freed = [action for action in node.wait(2.0) if isinstance(action, FreeImage)]
    assert freed == [FreeImage(("o", 2), 1)]
    assert [held.state for held in node.states.tickets.values()] == [HeldState.HANDING]


def test_slots_that_a_transport_writes_to_stay_in_use_after_an_abort() -> None:
    node = Node(Role.DECODE)
    assert any(isinstance(one, Fetch) for one in node.read(0, 2, DECODE, slots=3, image=Image("p", 1, 1)))
    node.tell(Abort("o", 0, 2))
    assert node.states.num_free_slots == 1
    actions = node.tell(Fetched(("o", 0), 2))
    assert (node.states.num_free_slots, node.started) == (4, [])
    assert Tell("p", Release("o", 0, 1)) in actions


def test_a_puller_renews_the_lease_and_releases_the_image() -> None:
    node = Node(Role.DECODE)
    node.read(0, 2, DECODE, image=Image("p", 1, 1))
    assert Tell("p", Renew("o", 0, 1)) in node.wait(0.5)
    assert Tell("p", Release("o", 0, 1)) in node.tell(Fetched(("o", 0), 2))
    assert node.started == [(0, 2, False)]


def test_of_one_leg_a_node_runs_one_ticket() -> None:
    node = Node(Role.DECODE)
    node.read(0)
    assert node.read(0) == [Drop("entry 0")]
    node.emit(0, 0, 7, finish="stop")
    assert [action.message.kind for action in node.read(0)] == ["room"]
    node.read(0, leg=2)
    assert node.read(0, leg=1) == [Drop("entry 0")]
    assert node.started == [(0, 1, False), (0, 2, False)]


def test_a_later_leg_ends_the_earlier_one() -> None:
    node = Node(Role.DECODE)
    node.read(0)
    assert StopEngine(("o", 0), 1) in node.read(0, leg=2)
    assert [*node.states.tickets] == [("o", 0, 2)]


def test_an_abort_is_remembered_for_tickets_that_come_later() -> None:
    node = Node(Role.DECODE, remember_s=3.0)
    node.tell(Abort("o", 0, 1))
    assert [action.message.kind for action in node.read(0)] == ["room"]
    node.wait(3.5)
    node.read(0)
    assert node.started == [(0, 1, False)]


def test_of_requests_that_two_nodes_have_lost_a_node_runs_one() -> None:
    node = Node(Role.DECODE)
    node.wait(1.0)
    node.read(0, num_attempts=2)
    assert [action.message.kind for action in node.read(1, num_attempts=2)] == ["room"]
    node.read(2, num_attempts=1)
    assert node.started == [(0, 1, False), (2, 1, False)]
    node.wait(2.0)
    assert node.states.claimable_stages() == [DECODE]  # the refused stage stays closed until something has ended
    node.look(n=Role.DECODE)
    node.emit(2, 0, 7, finish="stop")
    assert node.states.claimable_stages() == [DECODE, PREFILL]


def test_a_node_that_has_images_only_does_not_wait_for_their_end_after_a_refusal() -> None:
    """The one that it refuses may be the reader of the image."""
    node = Node()
    node.wait(1.0)
    node.read(0, slots=1, num_attempts=2)
    node.read(1, num_attempts=2)
    node.wait(1.0)
    assert node.states.claimable_stages() == []
    node.tell(EngineHandedOver(("o", 0), 1, b"", 1))
    assert node.states.claimable_stages() == [PREFILL]


def test_tokens_are_sent_again_as_long_as_they_are_remembered() -> None:
    node = Node(Role.DECODE, remember_s=3.0)
    node.read(0)
    node.emit(0, 0, 10, 11)
    node.wait(2.0)
    node.emit(0, 2, 12)
    again = sent(node.tell(Resend("o", 0, 1, 0, 1)))
    assert [(message.first_index, message.delta.token_ids) for message in again] == [(0, [10, 11]), (2, [12])]
    node.wait(2.0)
    node.emit(0, 3, 13)
    actions = node.tell(Resend("o", 0, 1, 0, 1))
    assert [message.kind for message in sent(actions)] == ["room"] and StopEngine(("o", 0), 1) in actions


def test_a_draining_node_hands_over_what_runs_and_refuses_tickets() -> None:
    node = Node(Role.MIXED)
    node.read(0)
    assert HandOver(("o", 0), 1) in node.tell(SetRole(Role.DRAINING))
    assert [action.message.kind for action in node.read(1)] == ["room"]
    assert sent(node.tell(EngineHandedOver(("o", 0), 1, b"image", 2)))[0].image == Image("n", 1, 1, b"image")
    assert node.states.num_free_slots == 2


def test_a_woken_node_takes_a_new_incarnation_and_forgets_everything() -> None:
    node = Node(Role.DECODE)
    node.read(0)
    node.now += 3.5
    actions = node.tell(Tick())
    assert StopEngine(("o", 0), 1) in actions
    assert (node.states.incarnation, node.states.tickets, node.states.claimable_stages()) == (2, {}, [])


def test_a_woken_node_claims_what_it_reads_once_its_new_record_is_written() -> None:
    node = Node(Role.DECODE)
    node.now += 3.5
    claims = [action for action in node.read(0, stage=DECODE) if isinstance(action, Claim)]
    assert (node.states.incarnation, claims) == (2, [])
    assert node.tell(RecordWritten(1)) == [], "it was on its way when the node was stopped"
    assert node.tell(RedisReturned())
    assert node.started == []
    [claim, *_] = node.tell(RecordWritten(2))
    assert (claim.message.number, claim.message.incarnation) == (0, 2)
    assert node.started == [(0, 1, False)]
    assert node.tell(RecordWritten(2)) == []


@pytest.mark.parametrize("old", [None, 0, 5, 1_790_000_000_000, 2**62, 2**63 - 1])
def test_a_new_process_has_a_later_incarnation_of_its_own(old: int | None) -> None:
    found = {next_incarnation(old, Random(seed)) for seed in range(50)}
    assert len(found) == 50, "processes that find the same record differ"
    assert all(0 <= one <= MAX_INT for one in found)
    assert old in (None, 2**62, 2**63 - 1) or min(found) > old + 2**20 - 1


def test_one_missing_look_or_one_right_after_a_return_judges_nobody() -> None:
    liveness = Liveness(Limits(expire_s=3.0), 0.0)
    looks = [liveness.find_gone("ab", alive, now) for now, alive in ((2, ""), (3, "b"), (4, "a"), (5, "a"), (6, "ab"))]
    assert looks == [[], [], [], ["b"], []]


def test_a_heartbeat_notices_older_counts_missing_keys_and_other_servers() -> None:
    heartbeat = Heartbeat()
    answers = [(None, "a", False), (1, "a", True), (3, "a", True), (2, "a", True), (None, "a", True), (5, "b", True)]
    found = []
    for echo, server, has_streams in answers:
        heartbeat.next_count()
        found.append(heartbeat.lost_writes(echo, server, has_streams))
    assert found == [False, False, False, True, True, True]


def test_requests_of_an_owner_that_is_gone_end_and_are_counted_but_not_its_images() -> None:
    node = Node(slots=4)
    node.wait(4.0)
    node.read(0, slots=2)
    node.emit(0, 0, 7)
    node.tell(EngineHandedOver(("o", 0), 1, b"image"))
    node.read(1, stage=DECODE)
    node.read(2, stage=DECODE)
    assert node.states.num_orphaned == 0
    node.tell(OwnersLooked(frozenset()))
    actions = node.tell(OwnersLooked(frozenset()))
    assert [action for action in actions if isinstance(action, StopEngine)] == [
        StopEngine(("o", 1), 1),
        StopEngine(("o", 2), 1),
    ]
    [last] = sent(actions)
    assert (type(last), last.held) == (Holding, []), "an owner that lives after all begins next legs"
    assert (node.states.num_orphaned, node.states.tickets) == (2, {})
