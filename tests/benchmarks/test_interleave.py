# SPDX-License-Identifier: Apache-2.0
"""Interleaved engines: equal work in every stretch, and the ratio of two of them with its error."""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import pytest

from benchmarks.bench_speculation import SharedMemory, make_timed
from benchmarks.interleave import Comparison, Contender, TimedEngine, Timings, speed_up
from benchmarks.replay import replay_answers
from benchmarks.workloads import Turn
from fastdeploy.core.sampling_params import SamplingParams

NUM_TOKENS = 40
ARGS: dict[str, Any] = {"model": "demo", "replay": False, "quantization": "none", "clock": "wall", "batch": [2]}
ARGS |= {"max_prompt_tokens": 24, "max_tokens": NUM_TOKENS, "num_speculative_tokens": 4}
PROMPTS = [Turn([5, 6, 7] * 6, []), Turn([9, 8] * 12, [])]


def make_contenders() -> list[Contender]:
    memory, args = SharedMemory(2), argparse.Namespace(**ARGS)
    return [Contender(method, make_timed(method, args, memory)) for method in ("naive", "ngram-fixed")]


def params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def test_engines_do_the_same_work_in_every_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders, ends = make_contenders(), list[tuple[int, int, int]]()
    decode = TimedEngine.decode

    def spy(timed: TimedEngine, num_tokens: int) -> Timings:
        timings = decode(timed, num_tokens)
        ends.append((num_tokens, sum(map(len, timed.texts.values())), timings.num_steps))
        return timings

    monkeypatch.setattr(TimedEngine, "decode", spy)
    Comparison(contenders, params(), stretch_s=0.0).run(PROMPTS[:1], "salt")
    naive, ngram = contenders
    assert naive.total.num_tokens == ngram.total.num_tokens == NUM_TOKENS - 1, "the first token is not timed"
    assert len(naive.stretches) == len(ngram.stretches) == len(ends) // 2
    assert all(0 <= reached - end <= 4 or reached == NUM_TOKENS for end, reached, _ in ends)
    assert naive.total.num_steps == NUM_TOKENS - 1 > ngram.total.num_steps
    assert naive.total.num_steps + ngram.total.num_steps == sum(num_steps for *_, num_steps in ends)


def test_no_block_of_the_shared_cache_belongs_to_two_engines() -> None:
    pools = [contender.timed.engine.scheduler.kv_cache_manager.pool for contender in make_contenders()]
    assert [pool.num_free for pool in pools] == [2, 2]
    blocks = [pool.allocate(2) or [] for pool in pools]
    assert len({*blocks[0], *blocks[1]}) == 4


def test_a_contender_that_emits_another_text_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders, number = make_contenders(), itertools.count()
    contenders[1].timed.answers = {}
    prefill = TimedEngine.prefill

    def prefill_and_forge(timed: TimedEngine, *arguments: Any) -> None:
        prefill(timed, *arguments)
        if next(number):
            next(iter(timed.texts.values()))[0] += 1

    monkeypatch.setattr(TimedEngine, "prefill", prefill_and_forge)
    with pytest.raises(AssertionError, match="ngram-fixed changed a text"):
        Comparison(contenders, params(), stretch_s=0.1).run(PROMPTS, "salt")


def make_contender(stretches: list[tuple[int, float]]) -> Contender:
    contender = Contender("", None)  # type: ignore[arg-type]
    for num_tokens, total_s in stretches:
        contender.add(Timings(num_tokens=num_tokens, total_s=total_s))
    return contender


@pytest.mark.parametrize(
    ("base", "own", "expected"),
    [
        ([(4, 2.0), (8, 4.0)], [(4, 1.0), (8, 2.0)], (2.0, 0.0)),  # however long stretches are, the ratio is the same
        ([(4, 1.0), (4, 3.0)], [(4, 1.0), (4, 1.0)], (2.0, 1.0)),
        ([(4, 1.0), (4, 1.0)], [(6, 1.0), (3, 0.5)], (1.5, 0.0)),  # beyond the end of a stretch, and less in the next
    ],
)
def test_the_ratio_counts_emitted_tokens_and_its_error_is_the_scatter_of_the_stretches(
    base: list[tuple[int, float]], own: list[tuple[int, float]], expected: tuple[float, float]
) -> None:
    assert speed_up(make_contender(base), make_contender(own)) == pytest.approx(expected)


def test_the_rest_of_a_batch_whose_answers_end_one_by_one_is_not_timed() -> None:
    contenders = make_contenders()
    answers = [[5, 6, 7] * NUM_TOKENS, [random.Random(0).randrange(9, 99) for _ in range(2 * NUM_TOKENS)]]
    turns = [Turn(turn.prompt, answer) for turn, answer in zip(PROMPTS, answers)]
    for contender in contenders:
        contender.timed.answers = {}
        replay_answers(contender.timed.engine, contender.timed.answers)
    Comparison(contenders, params(), stretch_s=0.0).run(turns, "salt")
    assert all(0 < contender.total.num_tokens < 2 * NUM_TOKENS - 2 for contender in contenders)
    assert not any(contender.timed.engine.has_unfinished() for contender in contenders)
