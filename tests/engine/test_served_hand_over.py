# SPDX-License-Identifier: Apache-2.0
"""Engines of the demonstration model behind servers of their own hand requests over through a served arena."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover
from fastdeploy.core.outputs import TokenDelta
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ipc import messages
from tests.exactness.engines import Texts, config
from tests.exactness.requests import join, make_requests, run_alone
from tests.ipc.served_engines import FIRST_AGENT, SECOND_AGENT, ServedEngine, served

SLOTS_PER_REQUEST = 16


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), make_engine(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(make_engine(config()), requests)


def clustered(method: str, chunk: int = 2048) -> Engine:
    cfg = config(method, 3 if method != "naive" else 0, chunk, num_blocks=1024)
    return make_engine(replace(cfg, is_clustered=True, hands_over=True))


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[ServedEngine]]:
    """Serve two engines; in the end, no block may be left and both must be sound."""
    engines = [clustered(method, chunk) for method, chunk in request.param]
    with served(tmp_path, *engines) as found:
        second = found[1].agent
        second.send(messages.AttachArena("first", found[0].arena_path))
        assert second.expect(messages.ArenaAttached).error == ""
        yield found
    for engine in engines:
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


def slots(index: int) -> list[int]:
    return list(range(index * SLOTS_PER_REQUEST, (index + 1) * SLOTS_PER_REQUEST))


def begin(node: ServedEngine, requests: Sequence[GenerationRequest], hands_over: bool) -> None:
    for index, request in enumerate(requests):
        resumed: list[list[int] | None] = [[], *[None] * (request.params.n - 1)]
        export_slots = slots(index) if hands_over else []
        ticket = replace(request, resumed=resumed, hands_over=hands_over, export_slots=export_slots)
        node.agent.send(messages.AddRequest(ticket))


def pause(node: ServedEngine, after_emissions: int, until_handovers: int) -> threading.Event:
    """Make steps of an engine do nothing from a number of emissions to a number of handovers; return the begin."""
    paused = threading.Event()
    step, hand_over = node.engine.step, node.server._hand_over
    counts = {"emissions": 0, "handovers": 0}

    def paused_step() -> list[TokenDelta]:
        if counts["emissions"] >= after_emissions and counts["handovers"] < until_handovers:
            paused.set()
            return []
        deltas = step()
        counts["emissions"] += bool(deltas)
        return deltas

    def counted_hand_over(client: bytes, request_id: str, export_slots: list[int]) -> None:
        counts["handovers"] += 1
        hand_over(client, request_id, export_slots)

    node.engine.step, node.server._hand_over = paused_step, counted_hand_over  # type: ignore[method-assign, assignment]
    return paused


def continued(request: GenerationRequest, handover: Handover) -> GenerationRequest:
    resumed = [handover.resumed[0], *[[]] * (request.params.n - 1)]
    params = replace(request.params, prompt_logprobs=None) if handover.resumed[0] else request.params
    image = handover.image and replace(handover.image, arena="first")
    return replace(request, params=params, resumed=resumed, image=image)


def finish(nodes: Sequence[ServedEngine], requests: Sequence[GenerationRequest]) -> Texts:
    """Pass on all requests that the first engine hands over; return all texts."""
    first, second = (node.agent for node in nodes)
    by_id = {request.request_id: request for request in requests}
    waiting = set(by_id)
    while waiting:
        match first.receive():
            case messages.HandedOver(request_id, handover):
                waiting.discard(request_id)
                if handover is not None:
                    ticket = continued(by_id[request_id], handover)
                    second.send(messages.Prepare(ticket))
                    assert second.expect(messages.Prepared).request_id == request_id
                    second.send(messages.AddRequest(ticket))
            case messages.Deltas(_, others):
                waiting -= {delta.request_id for delta in others if delta.finish_reason is not None}
    keys = [(request.request_id, index) for request in requests for index in range(request.params.n)]

    def deltas(key: tuple[str, int]) -> list[messages.TokenDelta]:
        both = first.deltas(key[0]) + second.deltas(key[0])
        return [delta for delta in both if delta.index == key[1]]

    while any(not deltas(key) or deltas(key)[-1].finish_reason is None for key in keys):
        second.receive()
    return {key: join(deltas(key)) for key in keys}


@pytest.mark.parametrize(
    "nodes",
    [[("naive", 7), ("ngram", 2048)], [("mtp", 64), ("mtp", 7)], [("suffix", 2048), ("draft_model", 64)]],
    indirect=True,
)
def test_prompts_are_computed_by_one_server_and_continued_by_another(
    nodes: list[ServedEngine], requests: list[GenerationRequest], plain: Texts
) -> None:
    begin(nodes[0], requests, hands_over=True)
    assert finish(nodes, requests) == plain
    nodes[1].agent.send(messages.HandOver("nobody", []))
    nodes[1].agent.expect(messages.HandedOver)
    stats = nodes[1].agent.stats.stats
    assert stats.num_prefix_hit_tokens + stats.num_imported_tokens <= stats.num_prefix_lookup_tokens
    assert stats.num_prefix_hit_tokens < 200, "imported tokens are no prefix hits"
    assert stats.num_imported_tokens >= sum(len(request.prompt_token_ids) - 1 for request in requests) // 2
    assert stats.num_failed_blocks == {}


@pytest.mark.parametrize("nodes", [[("mtp", 7), ("mtp", 2048)], [("ngram", 64), ("suffix", 7)]], indirect=True)
def test_a_drained_server_hands_over_whatever_it_runs(
    nodes: list[ServedEngine], requests: list[GenerationRequest], plain: Texts
) -> None:
    alone = [request for request in requests if request.params.n == 1]
    paused = pause(nodes[0], after_emissions=6, until_handovers=len(alone))
    begin(nodes[0], alone, hands_over=False)
    paused.wait()
    for index, request in enumerate(alone):
        nodes[0].agent.send(messages.HandOver(request.request_id, slots(index)))
    expected = {key: text for key, text in plain.items() if key[0] in {request.request_id for request in alone}}
    assert finish(nodes, alone) == expected
    assert nodes[1].engine.stats().num_imported_tokens > 0


@pytest.mark.parametrize("nodes", [[("naive", 7), ("naive", 2048)]], indirect=True)
@pytest.mark.parametrize("num_messages", [0, 3, 12])
def test_agents_that_die_leave_nothing_behind(
    nodes: list[ServedEngine], requests: list[GenerationRequest], plain: Texts, num_messages: int
) -> None:
    begin(nodes[0], requests, hands_over=True)
    for _ in range(num_messages):
        message = nodes[0].agent.receive()
        if isinstance(message, messages.HandedOver) and message.handover is not None:
            request = next(one for one in requests if one.request_id == message.request_id)
            nodes[1].agent.send(messages.Prepare(continued(request, message.handover)))
    for node in nodes:
        node.connect(b"api").send(messages.ClientDisconnected(FIRST_AGENT))
        node.agent = node.connect(SECOND_AGENT)
    nodes[1].agent.send(messages.AttachArena("first", nodes[0].arena_path))
    nodes[1].agent.expect(messages.ArenaAttached)
    while any(node.server._in_flight for node in nodes):
        for node in nodes:
            node.agent.send(messages.DetachArena("nobody"))
    begin(nodes[0], requests, hands_over=True)
    assert finish(nodes, requests) == plain
