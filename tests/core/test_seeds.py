# SPDX-License-Identifier: Apache-2.0
"""Seeds of choices and of requests without one."""

from __future__ import annotations

from fastdeploy.core.seeds import choice_seed, request_seed, splitmix64


def test_splitmix64_matches_published_values() -> None:
    # first outputs of the reference generator started at 1234567: state advances by the golden gamma each call
    gamma = 0x9E3779B97F4A7C15
    outputs = [splitmix64((1234567 + i * gamma) % 2**64) for i in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_choice_zero_keeps_the_seed_and_others_differ() -> None:
    seeds = [choice_seed(5, i) for i in range(100)]
    assert seeds[0] == 5
    assert len(set(seeds)) == 100
    assert seeds[3] == splitmix64(8) >> 11
    assert choice_seed(2**64 - 1, 0) == 2**64 - 1


def test_missing_seed_depends_on_server_seed_and_arrival() -> None:
    assert request_seed(1, 0) == request_seed(1, 0) != request_seed(1, 1)
    assert request_seed(None, 0) != request_seed(None, 0)


def test_seeds_that_the_server_draws_are_numbers_that_javascript_reads_exactly() -> None:
    drawn = [request_seed(server_seed, i) for server_seed in (None, 1, 2**64 - 1) for i in range(200)]
    drawn += [choice_seed(seed, i) for seed in (7, 2**63) for i in range(1, 100)]
    assert all(0 <= seed == int(float(seed)) < 2**53 for seed in drawn)
    assert max(drawn) > 2**52 and len(set(drawn)) == len(drawn)
