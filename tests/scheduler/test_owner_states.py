# SPDX-License-Identifier: Apache-2.0
"""Transitions of the owner that the schedules of the property test reach rarely or never: limits, clocks, overlaps."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.scheduler.owned_request import OwnedState, cut_delta
from fastdeploy.scheduler.owner_events import (
    Dequeue,
    End,
    Enqueue,
    LegClaimed,
    LegLost,
    LocalDied,
    LossReason,
    RunLocal,
    Submit,
)
from fastdeploy.scheduler.owner_states import OwnerStates
from fastdeploy.scheduler.request_states import (
    Abort,
    Claimed,
    Handed,
    Held,
    Holding,
    Image,
    Limits,
    Looked,
    Member,
    RedisLost,
    RedisReturned,
    Refused,
    Resend,
    Role,
    Stage,
    Tell,
    Tick,
    Tokens,
)

NODES = {"p": Member(1, Role.PREFILL), "d": Member(1, Role.DECODE), "own": Member(1, Role.MIXED)}


class Owner:
    """A machine with a clock; each call returns the actions."""

    def __init__(self, nodes: dict[str, Member] = NODES, **limits: Any) -> None:
        self.now = 0.0
        self.nodes = nodes
        self.states = OwnerStates("o", "own", Limits(**limits), True, self.now)
        self.look(nodes)

    def look(self, nodes: dict[str, Member], began_s_ago: float = 0.0) -> list[Any]:
        return self.tell(Looked(nodes, self.now - began_s_ago))

    def tell(self, event: Any) -> list[Any]:
        return self.states.handle(event, self.now)

    def submit(self, number: int, prompt: int = 3, n: int = 1, hint: str = "", **fields: Any) -> list[Any]:
        request = GenerationRequest(str(number), [1] * prompt, SamplingParams(n=n), **fields)
        return self.tell(Submit(number, request, hint))

    def wait(self, seconds: float, local_room: int = 0) -> list[Any]:
        """Let time pass in sync periods; return the actions of all of them."""
        actions, end = [], self.now + seconds
        while self.now < end:
            self.now += 0.5
            actions += [*self.look(self.nodes), *self.tell(Tick(local_room))]
        return actions


def tokens(first: int, *token_ids: int, leg: int = 1, node: str = "d", finish: str | None = None) -> Tokens:
    return Tokens(0, leg, node, 1, 1, first, TokenDelta("", 0, list(token_ids), finish_reason=finish))


def kinds(actions: list[Any]) -> list[str]:
    return [type(action).__name__ for action in actions]


def ends(actions: list[Any]) -> list[str]:
    return [action.kind for action in actions if type(action).__name__ == "End"]


def test_short_prompts_go_to_decode_and_long_ones_to_prefill() -> None:
    owner = Owner(min_prompt=8)
    assert [owner.submit(number, prompt)[0].ticket.stage for number, prompt in enumerate((8, 9))] == [
        "decode",
        "prefill",
    ]


def test_two_tickets_per_node_of_a_stage_stand_in_redis() -> None:
    owner = Owner(nodes={"d": NODES["d"], "e": NODES["d"]})
    assert [kinds(owner.submit(number)) for number in range(5)] == [["Enqueue"]] * 4 + [[]]
    assert kinds(owner.tell(Claimed(2, 1, "d", 1, 1))) == ["Enqueue"]


def test_waiting_requests_are_ordered_by_priority_and_then_by_client() -> None:
    owner = Owner(nodes={"d": NODES["d"]}, tickets_per_node=1)
    owner.submit(0)
    for number, priority, client in ((1, 1, "a"), (2, 0, "a"), (3, 0, "a"), (4, 0, "b")):
        owner.submit(number, priority=priority, client_id=client)
    order = [0]
    while actions := owner.tell(Claimed(order[-1], 1, "d", 1, 1)):
        order.append(actions[0].ticket.number)
    assert order == [0, 2, 4, 3, 1]


def test_a_full_or_slow_queue_is_an_error() -> None:
    owner = Owner(nodes={"d": NODES["d"]}, tickets_per_node=1, max_waiting=1, max_waiting_s=2.0)
    assert [ends(owner.submit(number)) for number in range(3)] == [[], [], ["full"]]
    assert ends(owner.wait(2.0)) == []
    assert ends(owner.wait(0.5)) == ["waited", "waited"]


def test_a_request_ends_at_its_deadline_or_without_progress() -> None:
    owner = Owner(ttl_s=10.0)
    owner.submit(0)
    owner.submit(1, timeout_s=4.0)
    assert ends(owner.wait(3.5)) == []
    assert ends(owner.wait(0.5)) == ["timeout"]
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.tell(tokens(0, 7))
    assert ends(owner.wait(10.0)) == []
    assert ends(owner.wait(0.5)) == ["stalled"]


def test_a_leg_without_progress_is_lost_and_computed_prompts_are_progress() -> None:
    owner = Owner(stall_s=4.0)
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.wait(3.0)
    owner.tell(Holding("d", 1, 2, [Held(0, 1, [0], num_computed=5)]))
    assert "Enqueue" not in kinds(owner.wait(4.0))
    actions = owner.wait(0.5)
    assert actions == [Tell("d", Abort("o", 0, 1)), Enqueue(actions[1].ticket)]
    assert (actions[1].ticket.leg, actions[1].ticket.num_attempts) == (2, 1)


def test_three_losses_without_a_token_or_ten_of_any_kind_end_a_request() -> None:
    owner = Owner()
    owner.submit(0)
    for leg in (1, 2):
        owner.tell(Claimed(0, leg, "d", 1, 1))
        assert owner.tell(Holding("d", 1, 2, []))[-1].ticket.num_attempts == leg
    owner.tell(Claimed(0, 3, "d", 1, 1))
    assert ends(owner.tell(Holding("d", 1, 2, []))) == ["attempts"]
    owner.submit(0)
    for leg in range(1, 11):
        owner.tell(Claimed(0, leg, "d", 1, 1))
        owner.tell(tokens(leg - 1, leg, leg=leg))
        last = owner.tell(Holding("d", 1, 2, []))
    assert last[-1] == End(0, "attempts", "", last[-1].message, ("node d no longer has it",) * 10)


def test_a_hint_holds_for_half_a_second_and_only_where_the_role_fits() -> None:
    owner = Owner()
    assert [owner.submit(number, hint=hint)[0].hint for number, hint in enumerate(("d", "p", "gone"))] == ["d", "", ""]
    assert owner.wait(0.5) == []
    assert [(type(action), getattr(action, "hint", None)) for action in owner.wait(0.5)] == [
        (Dequeue, None),
        (Enqueue, ""),
    ]


def test_gaps_are_asked_for_again_and_overlaps_are_cut() -> None:
    owner = Owner()
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    assert owner.tell(tokens(2, 12, 13)) == [Tell("d", Resend("o", 0, 1, 0, 0))]
    assert owner.tell(tokens(4, 14)) == []  # asked once per sync period
    assert [action.delta.token_ids for action in owner.tell(tokens(0, 10, 11))] == [[10, 11]]
    assert [action.delta.token_ids for action in owner.tell(tokens(1, 11, 12, 13))] == [[12, 13]]
    assert owner.tell(tokens(0, 10, 11)) == []
    assert kinds(owner.tell(tokens(3, 13, finish="stop"))) == ["Deliver", "End"]


def test_a_cut_delta_keeps_what_belongs_to_its_tokens() -> None:
    delta = TokenDelta("", 0, [1, 2, 3, 4, 5], ["a", "b", "c"], [10, 20, 30, 40, 50])  # type: ignore[list-item]
    delta.steps = [(2, ["a"]), (3, ["b", "c"])]
    cut = cut_delta(delta, 3)
    assert (cut.token_ids, cut.logprobs, cut.draft_sources, cut.steps) == ([4, 5], [40, 50], ["c"], [(2, ["c"])])
    assert cut_delta(delta, 2).steps == [(3, ["b", "c"])]


def test_the_next_leg_resumes_open_choices_only() -> None:
    owner = Owner()
    owner.submit(0, n=2)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.tell(tokens(0, 5, 6, finish="stop"))
    ticket = owner.tell(Refused(0, 1, "d", 1, 2, "room"))[0].ticket
    assert (ticket.leg, ticket.resumed, ticket.num_attempts) == (2, [None, []], 0)


def test_a_handed_image_goes_with_the_next_leg_until_its_node_is_lost() -> None:
    owner = Owner()
    owner.wait(3.0)
    owner.submit(0, prompt=100)
    owner.tell(Claimed(0, 1, "p", 1, 1))
    owner.now += 1.0
    image = Image("p", 1, 1)
    ticket = owner.tell(Handed(0, 1, "p", 1, 2, image))[0].ticket
    assert (ticket.stage, ticket.leg, ticket.image) == ("decode", 2, image)
    owner.now += 0.5
    restarted = {**NODES, "p": Member(2, Role.PREFILL)}
    assert owner.look(restarted, began_s_ago=0.5) == []
    actions = owner.look(restarted)
    assert kinds(actions) == ["Dequeue", "Enqueue"]
    assert (actions[1].ticket.leg, actions[1].ticket.image) == (2, None)


def test_an_abort_is_told_once_per_sync_period() -> None:
    owner = Owner()
    assert owner.tell(tokens(0, 1)) == [Tell("d", Abort("o", 0, 1))]
    assert owner.tell(tokens(1, 2)) == []
    owner.wait(0.5)
    assert owner.tell(tokens(2, 3)) == [Tell("d", Abort("o", 0, 1))]


@pytest.mark.parametrize(("patience_s", "local"), [(4.0, [0, 1]), (None, [])])
def test_streams_that_stand_still_without_redis_go_on_locally(patience_s: float | None, local: list[int]) -> None:
    """The oldest first, as the own engine has room; a new request goes there at once."""
    owner = Owner(patience_s=patience_s)
    for number in range(3):
        owner.submit(number)
        owner.tell(Claimed(number, 1, "d", 1, 1))
    owner.tell(RedisLost())
    assert kinds(owner.submit(3)) == ["RunLocal"]
    assert kinds(owner.wait(3.5, local_room=2)) == []
    owner.now += 0.5
    actions = owner.tell(Tick(2))
    assert [action.ticket.number for action in actions if isinstance(action, RunLocal)] == local


def test_a_stream_that_still_arrives_is_not_taken_over() -> None:
    """Redis may be full for writes only."""
    owner = Owner(patience_s=4.0)
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.tell(RedisLost())
    owner.wait(3.0)
    owner.tell(tokens(0, 7))
    assert owner.wait(3.5, local_room=1) == []
    assert kinds(owner.wait(0.5, local_room=1)) == ["Tell", "RunLocal"]


def test_waiting_times_losses_and_paths_are_noted_for_metrics() -> None:
    owner = Owner(stall_s=4.0, max_attempts=9)
    owner.submit(0, prompt=100)
    owned = owner.states.requests[0]
    assert owned.path == "redis"
    owner.wait(1.0)
    owner.tell(Claimed(0, 1, "p", 1, 1))
    owner.tell(Handed(0, 1, "p", 1, 2, None))
    owner.wait(0.5)
    owner.tell(Claimed(0, 2, "d", 1, 1))
    owner.tell(Holding("d", 1, 2, []))
    owner.tell(Claimed(0, 3, "d", 1, 3))
    owner.wait(4.5)
    owner.tell(Claimed(0, 4, "d", 1, 4))
    assert owner.states.observed == [
        LegClaimed(Stage.PREFILL, 1.0),
        LegClaimed(Stage.DECODE, 0.5),
        LegLost(LossReason.FORGOTTEN),
        LegClaimed(Stage.DECODE, 0.0),
        LegLost(LossReason.STALLED),
        LegClaimed(Stage.DECODE, 0.0),
    ]
    owner.states.observed.clear()
    owner.nodes = {"own": Member(1, Role.MIXED)}
    owner.wait(4.5, local_room=1)
    assert owner.states.observed == [LegLost(LossReason.NODE_LOST)]
    assert (owned.path, owned.state) == ("taken_over", OwnedState.LOCAL)
    owner.submit(1)
    assert owner.states.requests[1].path == "local"


def test_the_first_wait_of_a_request_counts_from_its_arrival() -> None:
    owner = Owner()
    for number in range(5):
        owner.submit(number)
    assert owner.states.requests[4].leg == 0, "four tickets stand in Redis for two nodes"
    owner.wait(1.0)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.wait(0.5)
    owner.tell(Claimed(4, 1, "d", 1, 2))
    assert owner.states.observed == [LegClaimed(Stage.DECODE, 1.0), LegClaimed(Stage.DECODE, 1.5)]


def test_a_restarted_node_and_a_dead_engine_are_losses_of_their_own_kind() -> None:
    owner = Owner()
    owner.wait(3.0)
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 1, 1))
    owner.now += 0.5
    owner.look({**NODES, "d": Member(2, Role.DECODE)})
    owner.tell(RedisLost())
    owner.submit(1)
    owner.tell(LocalDied())
    assert [one.reason for one in owner.states.observed if isinstance(one, LegLost)] == [
        LossReason.NODE_RESTARTED,
        LossReason.ENGINE_DIED,
    ]


@pytest.mark.parametrize("shown", [4, 6])
def test_any_other_incarnation_is_a_restart_in_a_look_that_began_after_the_claim(shown: int) -> None:
    owner = Owner()
    owner.wait(3.0)
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 5, 1))
    other = {**NODES, "d": Member(shown, Role.DECODE)}
    assert owner.look(other) == [], "it may show what was there before the claim"
    owner.now += 0.5
    assert owner.look(other, began_s_ago=0.5) == []
    assert owner.look(other, began_s_ago=0.6) == []
    assert owner.look({}) == [], "what an earlier look has shown does not count"
    assert kinds(owner.look(other, began_s_ago=0.4)) == ["Enqueue"]
    assert owner.states.observed[-1] == LegLost(LossReason.NODE_RESTARTED)


def test_incarnations_are_not_compared_while_redis_may_have_old_records() -> None:
    owner = Owner()
    owner.wait(3.0)
    owner.submit(0)
    owner.tell(Claimed(0, 1, "d", 5, 1))
    owner.tell(RedisReturned())
    other = {**NODES, "d": Member(4, Role.DECODE)}
    owner.now += 2.5
    assert owner.look(other) == []
    owner.now += 0.5
    assert kinds(owner.look(other)) == ["Enqueue"]
