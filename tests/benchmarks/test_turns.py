# SPDX-License-Identifier: Apache-2.0
"""Engines that take turns: equal work in every stretch, and what can be said of the ratio of two of them."""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import pytest

from benchmarks.bench_speculation import OneMemory, make_timed
from benchmarks.replay import replay_answers
from benchmarks.turns import Lane, Spent, Timed, Turns, speed_up
from benchmarks.workloads import Turn
from fastdeploy.core.sampling_params import SamplingParams

NUM_TOKENS = 40
ARGS: dict[str, Any] = {"model": "demo", "replay": False, "quantization": "none", "clock": "wall", "batch": [2]}
ARGS |= {"max_prompt_tokens": 24, "max_tokens": NUM_TOKENS, "num_speculative_tokens": 4}
PROMPTS = [Turn([5, 6, 7] * 6, []), Turn([9, 8] * 12, [])]


def make_lanes() -> list[Lane]:
    memory, args = OneMemory(2), argparse.Namespace(**ARGS)
    return [Lane(method, make_timed(method, args, memory)) for method in ("naive", "ngram-fixed")]


def params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_engines_do_the_same_work_in_every_stretch_and_none_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, ends = make_lanes(), list[tuple[int, int, int]]()
    advance = Timed.advance

    def spy(timed: Timed, num_tokens: int) -> Spent:
        spent = advance(timed, num_tokens)
        ends.append((num_tokens, sum(map(len, timed.texts.values())), spent.num_steps))
        return spent

    monkeypatch.setattr(Timed, "advance", spy)
    Turns(lanes, params(), stretch_s=0.0).run(PROMPTS[:1], "salt")
    assert [lane.spent.num_tokens for lane in lanes] == [NUM_TOKENS - 1] * 2  # the first token is not timed
    assert len(lanes[0].stretches) == len(lanes[1].stretches) == len(ends) // 2
    assert all(0 <= reached - end <= 4 or reached == NUM_TOKENS for end, reached, _ in ends)
    assert lanes[0].spent.num_steps == NUM_TOKENS - 1 > lanes[1].spent.num_steps == sum(n for *_, n in ends) - 39


def test_no_block_of_the_cache_they_share_belongs_to_two_engines() -> None:
    blocks = [set(lane.timed.engine.scheduler.kv.pool._free) for lane in make_lanes()]
    assert [len(own) for own in blocks] == [2, 2]
    assert not set.intersection(*blocks)


def test_untimed_turns_leave_no_figures() -> None:
    lanes = make_lanes()
    Turns(lanes, params(), stretch_s=0.1).run(PROMPTS, "salt", is_timed=False)
    assert [(lane.spent, lane.stretches) for lane in lanes] == [(Spent(), [])] * 2


def test_a_lane_that_says_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, number = make_lanes(), itertools.count()
    lanes[1].timed.answers = {}
    begin = Timed.begin

    def begin_and_forge(timed: Timed, *arguments: Any) -> None:
        begin(timed, *arguments)
        if next(number):
            next(iter(timed.texts.values()))[0] += 1

    monkeypatch.setattr(Timed, "begin", begin_and_forge)
    with pytest.raises(AssertionError, match="ngram-fixed changed a text"):
        Turns(lanes, params(), stretch_s=0.1).run(PROMPTS, "salt")


def make_lane(stretches: list[tuple[int, float]]) -> Lane:
    lane = Lane("", None)  # type: ignore[arg-type]
    for num_tokens, total_s in stretches:
        lane.add(Spent(num_tokens=num_tokens, total_s=total_s))
    return lane


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ([(4, 2.0), (8, 4.0)], [(4, 1.0), (8, 2.0)], (2.0, 0.0)),  # however long stretches are, the ratio is the same
        ([(4, 1.0), (4, 3.0)], [(4, 1.0), (4, 1.0)], (2.0, 1.0)),
        ([(4, 1.0), (4, 1.0)], [(6, 1.0), (3, 0.5)], (1.5, 0.0)),  # beyond the end of a stretch, and less in the next
    ],
)
def test_speed_counts_what_was_emitted_and_the_error_is_what_stretches_differ_by(
    base: list[tuple[int, float]], own: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    assert speed_up(make_lane(base), make_lane(own)) == pytest.approx(expected)


def test_what_is_left_of_a_batch_whose_answers_end_one_by_one_is_not_timed() -> None:
    lanes = make_lanes()
    answers = [[5, 6, 7] * NUM_TOKENS, [random.Random(0).randrange(9, 99) for _ in range(2 * NUM_TOKENS)]]
    turns = [Turn(turn.prompt, answer) for turn, answer in zip(PROMPTS, answers)]
    for lane in lanes:
        lane.timed.answers = {}
        replay_answers(lane.timed.engine, lane.timed.answers)
    Turns(lanes, params(), stretch_s=0.0).run(turns, "salt")
    assert all(0 < lane.spent.num_tokens < 2 * NUM_TOKENS - 2 for lane in lanes)
    assert not any(lane.timed.engine.has_unfinished() for lane in lanes)
