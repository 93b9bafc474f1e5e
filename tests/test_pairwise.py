# SPDX-License-Identifier: Apache-2.0
"""Pairwise covers miss no pair, keep to what is allowed, and are small."""

from __future__ import annotations

from itertools import combinations, product

from tests.pairwise import pairwise


def test_three_factors_of_two_values_need_four_cases() -> None:
    assert pairwise("ab", [1, 2], [True, False]) == [
        ("a", 1, True),
        ("a", 2, False),
        ("b", 1, False),
        ("b", 2, True),
    ]


def test_every_pair_of_two_factors_is_in_a_case_and_few_cases_are_needed() -> None:
    factors = (range(7), range(4), range(5), range(2), range(3))
    cases = pairwise(*factors)
    for i, j in combinations(range(5), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(factors[i], factors[j]))
    assert len(set(cases)) == len(cases) <= 40, "of 840; the longest two factors have 35 pairs"


def test_combinations_that_are_not_allowed_are_left_out_and_their_other_pairs_kept() -> None:
    cases = pairwise("abc", [1, 2, 3], "xy", allowed=lambda letter, number, _: letter != "c" or number == 1)
    assert {(letter, number) for letter, number, _ in cases} == {*product("ab", [1, 2, 3]), ("c", 1)}
    assert {("c", "x"), ("c", "y")} <= {(letter, end) for letter, _, end in cases}


def test_two_factors_are_their_product() -> None:
    assert sorted(pairwise([1, 2], "abc")) == sorted(product([1, 2], "abc"))
