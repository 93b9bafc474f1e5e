# SPDX-License-Identifier: Apache-2.0
"""Resident memory of an engine process against its weights and its cache.

    python -m benchmarks.bench_memory [--quantization none wint8] [--requests 64] [--context 256]

Each format is loaded in a process of its own, which reads prompts and decodes so many requests together, and then says
what it holds: `beside` is what is neither weights nor cache, `peak` the most that was resident at any time, loading
included. Random weights are drawn, so a real checkpoint's files are not in the peak.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
from pathlib import Path
from typing import Any

from benchmarks.report import print_json, print_table
from benchmarks.shape_engine import TOKEN, ShapeEngine, add_shape_flags

DECODED = 4  # tokens of every request
GIB = 1 << 30


def resident_bytes(name: str) -> int:
    """Return VmRSS, or VmHWM, its peak, of this process."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found.group(1)) * 1024


def measure(shape: str, quantization: str, num_requests: int, context: int) -> dict[str, Any]:
    """Load an engine in this process, run requests, and return its memory in GiB."""
    loaded = ShapeEngine.load(shape, quantization, max_num_seqs=num_requests, max_model_len=context + DECODED)
    for _ in range(num_requests):
        loaded.add([TOKEN] * context, max_tokens=DECODED)
    while loaded.engine.has_unfinished():
        loaded.engine.step()
    weights, cache = loaded.work.weights_bytes, int(loaded.engine.describe()["kv_cache"]["bytes"])
    resident, peak = resident_bytes("VmRSS"), resident_bytes("VmHWM")
    return {
        "format": quantization,
        "requests": num_requests,
        "weights_gib": weights / GIB,
        "cache_gib": cache / GIB,
        "resident_gib": resident / GIB,
        "beside_gib": (resident - weights - cache) / GIB,
        "peak_beside_gib": (peak - weights - cache) / GIB,
    }


def main() -> None:
    """Print one row per format and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_flags(parser)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of every prompt")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(args.shape, quantization, args.requests, args.context) for quantization in args.quantization]
        rows = pool.starmap(measure, jobs, chunksize=1)
        pool.close()  # leaving the block would terminate the process with a report of it
        pool.join()
    print_table(args.shape, list(rows[0]), [list(row.values()) for row in rows])
    print_json({"benchmark": "memory", "shape": args.shape, "results": rows})


if __name__ == "__main__":
    main()
