# SPDX-License-Identifier: Apache-2.0
"""Random texts of many kinds: words, code, scripts, combining characters, control characters, markers and long runs."""

from __future__ import annotations

import random

WORDS = [
    "the",
    "quick",
    " fox",
    "def add(a, b):\n",
    "héllo",
    "你好",
    "привет",
    "<think> now",
    "</s>",
    "<|user|>",
    "<s>",
]
RANGES = [(0x20, 0x7E), (0x00, 0x1F), (0xA0, 0x24F), (0x300, 0x36F), (0x4E00, 0x4FFF), (0xFDD0, 0xFDEF)]
RANGES += [(0x1F300, 0x1F6FF), (0xE000, 0xE0FF), (0x1FFFE, 0x1FFFF), (0x200B, 0x206F), (0x1D100, 0x1D1FF)]


def random_text(rng: random.Random) -> str:
    """Return a valid text of up to a few thousand characters."""
    pieces = []
    for _ in range(rng.choice([0, 1, 3, 30, 300])):
        kind = rng.randrange(5)
        if kind == 0:
            low, high = rng.choice(RANGES)
            pieces.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randrange(8))))
        elif kind == 1:
            pieces.append(rng.choice(" \n\t\u2581a\u0301") * rng.randrange(1, 20))
        else:
            pieces.append(rng.choice(WORDS) + rng.choice(["", " ", "  ", ", ", "\r\n"]))
    return "".join(pieces)
