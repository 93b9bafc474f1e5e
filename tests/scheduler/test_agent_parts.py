# SPDX-License-Identifier: Apache-2.0
"""The parts of an agent that do no input or output: slots, rooms, requests of tickets."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.stats import EngineStats
from fastdeploy.kv_cache.connectors.base import Host, TransferError
from fastdeploy.scheduler.agent_engine import decode_image, encode_image
from fastdeploy.scheduler.agent_legs import load_of, make_leg, make_request
from fastdeploy.scheduler.agent_rooms import Load, Rooms
from fastdeploy.scheduler.agent_slots import Slots
from fastdeploy.scheduler.membership import Membership
from fastdeploy.scheduler.messages import NodeRecord
from fastdeploy.scheduler.request_states import Image, Limits, Role, Stage, Ticket

ONE, TWO = ("o", 1, 1), ("o", 2, 1)


def make_ticket(resumed: list[list[int] | None], image: Image | None = None, **fields: Any) -> Ticket:
    params = SamplingParams(n=len(resumed), prompt_logprobs=2)
    request = GenerationRequest("client's", list(range(130)), params, cache_salt="salt", timeout_s=9.0)
    return Ticket("o", 1, 3, Stage.PREFILL, request, resumed, image=image, **fields)


def test_slots_are_given_once_and_freed_once() -> None:
    slots = Slots(4)
    assert slots.take(ONE, 3) == [0, 1, 2]
    assert slots.take(TWO, 3) == [3]  # what is left
    slots.keep(ONE, [0, 1])
    assert slots.num_free == 1
    slots.free(ONE)
    slots.free(ONE)
    slots.free(("unknown", 1, 1))
    assert slots.num_free == 3
    slots.free(TWO)
    assert sorted(slots.take(ONE, 9)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("stats", "started", "has_room"),
    [
        ({}, Load(), True),
        ({"num_running": 3}, Load(), True),
        ({"num_running": 3, "num_waiting": 1}, Load(), False),
        ({"num_running": 3}, Load(num_seqs=1), False),
        ({"num_waiting_tokens": 199}, Load(), True),  # two steps of 100 tokens
        ({"num_waiting_tokens": 150}, Load(num_tokens=50), False),
        ({"num_free_blocks": 9}, Load(), True),  # 8 % of 100 blocks are kept
        ({"num_free_blocks": 8}, Load(), False),
        ({"num_free_blocks": 20}, Load(num_blocks=12), False),
    ],
)
def test_there_is_room_up_to_each_limit(stats: dict[str, int], started: Load, has_room: bool) -> None:
    counters = EngineStats(**{"num_blocks": 100, "num_free_blocks": 100, **stats})
    assert Rooms(max_num_seqs=4, max_num_batched_tokens=100).has_room(counters, started) is has_room


def test_what_an_image_holds_is_not_computed() -> None:
    assert load_of(make_ticket([[], []]), hands_over=False, block_size=64) == Load(130, 2, 5)
    assert load_of(make_ticket([[], []]), hands_over=True, block_size=64) == Load(130, 1, 4)
    assert load_of(make_ticket([[7] * 70], Image("p", 1, 1)), hands_over=False, block_size=64) == Load(0, 1, 5)


def test_a_request_that_hands_over_runs_its_first_open_choice_only() -> None:
    request = make_request(make_ticket([None, [7, 8], []]), hands_over=True, slots=[5, 6])
    assert request.resumed == [None, [7, 8], None]
    assert (request.hands_over, request.export_slots) == (True, [5, 6])
    assert make_request(make_ticket([None, [7, 8], []])).resumed == [None, [7, 8], []]


def test_a_request_has_the_id_and_the_time_of_its_leg() -> None:
    image = KVImage("p:1", [1], [1], 64)
    request = make_request(make_ticket([[7]], timeout_s=2.5), image=image)
    assert (request.request_id, request.timeout_s, request.image) == ("o/1/3", 2.5, image)
    assert (request.cache_salt, request.params.prompt_logprobs) == ("salt", None)
    assert make_request(make_ticket([[]], prompt_logprobs=True)).params.prompt_logprobs == 2


def test_a_leg_follows_the_first_open_choice() -> None:
    ticket = make_ticket([None, [7, 8], []])
    leg = make_leg(ticket, make_request(ticket, hands_over=True))
    assert (leg.has_others, leg.open, leg.num_context_tokens, leg.is_counted) == (True, {1}, 132, False)
    leg.note(TokenDelta("", 1, [9], first_index=2))
    assert (leg.open, leg.num_context_tokens, leg.is_counted) == ({1}, 133, True)
    leg.note(TokenDelta("", 1, [4], finish_reason="stop", first_index=3))
    assert (leg.open, leg.output) == (set(), [7, 8, 9, 4])


def test_an_internal_error_ends_every_open_choice_of_the_ticket() -> None:
    ticket = make_ticket([None, [7, 8], []])
    events = make_leg(ticket, make_request(ticket, hands_over=True)).fail("it broke")
    assert [(event.delta.index, event.first_index, event.delta.finish_reason) for event in events] == [
        (1, 2, "error"),
        (2, 0, "error"),
    ]
    assert {event.delta.error.message for event in events if event.delta.error} == {"it broke"}


def test_an_image_travels_as_bytes() -> None:
    image = KVImage("", [3, 4], [7, 2**63], 100, [[64, 0], [36, 0]])
    assert decode_image(encode_image(image)) == image
    with pytest.raises(TransferError, match="the image cannot be read"):
        decode_image(b"\x93\x01")


def test_a_node_that_does_the_work_of_the_other_kind_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def record(role: Role) -> NodeRecord:
        return NodeRecord(1, 1, role, "g", Host("boot", "net", 0))

    membership = Membership("d", record(Role.DECODE), Limits(expire_s=3.0), None, None)  # type: ignore[arg-type]

    def look(now_s: float, *others: Role, role: Role = Role.DECODE) -> list[str]:
        caplog.clear()
        membership.records = {str(i): record(one) for i, one in enumerate((role, *others))}
        membership._warn_of_missing_kind(role, now_s)
        return caplog.messages

    warning = ["no prefill node lives: this decode node does its work as well"]
    assert [look(now_s, Role.DECODE) for now_s in (10.0, 13.0, 13.5, 20.0)] == [[], [], warning, []]
    assert [look(now_s, Role.MIXED) for now_s in (21.0, 30.0)] == [["mixed node 1 has joined"], []]
    assert [look(now_s, Role.DRAINING) for now_s in (31.0, 34.5)] == [[], warning]
    assert [look(now_s, role=Role.MIXED) for now_s in (35.0, 40.0)] == [[], []]
    assert [look(now_s, role=Role.PREFILL) for now_s in (41.0, 44.5)] == [
        [],
        ["no decode node lives: this prefill node does its work as well"],
    ]
    assert look(45.0, Role.DECODE, Role.DECODE, Role.PREFILL, role=Role.PREFILL) == [
        "decode node 1 has joined",
        "decode node 2 has joined",
    ]


def test_only_a_node_of_the_kind_that_was_said_to_be_missing_takes_the_line_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def record(role: Role) -> NodeRecord:
        return NodeRecord(1, 1, role, "g", Host("boot", "net", 0))

    membership = Membership("d", record(Role.DECODE), Limits(expire_s=3.0), None, None)  # type: ignore[arg-type]
    membership.records = {"d": record(Role.DECODE)}
    for now_s in (10.0, 13.5):
        membership._warn_of_missing_kind(Role.DECODE, now_s)
    assert caplog.messages == ["no prefill node lives: this decode node does its work as well"]
    membership.records = {"d": record(Role.PREFILL), "e": record(Role.DECODE)}  # the role of this node was changed
    membership._warn_of_missing_kind(Role.PREFILL, 14.0)
    assert len(caplog.messages) == 1
