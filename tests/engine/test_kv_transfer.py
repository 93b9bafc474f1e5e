# SPDX-License-Identifier: Apache-2.0
"""Imports that are cancelled keep their blocks as long as something is copied to them, and not longer."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import replace

import pytest

from fastdeploy.core.generation_request import GenerationRequest
from fastdeploy.core.handover import Handover
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from tests.engine.hand_over import Pair
from tests.exactness.engines import build, config

WAIT_S = 20.0
REQUEST = GenerationRequest("r", list(range(20, 120)), SamplingParams(max_tokens=3, temperature=0.0))


def num_held(engine: Engine) -> int:
    stats = engine.stats()
    return stats.num_blocks - stats.num_free_blocks


@pytest.fixture
def pair() -> Pair:
    return Pair(build(config()), build(config()))


@pytest.fixture
def ticket(pair: Pair) -> GenerationRequest:
    """A prompt of seven blocks that the first engine has handed over."""
    slots = [3, 4, 5, 6, 7, 8, 9]
    pair.first.add_request(replace(REQUEST, hands_over=True, export_slots=slots))
    [delta] = pair.first.step()
    while not (handovers := pair.first.pop_handovers()):
        pass
    image = handovers[0].image
    assert image is not None and (image.slots, image.generations) == (slots, [1] * 7)
    return replace(REQUEST, resumed=[delta.token_ids], image=replace(image, arena="first"))


def test_a_copy_that_has_begun_keeps_its_blocks_to_its_end(
    pair: Pair, ticket: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, mover = pair.second, pair.importing._mover
    has_begun, may_end, copy = threading.Event(), threading.Event(), mover._import

    def copy_slowly(*args: object) -> object:
        has_begun.set()
        may_end.wait(WAIT_S)
        return copy(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(mover, "_import", copy_slowly)
    prepared = engine.prepare(ticket)
    assert prepared is not None
    assert has_begun.wait(WAIT_S)
    engine.cancel("r")
    assert (num_held(engine), engine.is_moving) == (7, True)
    assert engine.prepare(ticket) is None, "the blocks of the first import are still in use"
    engine.add_request(ticket)
    engine.check_integrity()
    may_end.set()
    wait([prepared])
    assert engine.pop_handovers() == []
    assert (num_held(engine), engine.is_moving) == (0, False)
    while engine.has_unfinished():
        engine.step()
    engine.check_integrity()
    assert (pair.importing.num_imported_blocks, num_held(engine)) == (0, 0)


def test_a_copy_that_has_not_begun_is_left_out(pair: Pair, ticket: GenerationRequest) -> None:
    engine, may_begin = pair.second, threading.Event()
    pair.importing._mover._thread.submit(may_begin.wait, WAIT_S)
    prepared = engine.prepare(ticket)
    assert prepared is not None and num_held(engine) == 7
    engine.cancel("r")
    assert (num_held(engine), engine.is_moving, prepared.cancelled()) == (0, False, True)
    may_begin.set()
    engine.check_integrity()


def test_an_imported_request_says_what_came_from_elsewhere(pair: Pair, ticket: GenerationRequest) -> None:
    engine = pair.second
    prepared = engine.prepare(ticket)
    assert prepared is not None
    wait([prepared])
    assert pair.importing.num_prepared_tokens("r") == 100
    deltas = engine.add_request(ticket)
    while engine.has_unfinished():
        deltas += engine.step()
    metrics = deltas[-1].metrics
    assert metrics is not None
    assert (metrics.num_transferred_tokens, metrics.num_cached_tokens, metrics.transfer_s > 0) == (100, 0, True)
    stats = engine.stats()
    assert (stats.num_imported_tokens, stats.num_prefix_lookup_tokens, stats.num_prefix_hit_tokens) == (100, 101, 0)


def test_the_slots_of_an_export_begin_a_generation_and_are_kept(pair: Pair) -> None:
    engine, generations = pair.first, pair.exporting.arena.generations
    engine.add_request(replace(REQUEST, export_slots=[2, 3]))
    assert generations[:5].tolist() == [0, 0, 1, 1, 0]
    assert engine.hand_over("r", [4])
    assert generations[:5].tolist() == [0, 0, 1, 1, 0]
    while engine.is_moving:
        engine.pop_handovers()
    engine.add_request(replace(REQUEST, export_slots=[3]))
    assert generations[:5].tolist() == [0, 0, 1, 2, 0]
    assert engine.hand_over("nobody", [4]) is False


def test_without_a_transfer_a_request_is_handed_over_with_its_tokens_alone() -> None:
    engine = build(config())
    engine.add_request(REQUEST)
    [delta] = engine.step()
    assert engine.hand_over("r", [1]) and engine.is_moving and not engine.has_unfinished()
    assert engine.pop_handovers() == [Handover("r", [delta.token_ids])]
    assert engine.pop_handovers() == [] and not engine.is_moving
    engine.check_integrity()
    assert num_held(engine) == 0
