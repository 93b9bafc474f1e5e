# SPDX-License-Identifier: Apache-2.0
"""Whatever stands in Redis is decoded or refused, and what is decoded harms neither an owner nor a node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import KVImage
from fastdeploy.core.outputs import ErrorInfo, TokenDelta, TokenLogprobs
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.kv_cache.connectors.base import TransferError
from fastdeploy.scheduler import messages
from fastdeploy.scheduler.agent_engine import decode_image, encode_image
from fastdeploy.scheduler.messages import (
    BadMessageError,
    decode_record,
    decode_ticket,
    decode_to_node,
    decode_to_owner,
    encode,
)
from fastdeploy.scheduler.node_events import (
    Claim,
    ClaimWritten,
    EngineHandedOver,
    EngineTokens,
    Fetch,
    Fetched,
    OwnersLooked,
    RecordWritten,
    Send,
    Sent,
    TicketRead,
)
from fastdeploy.scheduler.node_states import NodeStates
from fastdeploy.scheduler.owner_events import Deliver, Enqueue, RunLocal, Submit
from fastdeploy.scheduler.owner_states import OwnerStates
from fastdeploy.scheduler.request_states import (
    Claimed,
    Handed,
    Held,
    Holding,
    Limits,
    Looked,
    Member,
    NodeMessage,
    Refused,
    Role,
    Stage,
    Tell,
    Tick,
    Ticket,
    Tokens,
    leg_id,
)
from tests.scheduler.message_fuzzing import (
    NODE,
    NUMBERS,
    OWNER,
    image,
    mutated,
    records,
    source,
    tickets,
    to_node,
    to_owner,
)

DECODERS: dict[Callable[[bytes], Any], list[Any]] = {
    decode_ticket: tickets(),
    decode_to_owner: to_owner(),
    decode_to_node: to_node(),
    decode_record: records(),
}
PLAIN = GenerationRequest("id", [1], SamplingParams())


@pytest.mark.parametrize("decode", DECODERS)
def test_what_is_encoded_is_decoded_to_the_same(decode: Callable[[bytes], Any]) -> None:
    assert [decode(encode(value)) for value in DECODERS[decode]] == DECODERS[decode]


def test_another_version_is_refused_by_its_number() -> None:
    with pytest.raises(BadMessageError, match=r"expected version 1 of the schema, got b'\\x02'"):
        decode_ticket(b"\x02" + encode(tickets()[0])[1:])
    with pytest.raises(BadMessageError, match="got b''"):
        decode_ticket(b"")


def test_a_value_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 100)
    with pytest.raises(BadMessageError, match="expected at most 100 bytes, got 101"):
        decode_ticket(b"\x01" + bytes(100))


@pytest.mark.parametrize(
    "header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 5000]
)
def test_lengths_and_depths_that_are_not_there_are_refused(header: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(BadMessageError):
            decode(b"\x01" + header)


def ticket(**fields: Any) -> Ticket:
    return Ticket(**{**dict(owner=OWNER, number=1, leg=2, stage=Stage.DECODE, request=PLAIN, resumed=[[]]), **fields})


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ticket(owner=""), "matching regex"),
        (ticket(owner="a b"), "matching regex"),
        (ticket(owner="a\n"), "matching regex"),
        (ticket(owner="x" * 201), "matching regex"),
        (ticket(number=-1), ">= 0"),
        (ticket(number=2**63), "<= 9223372036854775807"),
        (ticket(leg=0), ">= 1"),
        (ticket(resumed=[]), "expected resumed of 1 choices, got 0"),
        (ticket(resumed=[[], []]), "expected resumed of 1 choices, got 2"),
        (ticket(resumed=[None]), "all its choices have ended"),
        (ticket(resumed=[[-1]]), ">= 0"),
        (ticket(resumed=[[2**31]]), "<= 2147483647"),
        (ticket(num_attempts=-1), ">= 0"),
        (ticket(timeout_s=math.nan), "expected a finite timeout_s"),
        (ticket(timeout_s=math.inf), "expected a finite timeout_s"),
        (ticket(image=image(2)), "its image is not of an earlier leg"),
        (ticket(image=image(0)), ">= 1"),
        (ticket(request=replace(PLAIN, prompt_token_ids=[])), "expected a prompt"),
        (ticket(request=replace(PLAIN, prompt_token_ids=[1, -1])), "expected token ids in the prompt"),
        (ticket(request=replace(PLAIN, prompt_token_ids=[2**31])), "expected token ids in the prompt"),
        (ticket(request=replace(PLAIN, timeout_s=math.inf)), "expected a finite timeout_s of the request"),
        (ticket(request=replace(PLAIN, client_weight=0.0)), "expected a positive client_weight"),
        (ticket(request=replace(PLAIN, client_weight=math.nan)), "expected a positive client_weight"),
        (ticket(request=replace(PLAIN, client_max_sequences=0)), "expected a positive client_max_sequences"),
        (ticket(request=replace(PLAIN, arrived_s=1.0)), "expected no arrived_s"),
        (ticket(request=replace(PLAIN, resumed=[[]])), "as a client makes it"),
        (ticket(request=replace(PLAIN, hands_over=True)), "as a client makes it"),
        (ticket(request=replace(PLAIN, export_slots=[0])), "as a client makes it"),
    ],
)
def test_a_ticket_that_no_owner_writes_is_refused(bad: Ticket, words: str) -> None:
    with pytest.raises(BadMessageError, match=words):
        decode_ticket(encode(bad))


def test_sampling_parameters_out_of_range_are_refused() -> None:
    for name, value in (("n", 0), ("n", 129), ("temperature", math.nan), ("top_p", 2.0), ("logit_bias", {-1: 0.0})):
        plain = msgspec.msgpack.decode(encode(ticket())[1:])
        plain[4]["params"][name] = value
        with pytest.raises(BadMessageError, match=name):
            decode_ticket(b"\x01" + msgspec.msgpack.encode(plain))


LOGPROBS = [TokenLogprobs(1, -1.0, 1)]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (Claimed(-1, 1, "n", 1, 1), ">= 0"),
        (Claimed(1, 0, "n", 1, 1), ">= 1"),
        (Claimed(1, 1, "", 0, 1), "matching regex"),  # the owner's own engine
        (Claimed(1, 1, "n", -1, 1), ">= 0"),
        (Claimed(1, 1, "n", 1, -1), ">= 0"),
        (Tokens(*source(1), -1, TokenDelta("", 0)), ">= 0"),
        (Tokens(*source(1), 0, TokenDelta("", -1)), "expected an index in"),
        (Tokens(*source(1), 0, TokenDelta("", 128)), "expected an index in"),
        (Tokens(*source(1), 0, TokenDelta("", 0, [-1])), "expected token ids in the delta"),
        (Tokens(*source(1), 0, TokenDelta("", 0, [1, 2], logprobs=LOGPROBS)), "expected log-probabilities of each"),
        (Tokens(*source(1), 0, TokenDelta("", 0, finish_reason="done")), "expected another finish_reason"),
        (Tokens(*source(1), 0, TokenDelta("", 0, finish_reason="error")), "expected an error with its"),
        (Tokens(*source(1), 0, TokenDelta("", 0, error=ErrorInfo("a", "b"))), "expected an error with its"),
        (Tokens(*source(1), 0, TokenDelta("", 0, [1], ["a", "b"])), "at most one source per token"),
        (Tokens(*source(1), 0, TokenDelta("", 0, [1], steps=[(2, [])])), "expected steps of all tokens"),
        (Tokens(*source(1), 0, TokenDelta("", 0, [1], steps=[(0, ["a"]), (1, [])])), "at most one source per token"),
        (Handed(*source(1), image(2)), "an image that the sender made in this leg"),
        (Handed(1, 1, "other", 1, 1, image()), "an image that the sender made in this leg"),
        (Handed(*source(1), None, -1), ">= 0"),
        (Refused(*source(1), "else"), "expected invalid or room"),
        (Holding(NODE, 1, 1, [Held(1, 1, [-1])]), ">= 0"),
        (Holding(NODE, 1, 1, [Held(1, 1, [0] * 129)]), "at most 128 next_indices"),
        (Holding(NODE, 2, 1, [Held(1, 1, [0], 0, image())]), "an image that the sender made in this leg"),
    ],
)
def test_a_message_that_no_node_sends_is_refused(bad: Any, words: str) -> None:
    with pytest.raises(BadMessageError, match=words):
        decode_to_owner(encode([bad]))


IMAGE = KVImage("n:1", [3, 4], [1, 2], 70, [[64], [6]])


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        encode_image(replace(IMAGE, num_tokens=0)),
        encode_image(replace(IMAGE, num_tokens=-1)),
        encode_image(replace(IMAGE, slots=[], generations=[])),
        encode_image(replace(IMAGE, generations=[1])),
    ],
)
def test_an_image_that_no_node_makes_is_not_fetched(bad: bytes) -> None:
    assert decode_image(encode_image(IMAGE)) == IMAGE
    with pytest.raises(TransferError, match="the image"):
        decode_image(bad)


# Broken and hostile messages.


def fuzz(decode: Callable[[bytes], Any], count: int) -> list[Any]:
    """Decode many broken messages; return those that could be decoded."""
    decoded = []
    for data in mutated(DECODERS[decode], count, seed=25):
        try:
            decoded.append(decode(data))
        except BadMessageError as error:
            assert len(str(error)) <= 200
    return decoded


def check_all(count: int) -> None:
    """Check that nothing but BadMessageError is raised, and that both machines take what could be decoded."""
    assert len(fuzz(decode_record, count // 6)) > count // 60
    to_owners = fuzz(decode_to_owner, count // 3)
    to_nodes, read = fuzz(decode_to_node, count // 6), fuzz(decode_ticket, count // 3)
    assert min(len(to_owners), len(to_nodes), len(read)) > count // 60
    for start in range(0, len(to_owners), 20):
        feed_owner([message for one in to_owners[start : start + 20] for message in one])
    for start in range(0, len(read), 10):
        node_messages = to_nodes[start // 2 : start // 2 + 5]
        feed_node(read[start : start + 10], [message for one in node_messages for message in one])


def test_broken_messages_are_refused_or_do_no_harm() -> None:
    check_all(3_000)


@pytest.mark.nightly
def test_many_broken_messages_are_refused_or_do_no_harm() -> None:
    check_all(50_000)


def feed_owner(events: list[Any]) -> None:
    """Tell an owner, some of whose requests are queued, some running, and one on its own engine."""
    owner, now = OwnerStates(OWNER, "own", Limits(), True, 0.0), 0.0
    members = {name: Member(1, role) for name, role in (("p", Role.PREFILL), (NODE, Role.DECODE), ("own", Role.MIXED))}
    owner.handle(Looked(members, now), now)
    for number in NUMBERS:
        owner.handle(Submit(number, replace(PLAIN, params=SamplingParams(n=1 + number % 2))), now)
    for number in (0, 1, 2):
        owner.handle(Claimed(*source(number, seq=1)), now)
    owner.handle(Tokens(*source(1, seq=2), 0, TokenDelta("", 0, [5])), now)
    owner.handle(Handed(*source(2, seq=3), image()), now)
    for count, event in enumerate(events):
        if isinstance(event, NodeMessage | Holding):
            now += 0.1
            check_actions(owner.handle(event, now))
        if count % 5 == 0:
            check_actions(owner.handle(Looked(members, now), now) + owner.handle(Tick(1), now))


def check_actions(actions: list[Any]) -> None:
    """Check that what an owner passes on is as it should be."""
    for action in actions:
        match action:
            case Enqueue(ticket) | RunLocal(ticket):
                assert decode_ticket(encode(ticket)) == ticket
                ticket.engine_request()
            case Deliver(delta=delta):
                assert len(delta.sources()) == len(delta.token_ids)
            case Tell(_, message):
                decode_to_node(encode([message]))


def feed_node(read: list[Ticket], events: list[Any]) -> None:
    """Tell a node that has tickets in every state, and that reads these."""
    node, now = NodeStates(NODE, 1, Role.PREFILL, 3, Limits(), 0.0), 2.0
    node.handle(Looked({NODE: Member(1, Role.PREFILL), "e": Member(1, Role.DECODE)}, now), now)
    node.handle(RecordWritten(1), now)
    for number in NUMBERS:
        own = Ticket(OWNER, number, 1, Stage.PREFILL, PLAIN, [[]])
        tell_node(node, TicketRead(own, f"q {number}", 1, 0), now)
    tell_node(node, EngineTokens((OWNER, 0), 1, 0, TokenDelta("", 0, [5])), now)
    tell_node(node, EngineHandedOver((OWNER, 1), 1, b"content", 1), now)
    for count, ticket in enumerate(read):
        now += 0.1
        tell_node(node, TicketRead(ticket, f"r {count}", 1, 1), now)
        leg_id(ticket.owner, ticket.number, ticket.leg)
        for event in events[5 * count : 5 * count + 5]:
            tell_node(node, event, now)
        tell_node(node, OwnersLooked(frozenset({OWNER})), now)
        tell_node(node, Tick(), now)


def tell_node(node: NodeStates, event: Any, now: float) -> None:
    """Tell a node whose writes succeed at once."""
    for action in node.handle(event, now):
        match action:
            case Send(owner, sent):
                assert decode_to_owner(encode(sent)) == list(sent)
                tell_node(node, Sent(owner, "written"), now)
            case Claim(owner, Claimed() as message):
                tell_node(node, ClaimWritten((owner, message.number), message.leg), now)
            case Fetch(ticket):
                tell_node(node, Fetched(ticket.key, ticket.leg), now)
            case Tell(_, message):
                decode_to_node(encode([message]))
