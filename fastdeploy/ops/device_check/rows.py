# SPDX-License-Identifier: Apache-2.0
"""Row r of a call of many rows has the bits of a call with that row alone, at row counts where kernels change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import paddle
from numpy.typing import NDArray

from fastdeploy.ops.attention import make_attention_metadata
from fastdeploy.ops.device_check.examples import wide
from fastdeploy.ops.device_check.findings import ROWS, Finding, one_line
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.norm import NormParams
from fastdeploy.ops.quantized_form import FORMS, NO_QUANTIZATION
from fastdeploy.ops.registry import Lookup
from fastdeploy.ops.rotary import HeadLayout

Call = Callable[[int, int], NDArray]  # (first row, number of rows) -> the results of these rows
SHORT_COUNTS = (1, 2, 8, 9, 16, 17, 33, 65)
COUNTS = (*range(1, 21), 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 513)
IN_FEATURES, OUT_FEATURES = 1280, 96  # one of the sums over inputs has two pieces
SHORT_POSITIONS = 262  # beyond the first split of attention
POSITIONS = 2056  # beyond the first group of splits
BLOCK_SIZE = 16


def find_difference(call: Call, counts: Sequence[int]) -> str:
    """Return the first number of rows for which a call gives other bits than single rows, or an empty text."""
    together = call(0, max(counts))
    singles = sorted({count - 1 for count in counts if count <= 33} | {max(counts) - 1})
    for row in singles:
        if not np.array_equal(call(row, 1)[0], together[row], equal_nan=True):
            return f"row {row} of {max(counts)} differs from that row alone"
    for count in counts:
        if not np.array_equal(call(0, count), together[:count], equal_nan=True):
            return f"{count} rows differ from the same rows among {max(counts)}"
    return ""


def check_rows(name: str, lookup: Lookup, is_short: bool) -> Iterator[Finding]:
    """Yield what was found for an operator, if its rows could influence each other."""
    if name not in _CASES:
        return
    counts, num_cases = SHORT_COUNTS if is_short else COUNTS, 0
    try:
        for what, find in _CASES[name](lookup, counts):
            num_cases += 1
            if error := find():
                yield Finding(name, ROWS, num_cases, f"{what}: {error}")
                return
    except Exception as error:  # of a kernel: it has failed, whatever it was
        yield Finding(name, ROWS, num_cases, one_line(error))
        return
    yield Finding(name, ROWS, num_cases)


Cases = Iterator[tuple[str, Callable[[], str]]]


def _linear_cases(lookup: Lookup, counts: Sequence[int]) -> Cases:
    for quantization in (NO_QUANTIZATION, *FORMS):
        for is_gated in (False, True):
            call = _linear_call(lookup, quantization, is_gated, max(counts))
            yield f"{quantization}{', gated' if is_gated else ''}", partial(find_difference, call, counts)


def _linear_call(lookup: Lookup, quantization: str, is_gated: bool, capacity: int) -> Call:
    outputs = OUT_FEATURES * (2 if is_gated else 1)
    weight = random_rows(outputs, IN_FEATURES, "bfloat16", 1, IN_FEATURES**-0.5)
    bias = random_rows(1, outputs, "bfloat16", 2).reshape([-1])
    packed = lookup("pack_linear")(weight, bias, quantization, is_gated)
    x, residual = random_rows(capacity, IN_FEATURES, "bfloat16", 3), random_rows(capacity, OUT_FEATURES, "bfloat16", 4)
    norm = NormParams(random_rows(1, IN_FEATURES, "bfloat16", 5).reshape([-1]), 1e-6) if is_gated else None

    def call(first: int, rows: int) -> NDArray:
        out, end = paddle.zeros([rows, OUT_FEATURES], "bfloat16"), first + rows
        lookup("linear")(x[first:end], packed, out, rows, residual[first:end], norm)
        return wide(out)

    return call


def _norm_cases(lookup: Lookup, counts: Sequence[int]) -> Cases:
    for size in (64, 1024, 4104):
        x, weight = random_rows(max(counts), size, "bfloat16", 1), random_rows(1, size, "bfloat16", 2).reshape([size])

        def call(first: int, rows: int, x=x, weight=weight, size=size) -> NDArray:  # type: ignore[no-untyped-def]
            out = paddle.zeros([rows, size], "bfloat16")
            lookup("rms_norm")(x[first : first + rows], weight, out, rows, 1e-6)
            return wide(out)

        yield f"{size} columns", partial(find_difference, call, counts)


def _attention_cases(lookup: Lookup, counts: Sequence[int]) -> Cases:
    positions = SHORT_POSITIONS if counts is SHORT_COUNTS else POSITIONS
    for dtype in ("bfloat16", "int8"):
        for heads in (HeadLayout(2, 1, 64), HeadLayout(4, 2, 128)):
            what = f"{dtype}, {heads.num_heads} heads of {heads.head_dim}"
            yield what, partial(_find_attention_difference, lookup, heads, dtype, positions)


def _find_attention_difference(lookup: Lookup, heads: HeadLayout, dtype: str, positions: int) -> str:
    """Compare all rows of two sequences in one call with calls of one row for the last ones of the first."""
    qkv, num_blocks = random_rows(positions + 20, heads.row_size, "bfloat16", 6), -(-positions // BLOCK_SIZE)
    tables = np.arange(1, 2 * num_blocks + 1).reshape(2, num_blocks)

    def run(cache: object, first: int, rows: int, with_other: bool = False) -> NDArray:
        new, ends = ([rows, 20], [first + rows, 20]) if with_other else ([rows], [first + rows])
        batch = make_attention_metadata(new, ends, tables[: len(new)], BLOCK_SIZE)
        taken = paddle.concat([qkv[first : first + rows], qkv[positions:]]) if with_other else qkv[first : first + rows]
        out = paddle.zeros([sum(new), heads.num_heads * heads.head_dim], "bfloat16")
        lookup("append_attention")(taken, cache, batch, out, heads, heads.head_dim**-0.5, 0, None)
        return wide(out)[:rows]

    together, alone = (
        lookup("allocate_kv_cache")(2 * num_blocks + 1, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim, dtype)
        for _ in range(2)
    )
    expected = run(together, 0, positions, with_other=True)
    num_single = 10  # from before the edge of a split, or of a group of splits, to behind it
    if not np.array_equal(run(alone, 0, positions - num_single), expected[:-num_single]):
        return "rows of a prompt differ from the same rows beside another sequence"
    for position in range(positions - num_single, positions):
        if not np.array_equal(run(alone, position, 1)[0], expected[position]):
            return f"position {position} differs from the same row in a prompt"
    return ""


_CASES: dict[str, Callable[[Lookup, Sequence[int]], Cases]] = {
    "linear": _linear_cases,
    "rms_norm": _norm_cases,
    "append_attention": _attention_cases,
}
