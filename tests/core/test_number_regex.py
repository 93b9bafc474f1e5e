# SPDX-License-Identifier: Apache-2.0
"""Expressions of numbers within bounds, compared with Python's integers and decimals."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from fastdeploy.core.number_regex import BoundError, integers_from, integers_to, numbers_from, numbers_to

DIRECTIONS: dict[tuple[str, bool], Callable[[Any, Any], bool]] = {
    ("from", False): operator.ge,
    ("from", True): operator.gt,
    ("to", False): operator.le,
    ("to", True): operator.lt,
}
INTEGERS = {"from": integers_from, "to": integers_to}
NUMBERS = {"from": numbers_from, "to": numbers_to}


@cache
def decimals() -> dict[str, Decimal]:
    """Return the texts of numbers with up to two decimals, with and without zeros at the end."""
    numbers = [Decimal(hundredths) / 100 for hundredths in range(-220, 221)]
    texts = {f"{number:.{places}f}" for number in numbers for places in (0, 1, 2, 3)}
    texts = {text for text in texts if Decimal(text) or not text.startswith("-")}
    return {text: Decimal(text) for text in texts}


@pytest.mark.parametrize(("direction", "is_exclusive"), DIRECTIONS)
def test_small_integers_match_where_they_are_within_the_bound(direction: str, is_exclusive: bool) -> None:
    is_within = DIRECTIONS[direction, is_exclusive]
    texts = [str(number) for number in (*range(-215, 216), -1001, -1000, -999, 999, 1000, 1001)]
    for bound in range(-112, 113):
        pattern = re.compile(INTEGERS[direction](Decimal(bound), is_exclusive))
        expected = [text for text in texts if is_within(int(text), bound)]
        assert [text for text in texts if pattern.fullmatch(text)] == expected, bound
        assert not any(map(pattern.fullmatch, ("-0", "01", "-01", "", "-", "1.0", "+1")))


@pytest.mark.parametrize(("direction", "is_exclusive"), DIRECTIONS)
def test_integers_beyond_doubles_match_where_they_are_within_the_bound(direction: str, is_exclusive: bool) -> None:
    rng, is_within = random.Random(37), DIRECTIONS[direction, is_exclusive]
    bounds = [sign * (10**n + k) for sign in (1, -1) for n in range(15, 32) for k in (-1, 0, 1)]
    bounds += [sign * 2**n + k for sign in (1, -1) for n in (53, 63, 64) for k in (-1, 0, 1)]
    bounds += [rng.randint(-(10**30), 10**30) for _ in range(100)]
    for bound in bounds:
        pattern = re.compile(INTEGERS[direction](Decimal(bound), is_exclusive))
        for number in (0, bound, bound + 1, bound - 1, -bound, bound * 10, bound // 10, rng.randint(-(10**31), 10**31)):
            assert bool(pattern.fullmatch(str(number))) is is_within(number, bound), (bound, number)


@pytest.mark.parametrize(("direction", "is_exclusive"), DIRECTIONS)
def test_decimals_match_where_they_are_within_the_bound(direction: str, is_exclusive: bool) -> None:
    is_within = DIRECTIONS[direction, is_exclusive]
    for bound in (Decimal(hundredths) / 100 for hundredths in (*range(-210, 211, 9), 0, 100, -100, 5, 105, 190, -199)):
        pattern = re.compile(NUMBERS[direction](bound, is_exclusive))
        for text, number in decimals().items():
            assert bool(pattern.fullmatch(text)) is is_within(number, bound), (bound, text)


def test_fractions_beside_bounds_beyond_doubles_are_exact() -> None:
    bound = Decimal(2**53 + 1)
    for digits, is_within in (
        ("9007199254740992.999", True),
        ("9007199254740993.0", True),
        ("9007199254740993.5", False),
    ):
        assert bool(re.fullmatch(numbers_to(bound, False), digits)) is is_within
        assert bool(re.fullmatch(numbers_from(-bound, False), f"-{digits}")) is is_within


def test_bounds_that_are_no_integers_restrict_integers() -> None:
    assert [n for n in range(-4, 5) if re.fullmatch(integers_from(Decimal("1.5"), True), str(n))] == [2, 3, 4]
    assert [n for n in range(-4, 5) if re.fullmatch(integers_to(Decimal("-1.5"), False), str(n))] == [-4, -3, -2]


def test_the_largest_double_is_a_bound_and_too_many_digits_are_none() -> None:
    largest = Decimal(repr(1.7976931348623157e308))
    assert len(integers_to(largest, False)) < 2000
    assert re.fullmatch(integers_to(largest, False), str(int(largest)))
    assert not re.fullmatch(integers_to(largest, False), str(int(largest) + 1))
    with pytest.raises(BoundError, match="at most 100 significant digits"):
        integers_to(Decimal("123456789" * 12), False)
