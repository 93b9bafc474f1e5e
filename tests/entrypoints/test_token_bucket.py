# SPDX-License-Identifier: Apache-2.0
"""Tokens per minute."""

from __future__ import annotations

import random

import pytest

from fastdeploy.entrypoints.openai.limiter import TokenBucket


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_holds_a_minute_of_tokens_and_refills_steadily() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.take(50) == 0
    assert bucket.take(20) == 10, "10 tokens are missing, at one per second"
    clock.now_s = 9
    assert bucket.take(20) == 1
    clock.now_s = 10
    assert bucket.take(20) == 0
    clock.now_s = 1000
    assert bucket.take(60) == 0, "it holds no more than a minute's tokens"
    assert bucket.take(1) == 1


def test_output_is_taken_below_zero_and_made_up_for() -> None:
    bucket = TokenBucket(60, Clock())
    bucket.charge(90)
    assert bucket.take(10) == 40


def test_a_prompt_above_the_limit_needs_a_full_bucket() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.take(100) == 0
    assert bucket.take(100) == 100
    clock.now_s = 100
    assert bucket.take(100) == 0


def check_bucket(seed: int) -> None:
    """Check random use: the announced time is exact, and no minute has more than it may."""
    source, clock = random.Random(seed), Clock()
    rate = source.choice([1, 7, 60, 10_000])
    bucket, used = TokenBucket(rate, clock), list[tuple[float, int]]()
    for _ in range(60):
        clock.now_s += source.expovariate(1 / source.choice([1, 20, 90]))
        count = source.randint(1, rate)
        wait_s = bucket.take(count)
        assert wait_s >= 0
        if wait_s:
            begin_s = clock.now_s
            clock.now_s = begin_s + wait_s * 0.99
            assert bucket.take(count) > 0, "not before the announced time"
            clock.now_s = begin_s + wait_s * 1.001
            assert bucket.take(count) == 0, "at the announced time"
        used.append((clock.now_s, count))
        elapsed_s = clock.now_s - used[0][0]
        assert sum(number for _, number in used) <= rate * (1 + elapsed_s / 60) * 1.001
        if source.random() < 0.3:
            output = source.randint(1, 2 * rate)
            bucket.charge(output)
            used.append((clock.now_s, output))


def test_random_use_of_a_bucket_stays_within_its_rate() -> None:
    for seed in range(100):
        check_bucket(seed)


@pytest.mark.nightly
def test_a_thousand_random_uses_of_a_bucket_stay_within_its_rate() -> None:
    for seed in range(1000, 2000):
        check_bucket(seed)
