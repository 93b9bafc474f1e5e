# SPDX-License-Identifier: Apache-2.0
"""Blocks that do not arrive, or arrive wrong, are counted by their reason and computed; no text shows it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest

from fastdeploy.core.handover import Handover
from fastdeploy.core.request import GenerationRequest
from fastdeploy.detokenize.tokenizer import Tokenizer
from fastdeploy.engine.engine_factory import make_kv_transfer
from fastdeploy.hub.model_path import resolve_model_path
from tests.engine.hand_over import DIGESTS, Pair, make_pair
from tests.exactness.engines import Texts, build, config
from tests.exactness.requests import make_requests, run_alone

Spoil = Callable[[Pair, Handover], None]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    return make_requests(Tokenizer.from_pretrained(resolve_model_path("demo")), build(config()))


@pytest.fixture(scope="module")
def plain(requests: list[GenerationRequest]) -> Texts:
    return run_alone(build(config()), requests)


def run_spoilt(pair: Pair, requests: list[GenerationRequest], spoil: Spoil) -> Texts:
    """Run the requests; `spoil` changes a hand-over, or the arena, before the second engine gets it."""
    pass_on = pair.pass_on

    def spoil_and_pass_on(handover: Handover) -> None:
        assert handover.image is not None
        spoil(pair, handover)
        pass_on(handover)

    pair.pass_on = spoil_and_pass_on  # type: ignore[method-assign]
    for request in requests:
        pair.add(request)
    return pair.texts()


def last_slot(handover: Handover) -> int:
    assert handover.image is not None
    return handover.image.slots[-1]


def reuse_slot(pair: Pair, handover: Handover) -> None:
    pair.exporting.arena.generations[last_slot(handover)] += 1


def flip_byte(part: str) -> Spoil:
    def flip(pair: Pair, handover: Handover) -> None:
        arena = pair.exporting.arena
        place = arena.parts[part]
        address = arena.address(last_slot(handover)) + place.offset + place.num_bytes // 2
        ctypes.c_uint8.from_address(address).value ^= 1

    return flip


def flip_checksum(pair: Pair, handover: Handover) -> None:
    pair.exporting.arena.checksums[last_slot(handover), 0] ^= 1


def name_missing_slot(pair: Pair, handover: Handover) -> None:
    assert handover.image is not None
    handover.image.slots[-1] = pair.num_slots


SPOILS = {
    "a reused slot": (reuse_slot, "stale"),
    "a slot that does not exist": (name_missing_slot, "stale"),
    "a flipped byte of the target": (flip_byte("target"), "target_checksum"),
    "a flipped byte of the drafting caches": (flip_byte("drafting"), "drafting_checksum"),
    "a flipped byte of the states": (flip_byte("states"), "states_checksum"),
    "a flipped checksum": (flip_checksum, "target_checksum"),
}


@pytest.mark.parametrize("name", SPOILS)
@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_spoilt_blocks_are_counted_and_never_seen_in_a_text(
    requests: list[GenerationRequest], plain: Texts, name: str, caches_prefixes: bool
) -> None:
    spoil, reason = SPOILS[name]
    pair = make_pair(plain, "mtp", "mtp", chunk=7, caches_prefixes=caches_prefixes)
    assert run_spoilt(pair, requests, spoil) == plain
    failed = pair.importing.num_failed_blocks
    assert failed == {reason: len(requests)} == pair.second.stats().num_failed_blocks
    num_sent = sum(len(handover.image.slots) for handover in pair.handovers if handover.image)
    loses_blocks = not reason.startswith(("drafting", "states"))
    num_arrived = num_sent - len(requests) if loses_blocks else num_sent
    assert caches_prefixes or pair.importing.num_imported_blocks == num_arrived
    assert (pair.second.stats().num_accepted_tokens == 0) == (reason == "states_checksum"), "no drafts without states"


def test_a_block_behind_a_spoilt_one_is_computed_too(requests: list[GenerationRequest], plain: Texts) -> None:
    def reuse_first_slot(pair: Pair, handover: Handover) -> None:
        assert handover.image is not None
        pair.exporting.arena.generations[handover.image.slots[0]] += 1

    pair = make_pair(plain, "naive", "naive", caches_prefixes=False)
    assert run_spoilt(pair, requests, reuse_first_slot) == plain
    assert pair.importing.num_imported_blocks == 0
    assert pair.importing.num_failed_blocks == {"stale": len(requests)}


def test_another_layout_is_not_imported_and_said_once(
    requests: list[GenerationRequest], plain: Texts, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(plain, "mtp", "mtp", num_drafts=1)
    pair.second.transfer = make_kv_transfer(pair.second, 1, {**DIGESTS, "target": "another"})
    pair.importing.attach("first", pair.exporting.arena)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    num_sent = sum(len(handover.image.slots) for handover in pair.handovers if handover.image)
    assert pair.importing.num_imported_blocks == 0
    assert pair.importing.num_failed_blocks == {"target_layout": num_sent}
    assert caplog.text.count("the layout of the KV cache of first is another one") == 1


def test_an_arena_that_is_not_attached_is_counted(requests: list[GenerationRequest], plain: Texts) -> None:
    pair = make_pair(plain, "naive", "naive")
    pair.second.transfer = make_kv_transfer(pair.second, 1, DIGESTS)
    pair.add(requests[0])
    assert pair.texts().items() <= plain.items()
    [handover] = pair.handovers
    assert handover.image is not None
    assert pair.importing.num_failed_blocks == {"unknown_arena": len(handover.image.slots)}


def test_blocks_for_which_there_is_no_room_are_counted(requests: list[GenerationRequest], plain: Texts) -> None:
    few = config(num_blocks=16)
    pair = Pair(build(config()), build(few))
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    failed = pair.importing.num_failed_blocks
    num_sent = sum(len(handover.image.slots) for handover in pair.handovers if handover.image)
    assert 0 < failed["no_room"] < num_sent and failed.keys() == {"no_room"}


def test_a_copy_that_raises_loses_its_blocks_alone(
    requests: list[GenerationRequest], plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(plain, "naive", "naive", caches_prefixes=False)
    mover = pair.importing._mover
    copy, calls = mover._import, iter(range(100))

    def fail_first(*args: object) -> object:
        if next(calls) == 0:
            raise ValueError("no such block")
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(mover, "_import", fail_first)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    sizes = [len(handover.image.slots) for handover in pair.handovers if handover.image]
    assert pair.importing.num_failed_blocks == {"error": sizes[0]}
    assert pair.importing.num_imported_blocks == sum(sizes[1:])


def test_a_request_whose_blocks_cannot_be_exported_has_no_image_and_the_others_have_theirs(
    requests: list[GenerationRequest], plain: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(plain, "naive", "naive", chunk=7, caches_prefixes=False)
    mover = pair.exporting._mover
    copy, calls = mover._export, iter(range(1000))

    def fail_third(*args: object) -> object:
        if next(calls) == 2:
            raise ValueError("no such block")
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(mover, "_export", fail_third)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert sorted(handover.image is None for handover in pair.handovers) == [False] * 15 + [True]
    assert pair.importing.num_failed_blocks == {}, "no slot with old bytes is offered"


def test_blocks_travel_without_a_drafting_model_that_fails(
    requests: list[GenerationRequest], plain: Texts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(plain, "mtp", "mtp", caches_prefixes=False)
    drafter = pair.exporting._drafter
    assert drafter is not None

    def fail(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(drafter, "fill", fail)
    for request in requests:
        pair.add(request)
    assert pair.texts() == plain
    assert "the drafting model failed" in caplog.text
    images = [handover.image for handover in pair.handovers if handover.image]
    assert len(images) == 16 and not any(sum(counts) for image in images for counts in image.num_filled)
    assert pair.second.stats().num_accepted_tokens > 0, "the other engine fills its caches itself"


def test_a_preempted_request_is_handed_over_with_the_copies_of_its_lost_blocks(
    requests: list[GenerationRequest], plain: Texts
) -> None:
    few = config("naive", num_blocks=16)
    pair = Pair(build(few), build(config()))
    running = [replace(request, priority=-1) for request in requests[:5]]
    for request in running:
        pair.add(request, hands_over=False)
    while not pair.first.stats().num_preemptions:
        pair.step()
    [preempted] = {choice.request_id for choice in pair.first.scheduler.waiting if choice.metrics.num_preemptions}
    pair.first.hand_over(preempted)
    assert pair.texts().items() <= plain.items()
    [handover] = pair.handovers
    assert handover.request_id == preempted and handover.image is not None
    assert handover.image.num_tokens == 16 * len(handover.image.slots) > 0
    assert pair.importing.num_imported_blocks == len(handover.image.slots)
