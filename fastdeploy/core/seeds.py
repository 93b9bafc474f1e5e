# SPDX-License-Identifier: Apache-2.0
"""Seeds of requests and of their choices. Answers name them, and a client can send each of them back."""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
NUM_DRAWN_BITS = 53  # a double, which is all that JavaScript reads a number of JSON as, holds such seeds exactly


def splitmix64(state: int) -> int:
    """Return the splitmix64 output for `state` (Steele, Lea, Flood 2014); integers modulo 2**64."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index` of a request: choice 0 has that of the request."""
    return seed & _MASK if index == 0 else _shorten(splitmix64((seed + index) & _MASK))


def request_seed(server_seed: int | None, arrival: int) -> int:
    """Return the seed of request number `arrival`, which has none: derived from the server's seed, or random."""
    if server_seed is None:
        return secrets.randbits(NUM_DRAWN_BITS)
    return _shorten(splitmix64((splitmix64(server_seed) + arrival) & _MASK))


def _shorten(seed: int) -> int:
    return seed >> (64 - NUM_DRAWN_BITS)
