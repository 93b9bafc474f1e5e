# SPDX-License-Identifier: Apache-2.0
"""How much memory does an engine process hold beside its weights and its KV cache?

    python -m benchmarks.bench_memory [--quantization wint8] [--layers N] [--requests 64] [--context 256]

The engine of one format prefills and decodes the requests together. `beside` is the resident
memory without weights and cache, `peak_beside` the same of the largest resident memory at any time, loading included.
The weights are random, so the peak does not contain a checkpoint's files.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import SHAPE, ShapeEngine, tokens
from fastdeploy.config.quantization import FORMATS

NEW_TOKENS = 4  # per request
GIB = 1 << 30


def resident_bytes(name: str) -> int:
    """Return VmRSS of this process, or VmHWM, its peak."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found.group(1)) * 1024


def measure(shape: str, quantization: str, num_requests: int, context: int, layers: int | None) -> Row:
    """Load an engine, run requests, and return the memory of this process in GiB."""
    loaded = ShapeEngine.load(
        shape, quantization, max_num_seqs=num_requests, max_model_len=context + NEW_TOKENS, layers=layers
    )
    for _ in range(num_requests):
        loaded.add(tokens(context), max_tokens=NEW_TOKENS)
    while loaded.engine.has_unfinished():
        loaded.engine.step()
    weights, cache = loaded.model.weights_bytes, int(loaded.engine.describe()["kv_cache"]["bytes"])
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
    """Print the memory in GiB and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of --shape")
    parser.add_argument("--quantization", choices=FORMATS, default="none", help="(default: none)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of each prompt")
    args = parser.parse_args()
    row = measure(args.shape, args.quantization, args.requests, args.context, args.layers)
    print_report("memory", args.shape, [row])


if __name__ == "__main__":
    main()
