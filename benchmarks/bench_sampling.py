# SPDX-License-Identifier: Apache-2.0
"""Sampling over a large vocabulary: time per row against reading the row's logits once.

    FD_NUM_THREADS=1 python -m benchmarks.bench_sampling [--vocab 151936] [--rows 16] [--rounds 9]

Each rule runs on rows whose probability lies on few ids (peaked) and on many (flat). `passes` is the median over
rounds of a row's time over that of reading its logits, measured just before on the same thread.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np
import paddle

from benchmarks.report import print_json, print_table
from fastdeploy.ops.backends.cpu import library
from fastdeploy.ops.backends.cpu.library import isa, num_threads
from fastdeploy.ops.buffer import HostBuffer
from fastdeploy.ops.registry import select_backend
from fastdeploy.ops.sampling import FloatColumn, IntColumn, LogprobBuffers, SamplingBatch, logprobs, sample

CHUNK = 1 << 18  # bytes: fd_read_memory takes multiples of it
DEVIATIONS = {"peaked": 3.0, "flat": 0.5}  # of normally distributed logits
Rule = list[tuple[FloatColumn | IntColumn, float]]
RULES: dict[str, Rule] = {
    "greedy": [(FloatColumn.TEMPERATURE, 0.0)],
    "temperature": [(FloatColumn.TEMPERATURE, 0.8)],
    "top_k=50": [(IntColumn.TOP_K, 50)],
    "top_p=0.9": [(FloatColumn.TOP_P, 0.9)],
    "top_k=50, top_p=0.9": [(IntColumn.TOP_K, 50), (FloatColumn.TOP_P, 0.9)],
    "min_p=0.05": [(FloatColumn.MIN_P, 0.05)],
    "penalties": [(FloatColumn.REPETITION, 1.1), (FloatColumn.FREQUENCY, 0.2)],
}


def batch_of(rule: Rule, num_rows: int, vocab: int) -> SamplingBatch:
    """Return a batch of rows with the same rule, each with 2,048 tokens behind it."""
    batch = SamplingBatch(num_rows)
    tokens = np.random.default_rng(1).integers(0, vocab, 2048).astype(np.int32)
    batch.float_params.array[:, [FloatColumn.TEMPERATURE, FloatColumn.TOP_P, FloatColumn.REPETITION]] = 1.0
    batch.int_params.array[:, IntColumn.VOCAB_LIMIT] = vocab
    batch.int_params.array[:, [IntColumn.DRAFT_ID, IntColumn.MASK_BEGIN]] = -1
    for row in range(num_rows):
        begin = batch.append_history(tokens)
        columns = [IntColumn.HISTORY_BEGIN, IntColumn.OUTPUT_BEGIN, IntColumn.HISTORY_END]
        batch.int_params.array[row, columns] = [begin, begin, begin + len(tokens)]
        batch.int_params.array[row, [IntColumn.SEED, IntColumn.POSITION]] = [row, 100]
    for column, value in rule:
        params = batch.float_params if isinstance(column, FloatColumn) else batch.int_params
        params.array[:, column] = value
    return batch


def calls(num_rows: int, vocab: int) -> dict[tuple[str, str], tuple[HostBuffer, Callable[[], None]]]:
    """Return (rule, kind of row) -> the logits and a call over all of their rows."""
    found: dict[tuple[str, str], tuple[HostBuffer, Callable[[], None]]] = {}
    rows = paddle.arange(num_rows, dtype="int32").cpu()
    out = LogprobBuffers(num_rows)
    for kind, deviation in DEVIATIONS.items():
        logits = HostBuffer((num_rows, vocab), np.float32)
        logits.array[:] = np.random.default_rng(0).standard_normal((num_rows, vocab), np.float32) * deviation
        for name, rule in RULES.items():
            batch = batch_of(rule, num_rows, vocab)
            found[name, kind] = logits, lambda x=logits, b=batch: sample(x.tensor, b, num_rows)  # type: ignore[misc]
        for top_n in (0, 20):
            call = lambda x=logits, n=top_n: logprobs(x.tensor, rows, rows, num_rows, n, out)  # type: ignore[misc]  # noqa: E731
            found[f"logprobs={top_n}", kind] = logits, call
    return found


def measure(logits: HostBuffer, call: Callable[[], None]) -> tuple[float, float]:
    """Return seconds of reading the logits and of the call, on this thread."""
    num_bytes = logits.array.nbytes // CHUNK * CHUNK
    address, size = ctypes.c_void_p(logits.tensor.data_ptr()), ctypes.c_int64(num_bytes)
    start = time.thread_time()
    library.load_library().fd_read_memory(address, size)
    read = time.thread_time()
    call()
    return (read - start) * logits.array.nbytes / num_bytes, time.thread_time() - read


def main() -> None:
    """Print one row per rule and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rows", type=int, default=16, help="rows of a call")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    paddle.set_device("cpu")
    select_backend("cpu")
    if num_threads() != 1:
        parser.error(f"the thread's own clock needs FD_NUM_THREADS=1, got {num_threads()} threads")
    cases = calls(args.rows, args.vocab)
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for case, (logits, call) in cases.items():
            samples[case].append(measure(logits, call))
    rows = []
    for case, pairs in samples.items():
        seconds = statistics.median(called for _, called in pairs) / args.rows
        rows.append([*case, seconds * 1e6, statistics.median(called / read for read, called in pairs)])
    names = ("rule", "rows", "us_per_row", "passes")
    print_table(f"{args.rows} rows of {args.vocab} ids, one thread, {isa()}", names, rows)
    cases_json = [dict(zip(names, row, strict=True)) for row in rows]
    print_json({"benchmark": "sampling", "vocab": args.vocab, "cases": cases_json})


if __name__ == "__main__":
    main()
