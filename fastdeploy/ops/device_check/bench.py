# SPDX-License-Identifier: Apache-2.0
"""Times of operators on a device, beside the copies and products that were measured in the same run.

The calls of a case are captured, if the device captures that many rows, so that the host does not limit small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import paddle

from fastdeploy.ops.attention import allocate_kv_cache, append_attention, make_attention_metadata
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.linear import linear, pack_linear
from fastdeploy.ops.quantized_form import NO_QUANTIZATION
from fastdeploy.ops.registry import selected_backend
from fastdeploy.ops.rotary import HeadLayout
from fastdeploy.ops.sampling import SamplingBatch, sample

NUM_CALLS = 20  # in a row, between two waits
NUM_RUNS = 3
CACHE_BYTES = 128 << 20  # weights of more bytes than these in all are read in turn, so that no cache holds them


@dataclass(frozen=True)
class Case:
    """A call with what it must read, in bytes, and compute, in operations.

    Attributes:
        call: with the number of the call; calls of different numbers may read different inputs.
        num_rows, num_seqs: of one call.
    """

    name: str
    call: Callable[[int], None]
    num_rows: int
    num_seqs: int
    num_bytes: float
    num_ops: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs."""

    hidden: int
    prompt_rows: int
    seqs: int
    positions: int
    vocab: int


REAL = Sizes(hidden=4096, prompt_rows=2048, seqs=32, positions=8192, vocab=151936)
EMULATED = Sizes(hidden=128, prompt_rows=32, seqs=2, positions=96, vocab=512)


def measure() -> dict[str, Any]:
    """Return the peaks and, for each case, its microseconds and the share of the peak that limits it."""
    backend = selected_backend()
    copied, products = backend.measure_peaks()
    times: dict[str, Any] = {"copy_bytes_per_s": copied, "product_ops_per_s": products, "cases": {}}
    for case in _cases(EMULATED if backend.is_emulated else REAL):
        seconds = _seconds(case)
        least = max(case.num_bytes / copied, case.num_ops / products)
        times["cases"][case.name] = {"us": seconds * 1e6, "share_of_peak": least / seconds}
    return times


def format_times(times: Mapping[str, Any]) -> str:
    """Return a table; on an emulated device it says that its times mean nothing."""
    copied, products = times["copy_bytes_per_s"] / 1e9, times["product_ops_per_s"] / 1e12
    lines = [f"copies {copied:.1f} GB/s, bfloat16 products {products:.3f} TFLOP/s"]
    if selected_backend().is_emulated:
        lines.append("the device is emulated: its times say nothing about a GPU")
    lines.append(f"{'case':36}{'us':>12}{'of the peak':>14}")
    for name, case in times["cases"].items():
        lines.append(f"{name:36}{case['us']:>12.1f}{case['share_of_peak']:>14.3f}")
    return "\n".join(lines)


def _seconds(case: Case) -> float:
    """Return the seconds of a call, in the fastest of some runs of many."""
    backend = selected_backend()

    def call_all(num_rows: int, num_seqs: int) -> None:
        for index in range(NUM_CALLS):
            case.call(index)

    calls, best = backend.capture(call_all, case.num_rows, case.num_seqs), float("inf")
    for _ in range(1 + NUM_RUNS):
        backend.synchronize()
        begin = backend.clock()
        calls.replay(case.num_rows, case.num_seqs)
        backend.synchronize()
        best = min(best, (backend.clock() - begin) / NUM_CALLS)
    return best


def _cases(sizes: Sizes) -> Iterator[Case]:
    for quantization in (NO_QUANTIZATION, "w8a8", "w4a8", "wint4"):
        for rows in (1, 16, sizes.prompt_rows):
            yield _linear_case(sizes.hidden, quantization, rows)
    for rows in (1, 4):
        yield _attention_case(sizes.seqs, rows, sizes.positions)
    yield _attention_case(1, sizes.prompt_rows, sizes.prompt_rows)
    for temperature in (0.0, 1.0):
        yield _sampling_case(sizes, temperature)


def _linear_case(size: int, quantization: str, rows: int) -> Case:
    weight = random_rows(size, size, "bfloat16", 1, size**-0.5).cpu()
    copies = [pack_linear(weight, None, quantization)]
    weight_bytes = copies[0].num_bytes  # with scales
    num_copies = min(NUM_CALLS, 1 + CACHE_BYTES // weight_bytes)
    copies += [pack_linear(weight, None, quantization) for _ in range(num_copies - 1)]
    x, out = random_rows(rows, size, "bfloat16", 2), paddle.zeros([rows, size], "bfloat16")
    name = f"linear {quantization} {size} x {size}, {rows} rows"
    layers = list(islice(cycle(copies), NUM_CALLS))

    def call(index: int) -> None:
        linear(x, layers[index], out, rows)

    return Case(name, call, rows, rows, weight_bytes + 4 * rows * size, 2 * rows * size**2)


def _attention_case(seqs: int, rows: int, positions: int) -> Case:
    """Return a case of sequences of `positions` tokens each, the last `rows` of which are new."""
    heads, block_size = HeadLayout(32, 4, 128), 64
    num_blocks = -(-positions // block_size)
    cache = allocate_kv_cache(seqs * num_blocks, block_size, heads.num_kv_heads, heads.head_dim, "bfloat16")
    tables = np.arange(seqs * num_blocks).reshape(seqs, num_blocks)
    batch = make_attention_metadata([rows] * seqs, [positions] * seqs, tables, block_size)
    qkv = random_rows(rows * seqs, heads.row_size, "bfloat16", 3)
    out = paddle.zeros([rows * seqs, heads.num_heads * heads.head_dim], "bfloat16")
    num_visible = seqs * (rows * positions - rows * (rows - 1) / 2)  # positions of all new rows

    def call(index: int) -> None:
        if index == 0:
            batch.backend_state.clear()  # each run plans its work once, as a step does
        append_attention(qkv, cache, batch, out, heads, heads.head_dim**-0.5)

    name = f"attention {seqs} x {rows} rows, {positions} positions"
    num_bytes = 4 * seqs * positions * heads.num_kv_heads * heads.head_dim
    return Case(name, call, rows * seqs, seqs, num_bytes, 4 * num_visible * heads.num_heads * heads.head_dim)


def _sampling_case(sizes: Sizes, temperature: float) -> Case:
    rows = sizes.seqs * 6
    logits, batch = random_rows(rows, sizes.vocab, "float32", 4, 3.0), SamplingBatch(rows)
    batch.float_params.array[:, 0] = temperature
    batch.upload(rows)
    name = f"sample {rows} x {sizes.vocab}, temperature {temperature:g}"

    def call(index: int) -> None:
        sample(logits, batch, rows)

    return Case(name, call, rows, rows, 4 * rows * sizes.vocab)
