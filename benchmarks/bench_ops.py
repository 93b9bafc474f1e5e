# SPDX-License-Identifier: Apache-2.0
"""Linear layers and attention against what this machine can do, measured in the same run.

    python -m benchmarks.bench_ops [--rounds 9] [--seconds 20] [--only wint8] [--kv-cache-dtype bfloat16 int8]

Before each timed call the read bandwidth and the peaks in bf16 and int8 are measured, so that a neighbour who takes
bandwidth away takes it from all. `share` is floor / time, where floor = max(bytes / bandwidth, operations / peak of the
arithmetic that the case uses); medians of rounds. `rows` is a case's time over that of one row of the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle

from benchmarks.report import print_json, print_table
from benchmarks.roofline import Roofline, add_clock_flag, integer_products, make_roofline
from fastdeploy.ops.attention import allocate_kv_cache, append_attention, make_attention_metadata
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.backends.cpu.library import num_threads
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import NO_QUANTIZATION, QUANTIZATIONS, PackedLinear, linear, pack_linear
from fastdeploy.ops.norm import rms_norm
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.rotary import HeadLayout, RotaryParams


@dataclass
class Case:
    """One timed call, the least bytes and operations that it needs, and what was measured."""

    name: str
    call: Callable[[], None]
    num_bytes: float
    num_operations: float
    products: int = 0  # of integers, per product that is computed; 0: in bf16
    one_row: str = ""  # the case of the same weights with one row
    keeps_alive: tuple[object, ...] = ()  # what a graph refers to
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)


def linear_cases(rows: tuple[int, ...], source: paddle.Tensor, copies: int, quantization: str) -> list[Case]:
    """Time each number of rows through `copies` of a weight, together too large for a cache when copies > 1.

    The calls are captured and replayed, as those of a model's step are.
    """
    weights = [pack_linear(source, None, quantization) for _ in range(copies)]
    return [linear_case(weights, count) for count in rows]


def head_cases() -> list[Case]:
    """Time the head of a vocabulary of 151,936, which writes logits, in every format."""
    source = random_rows(151_936, 1024, "bfloat16", 6, 1024**-0.5)
    heads = [[pack_linear(source, None, quantization)] for quantization in (NO_QUANTIZATION, *QUANTIZATIONS)]
    return [linear_case(head, rows, "float32") for head in heads for rows in (1, 8, 16)]


def linear_case(weights: list[PackedLinear], rows: int, out_dtype: str = "bfloat16") -> Case:
    first, copies = weights[0], len(weights)
    n, k = first.out_features, first.in_features
    x, out = random_rows(rows, k, "bfloat16", 99), paddle.zeros([rows, n], out_dtype)

    def through_all() -> None:
        for weight in weights:
            linear(x, weight, out, rows)

    graph = OpGraph(through_all)
    kind = "bf16" if first.quantization == NO_QUANTIZATION else first.quantization
    name = f"{kind} {copies} of [{n}, {k}]"
    return Case(
        f"{name} x {rows}",
        lambda: graph.replay(rows, 0),
        float(copies * first.num_bytes),
        2.0 * copies * rows * n * k,
        products=integer_products(first.quantization),
        one_row=f"{name} x 1",
        keeps_alive=(*weights, x),
    )


def attention_case(
    cache_dtype: str, num_seqs: int, rows: int, kv_len: int, heads: HeadLayout, shared: int = 0, layers: int = 1
) -> Case:
    """Time `rows` new rows of each of `num_seqs` sequences over kv_len positions, the first `shared` of them common.

    Short contexts go through many layers, as in a step: one would stay in a cache. Rows are normalised and rotated.
    """
    per_sequence, common = -(-kv_len // 64), shared // 64
    caches = [
        allocate_kv_cache(num_seqs * per_sequence, 64, heads.num_kv_heads, heads.head_dim, cache_dtype)
        for _ in range(layers)
    ]
    cache = caches[0]
    for tensor in (tensor for each in caches for tensor in (each.key, each.value)):
        tensor.fill_(60 if cache.is_int8 else 0.01)  # four bytes of 60 are a scale of 0.011
    tables = np.arange(num_seqs * per_sequence).reshape(num_seqs, per_sequence)
    tables[:, :common] = tables[0, :common]
    batch = make_attention_metadata([rows] * num_seqs, [kv_len] * num_seqs, tables, 64)
    qkv = random_rows(batch.num_rows, heads.row_size, "bfloat16", 1)
    out = paddle.zeros([batch.num_rows, heads.num_heads * heads.head_dim], "bfloat16")
    seen = num_seqs * rows * (kv_len - (rows - 1) / 2)
    held = shared + num_seqs * (kv_len - shared)
    cache_dtype = "int8" if cache.is_int8 else "bfloat16"
    token_bytes = selected_backend().kv_bytes_per_token(heads.num_kv_heads, heads.head_dim, cache_dtype)
    rotary = turning(kv_len, heads.head_dim)

    def through_all() -> None:
        for each in caches:
            append_attention(qkv, each, batch, out, heads, heads.head_dim**-0.5, rotary=rotary)

    graph = OpGraph(through_all)
    name = f"attention {cache_dtype} {num_seqs} x {rows} rows, {kv_len} positions"
    return Case(
        name + f", {shared} shared" * bool(shared) + f", {layers} layers" * (layers > 1),
        lambda: graph.replay(batch.num_rows, num_seqs),
        float(layers * held * token_bytes),
        4.0 * layers * seen * heads.num_heads * heads.head_dim,
        keeps_alive=(*caches, qkv, batch, rotary),
    )


def turning(num_positions: int, head_dim: int) -> RotaryParams:
    """Return a rotation and norms that may be repeated in place: rows keep their size."""
    angles = np.outer(np.arange(num_positions), 1e4 ** -np.linspace(0, 1, head_dim // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    weight = paddle.ones([head_dim], "bfloat16")
    return RotaryParams(paddle.to_tensor(table, place=paddle.CPUPlace()), False, weight, weight)


def call_overhead_us(clock: Callable[[], float]) -> float:
    """Return the least time of a call that has no rows to work on: Python, Paddle and the checks."""
    x, weight = paddle.zeros([1, 16], "bfloat16"), paddle.zeros([16], "bfloat16")
    best = float("inf")
    for _ in range(20):
        start = clock()
        for _ in range(500):
            rms_norm(x, weight, x, 0, 1e-6)
        best = min(best, (clock() - start) / 500)
    return best * 1e6


def attention_cases(cache_dtype: str) -> list[Case]:
    case = partial(attention_case, cache_dtype, heads=HeadLayout(16, 8, 128))
    return [
        *(case(num_seqs, 1, 128, layers=28) for num_seqs in (1, 8, 16)),
        *(case(1, rows, 128, layers=28) for rows in (8, 9, 16)),
        *(case(8, 1, kv_len) for kv_len in (2048, 8192)),
        *(case(8, rows, 2048) for rows in (6, 17)),
        *(case(1, rows, rows) for rows in (512, 2048)),
        *(case(16, 1, 2304, shared=shared) for shared in (0, 2048)),
    ]


def cases(cache_dtypes: list[str]) -> list[Case]:
    layer = random_rows(3072, 1024, "bfloat16", 5, 1024**-0.5)
    return [
        *(
            case
            for quantization in (NO_QUANTIZATION, *QUANTIZATIONS)
            for rows, copies in (((1, 2, 4, 8, 16), 32), ((128, 512), 1))
            for case in linear_cases(rows, layer, copies, quantization)
        ),
        *head_cases(),
        *(case for cache_dtype in cache_dtypes for case in attention_cases(cache_dtype)),
    ]


def measure(all_cases: list[Case], roofline: Roofline, rounds: int, seconds: float) -> None:
    """Run rounds until either limit is reached, at least three."""
    end = time.perf_counter() + seconds
    for done in range(rounds):
        if done >= 3 and time.perf_counter() > end:
            break
        for case in all_cases:
            reading = roofline.measure()
            start = roofline.clock()
            case.call()
            case.seconds.append(roofline.clock() - start)
            at_int8 = case.products * case.num_operations
            operations = (0.0, at_int8) if case.products else (case.num_operations, 0.0)
            case.shares.append(reading.floor_s(case.num_bytes, *operations) / case.seconds[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of every case (default: 9)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no round after so many (default: 60)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this (default: all)")
    parser.add_argument(
        "--kv-cache-dtype",
        nargs="+",
        choices=("bfloat16", "int8"),
        default=["bfloat16"],
        help="caches that attention reads (default: bfloat16)",
    )
    add_clock_flag(parser)
    args = parser.parse_args()
    paddle.set_device("cpu")
    roofline = make_roofline(parser, args)
    all_cases = [case for case in cases(args.kv_cache_dtype) if args.only in case.name]
    measure(all_cases, roofline, args.rounds, args.seconds)
    one_row = {case.name: statistics.median(case.seconds) for case in all_cases}
    rows: list[list[Any]] = []
    for case in all_cases:
        median = statistics.median(case.seconds)
        rates = case.num_bytes / median / 1e9, case.num_operations / median / 1e9
        ratio = median / one_row[case.one_row] if case.one_row in one_row else "-"
        rows.append([case.name, median * 1e3, *rates, statistics.median(case.shares), ratio])
    overhead = call_overhead_us(roofline.clock)
    print_table(
        f"{num_threads()} threads, {roofline.median}, {overhead:.1f} us per empty call",
        ["case", "ms", "GB/s", "GOP/s", "share", "rows"],
        rows,
    )
    names = ("case", "ms", "gb_per_s", "gop_per_s", "share", "times_one_row")
    print_json(
        {
            "benchmark": "ops",
            "threads": num_threads(),
            "clock": args.clock,
            **roofline.describe(),
            "call_overhead_us": overhead,
            "cases": [dict(zip(names, row, strict=True)) for row in rows],
        }
    )


if __name__ == "__main__":
    main()
