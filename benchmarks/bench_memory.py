# SPDX-License-Identifier: Apache-2.0
"""How much memory does an engine process hold beside its weights and its KV cache?

    python -m benchmarks.bench_memory [--quantization none wint8] [--requests 64] [--context 256]

Each format runs in a process of its own, which prefills and decodes the requests together. `beside` is the resident
memory without weights and cache, `peak_beside` the same of the largest resident memory at any time, loading included.
The weights are random, so the peak does not contain a checkpoint's files.
"""

from __future__ import annotations

import multiprocessing
import re
from pathlib import Path

from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import TOKEN, ShapeEngine, add_shape_flags

NEW_TOKENS = 4  # per request
GIB = 1 << 30


def resident_bytes(name: str) -> int:
    """Return VmRSS of this process, or VmHWM, its peak."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found.group(1)) * 1024


def measure(shape: str, quantization: str, num_requests: int, context: int) -> Row:
    """Load an engine in this process, run requests, and return its memory in GiB."""
    loaded = ShapeEngine.load(shape, quantization, max_num_seqs=num_requests, max_model_len=context + NEW_TOKENS)
    for _ in range(num_requests):
        loaded.add([TOKEN] * context, max_tokens=NEW_TOKENS)
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
    parser = make_parser(__doc__)
    add_shape_flags(parser)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    args = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        jobs = [(args.shape, quantization, args.requests, args.context) for quantization in args.quantization]
        results = pool.starmap(measure, jobs, chunksize=1)
        pool.close()  # leaving the block without this terminates the process, which then prints a traceback
        pool.join()
    print_report("memory", args.shape, results, shape=args.shape)


if __name__ == "__main__":
    main()
