# SPDX-License-Identifier: Apache-2.0
"""The quantized types of GGUF tensors as NumPy: what their blocks stand for, and random blocks."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastdeploy.core.ggml_types import GGML_TYPES

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
GRIDS = Path(__file__).parents[2] / "custom_ops" / "host" / "ggml_grids.h"
NON_LINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
HALVES = {  # where blocks have fp16 scales and minimums
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": [], "NVFP4": []},
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0], "TQ1_0": [52]},
    **{"TQ2_0": [64], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0], "IQ1_S": [0]},
    "IQ1_M": [],
}


@dataclass(frozen=True)
class Decoded:
    """Blocks [n]: a value is code * scale, or code * scale + minimum.

    Attributes:
        codes: [n, values] integers.
        scales: [n, groups] float32, products rounded once.
        minimums: as scales, or None.
    """

    codes: Array
    scales: Array
    minimums: Array | None = None

    def values(self) -> NDArray[np.float32]:
        """Return [n, values]."""
        values = self._repeat(self.scales) * self.codes.astype(np.float32)
        return values if self.minimums is None else values + self._repeat(self.minimums)

    def _repeat(self, of_groups: Array) -> Array:
        return np.repeat(of_groups, self.codes.shape[1] // of_groups.shape[1], axis=1)


def decode(name: str, data: Bytes) -> Decoded:
    """Decode blocks [n, bytes of a block]."""
    return DEFINITIONS[name](data)


def finite_rows(name: str, num_rows: int, num_blocks: int, seed: str = "") -> Bytes:
    """Return rows [num_rows, bytes] that depend only on the arguments, with finite scales and minimums of all sizes."""
    kind = GGML_TYPES[name]
    size = num_rows * num_blocks * kind.block_bytes
    data = np.frombuffer(bytearray(hashlib.shake_128(f"{name}{seed}".encode()).digest(size)), np.uint8)
    blocks = data.reshape(-1, kind.block_bytes)
    for at in HALVES[name]:
        blocks[:, at + 1] &= 0xBF  # below 2
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    if name == "MXFP4":
        blocks[:, 0] = 110 + blocks[:, 0] % 24
    return data.reshape(num_rows, -1)


def half(data: Bytes, at: int) -> Array:
    """Return fp16 numbers as float32 [n, 1]."""
    return words(data, at, at + 2, "<f2").astype(np.float32)


def words(data: Bytes, begin: int, end: int, dtype: str) -> Array:
    return np.ascontiguousarray(data[:, begin:end]).view(dtype)


def fields(numbers: Array, bits: int, shifts: list[int]) -> Array:
    """Return [n, shifts, numbers]: the bits of each number from each shift on."""
    return (numbers.astype(np.int64)[:, None, :] >> np.array(shifts)[None, :, None]) & (2**bits - 1)


def planes(data: Bytes, width: int, bits: int) -> Array:
    """Return [n, values] integers of which each `width` bytes hold the lowest bits of the first ones, then the next."""
    parts = [
        fields(data[:, at : at + width], bits, list(range(0, 8, bits))).reshape(len(data), -1)
        for at in range(0, data.shape[1], width)
    ]
    return np.concatenate(parts, axis=1)


def in_order(numbers: Array, bits: int, shifts: list[int]) -> Array:
    """Return [n, numbers * shifts] integers: those of one number after the other."""
    return fields(numbers, bits, shifts).transpose(0, 2, 1).reshape(len(numbers), -1)


def product(unit: Array, factors: Array) -> Array:
    return unit * factors.astype(np.float32)


def q5_codes(data: Bytes) -> Array:
    bits = in_order(words(data, data.shape[1] - 20, data.shape[1] - 16, "<u4"), 1, list(range(32)))
    return planes(data[:, -16:], 16, 4) + 16 * bits


def q2_k(data: Bytes) -> Decoded:
    scales = product(half(data, 80), data[:, :16] & 15)
    return Decoded(planes(data[:, 16:80], 32, 2), scales, -product(half(data, 82), data[:, :16] >> 4))


def q3_k(data: Bytes) -> Decoded:
    factors = planes(data[:, 96:104], 8, 4) + 16 * planes(data[:, 104:108], 4, 2)
    codes = planes(data[:, 32:96], 32, 2) - 4 * (1 - planes(data[:, :32], 32, 1))
    return Decoded(codes, product(half(data, 108), factors - 32))


def with_k_factors(data: Bytes, codes: Array) -> Decoded:
    low, middle, high = (data[:, at : at + 4].astype(np.int64) for at in (4, 8, 12))
    scales = np.concatenate([low & 63, (high & 15) + 16 * (low >> 6)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) + 16 * (middle >> 6)], axis=1)
    return Decoded(codes, product(half(data, 0), scales), -product(half(data, 2), minimums))


def q6_k(data: Bytes) -> Decoded:
    codes = planes(data[:, :128], 64, 4) + 16 * planes(data[:, 128:192], 32, 2) - 32
    return Decoded(codes, product(half(data, 208), data[:, 192:208].view(np.int8)))


def iq4_xs(data: Bytes) -> Decoded:
    high = in_order(words(data, 2, 4, "<u2"), 2, list(range(0, 16, 2)))
    factors = in_order(data[:, 4:8], 4, [0, 4]) + 16 * high - 32
    return Decoded(NON_LINEAR[planes(data[:, 8:], 16, 4)], product(half(data, 0), factors))


def tq1_0(data: Bytes) -> Decoded:
    def digits(begin: int, end: int, count: int) -> Array:
        fractions = data[:, None, begin:end].astype(np.int64) * 3 ** np.arange(count)[None, :, None] % 256
        return (fractions * 3 // 256 - 1).reshape(len(data), -1)

    codes = np.concatenate([digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)], axis=1)
    return Decoded(codes, half(data, 52))


def mxfp4(data: Bytes) -> Decoded:
    scales = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128)
    return Decoded(TWICE_E2M1[planes(data[:, 1:], 16, 4)], scales.astype(np.float32))


def nvfp4(data: Bytes) -> Decoded:
    exponents, mantissas = data[:, :4].astype(np.int32) >> 3 & 15, data[:, :4].astype(np.int32) & 7
    normal = np.ldexp(8 + mantissas, exponents - 10)
    scales = np.where(data[:, :4] == 0x7F, 0, np.where(exponents == 0, np.ldexp(mantissas, -9), normal))
    return Decoded(TWICE_E2M1[planes(data[:, 4:], 8, 4)], (scales / 2).astype(np.float32))


@functools.cache
def grid(name: str, row_values: int, *values: int) -> Array:
    """Return the rows of a grid of ggml_grids.h, which the digests of test_ggml_blocks.py cover."""
    found = re.search(rf"{name}Digits\[\] =([^;]*);", GRIDS.read_text())
    assert found
    digits, count, bits = re.sub(r'[\s"]', "", found[1]), *((4, 2) if row_values == 8 else (3, 3))
    rows = np.array([int(digits[at : at + count], 16) for at in range(0, len(digits), count)])
    return np.array(values)[rows[:, None] >> bits * np.arange(row_values) & (2**bits - 1)]


MAGNITUDES = (8, 25, 43, 0)


def signed(magnitudes: Array, signs: Array) -> Array:
    """Return codes [n, values], given rows of a grid [n, rows, row_values] and eight signs in each number [n, ...]."""
    codes = magnitudes.reshape(len(magnitudes), -1)
    return codes * (1 - 2 * in_order(signs, 1, list(range(8))))


def with_parity(seven: Array) -> Array:
    """Return eight signs of which the last one makes the number of negative ones even."""
    ones = sum(seven >> bit & 1 for bit in range(7))
    return seven + 128 * (ones % 2)


def iq2_xxs(data: Bytes) -> Decoded:
    packed = words(data, 2, 66, "<u4").reshape(len(data), 8, 2)[:, :, 1].astype(np.int64)
    indexes = data[:, 2:].reshape(len(data), 8, 8)[:, :, :4].reshape(len(data), 32)
    codes = signed(grid("kGrid2Xxs", 8, *MAGNITUDES)[indexes], with_parity(in_order(packed, 7, [0, 7, 14, 21])))
    return Decoded(codes, product(half(data, 0), (packed >> 28) + 0.5) / 4)


def iq2_xs(data: Bytes) -> Decoded:
    packed = words(data, 2, 66, "<u2").astype(np.int64)
    codes = signed(grid("kGrid2Xs", 8, *MAGNITUDES)[packed & 511], with_parity(packed >> 9))
    return Decoded(codes, product(half(data, 0), in_order(data[:, 66:], 4, [0, 4]) + 0.5) / 4)


def iq2_s(data: Bytes) -> Decoded:
    indexes = data[:, 2:34] + 256 * in_order(data[:, 66:74], 2, [0, 2, 4, 6])
    codes = signed(grid("kGrid2S", 8, *MAGNITUDES)[indexes], data[:, 34:66])
    return Decoded(codes, product(half(data, 0), in_order(data[:, 74:], 4, [0, 4]) + 0.5) / 4)


def iq3_xxs(data: Bytes) -> Decoded:
    packed = words(data, 66, 98, "<u4").astype(np.int64)
    rows = grid("kGrid3Xxs", 4, 4, 12, 20, 28, 36, 44, 52, 62)[data[:, 2:66]]
    codes = signed(rows, with_parity(in_order(packed, 7, [0, 7, 14, 21])))
    return Decoded(codes, product(half(data, 0), (packed >> 28) + 0.5) / 2)


def iq3_s(data: Bytes) -> Decoded:
    indexes = data[:, 2:66] + 256 * in_order(data[:, 66:74], 1, list(range(8)))
    codes = signed(grid("kGrid3S", 4, *range(1, 16, 2))[indexes], data[:, 74:106])
    return Decoded(codes, product(half(data, 0), 2 * in_order(data[:, 106:], 4, [0, 4]) + 1))


def ternaries(indexes: Array, are_below: Array) -> Array:
    """Return rows of the ternary grid, plus or minus an eighth, times 8."""
    rows = 8 * grid("kGrid1", 8, -1, 0, 1, 0)[indexes] + np.where(are_below, -1, 1)[:, :, None]
    return rows.reshape(len(rows), -1)


def iq1_s(data: Bytes) -> Decoded:
    packed = words(data, 34, 50, "<u2").astype(np.int64)
    indexes = data[:, 2:34] + 256 * in_order(packed, 3, [0, 3, 6, 9])
    scales = product(half(data, 0), 2 * (packed >> 12 & 7) + 1)
    return Decoded(ternaries(indexes, np.repeat(packed >> 15, 4, axis=1)), scales / 8)


def iq1_m(data: Bytes) -> Decoded:
    packed, last = in_order(data[:, 32:48], 4, [0, 4]), words(data, 48, 56, "<u2").astype(np.int64)
    bits = sum((last[:, [i]] >> 12) << 4 * i for i in range(4))
    unit = np.asarray(bits).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = ternaries(data[:, :32] + 256 * (packed & 7), packed >> 3)
    return Decoded(codes, product(unit, 2 * in_order(last, 3, [0, 3, 6, 9]) + 1) / 8)


DEFINITIONS: dict[str, Callable[[Bytes], Decoded]] = {
    "Q4_0": lambda data: Decoded(planes(data[:, 2:], 16, 4) - 8, half(data, 0)),
    "Q4_1": lambda data: Decoded(planes(data[:, 4:], 16, 4), half(data, 0), half(data, 2)),
    "Q5_0": lambda data: Decoded(q5_codes(data) - 16, half(data, 0)),
    "Q5_1": lambda data: Decoded(q5_codes(data), half(data, 0), half(data, 2)),
    "Q8_0": lambda data: Decoded(data[:, 2:].view(np.int8), half(data, 0)),
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": lambda data: with_k_factors(data, planes(data[:, 16:], 32, 4)),
    "Q5_K": lambda data: with_k_factors(data, planes(data[:, 48:], 32, 4) + 16 * planes(data[:, 16:48], 32, 1)),
    "Q6_K": q6_k,
    "IQ2_XXS": iq2_xxs,
    "IQ2_XS": iq2_xs,
    "IQ3_XXS": iq3_xxs,
    "IQ1_S": iq1_s,
    "IQ4_NL": lambda data: Decoded(NON_LINEAR[planes(data[:, 2:], 16, 4)], half(data, 0)),
    "IQ3_S": iq3_s,
    "IQ2_S": iq2_s,
    "IQ4_XS": iq4_xs,
    "IQ1_M": iq1_m,
    "TQ1_0": tq1_0,
    "TQ2_0": lambda data: Decoded(planes(data[:, :64], 32, 2) - 1, half(data, 64)),
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
}
