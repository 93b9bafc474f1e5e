# SPDX-License-Identifier: Apache-2.0
"""Pairwise covers: few cases that together contain every pair of values, in place of all combinations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Return cases that together contain each pair of values of two factors that occurs in an allowed case.

    The cover is greedy: each case is the first of those with the most pairs that are still missing. So it is the same
    in every run, and not much larger than the product of the two longest factors.

    Args:
        factors: the values of each factor.
        allowed: of a case's values, False for combinations that do not exist.
    """
    candidates = [(case, _pairs(case)) for case in product(*map(range, map(len, factors)))]
    candidates = [(case, pairs) for case, pairs in candidates if allowed(*_values(factors, case))]
    missing = set[tuple[int, int, int, int]]().union(*(pairs for _, pairs in candidates))
    cases = []
    while missing:
        case, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        cases.append(_values(factors, case))
        missing -= pairs
    return cases


def _pairs(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Return (factor, its value, another factor, its value) of each pair in a case."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(case), 2)}


def _values(factors: Sequence[Sequence[Any]], case: Sequence[int]) -> tuple[Any, ...]:
    return tuple(values[index] for values, index in zip(factors, case))
