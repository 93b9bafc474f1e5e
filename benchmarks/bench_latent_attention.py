# SPDX-License-Identifier: Apache-2.0
"""How near to the limits of the machine is latent attention over a cold cache?

    python -m benchmarks.bench_latent_attention [--latent-dim 512 --rope-dim 64] [--heads 16 128]
        [--positions 1024 4096] [--rows 1 4 16] [--apart] [--rounds 9] [--dtype bfloat16]

Rows are the last ones of one sequence, as drafts are; with --apart each is the last one of a sequence of its own. The
baseline `floor` is max(bytes of the cached rows / read bandwidth, operations / peak), measured beside each call, after
which the caches hold none of the rows. `of_floor` is the median of the floor over the time of the call.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import paddle

from benchmarks.launches import Replay
from benchmarks.report import Row, make_parser, print_report
from benchmarks.roofline import Roofline, add_clock_flag, make_roofline
from fastdeploy.ops.attention import make_attention_metadata
from fastdeploy.ops.backends.cpu.graph import OpGraph
from fastdeploy.ops.examples import random_rows
from fastdeploy.ops.latent_attention import LatentLayout, allocate_latent_cache, append_latent_attention
from fastdeploy.ops.norm import NormParams

BLOCK_SIZE = 64
POOL_BLOCKS = 512  # at least, so that the cache lies in huge pages as that of a server does


def capture(layout: LatentLayout, num_rows: int, positions: int, is_apart: bool, dtype: str) -> tuple[Replay, object]:
    """Return a captured call for rows that end at these positions, over a cache of random rows, and its tensors."""
    num_seqs, new = (num_rows, 1) if is_apart else (1, num_rows)
    num_blocks, width = -(-positions // BLOCK_SIZE), layout.latent_dim + layout.rope_dim
    tables = np.random.default_rng(1).permutation(num_seqs * num_blocks).reshape(num_seqs, num_blocks)
    pool = max(POOL_BLOCKS, tables.size)
    cache = allocate_latent_cache(pool, BLOCK_SIZE, layout.latent_dim, layout.rope_dim, dtype)
    for block in range(tables.size):
        cache.rows[block] = random_rows(BLOCK_SIZE, width, dtype, block)
    batch = make_attention_metadata([new] * num_seqs, [positions] * num_seqs, tables, BLOCK_SIZE)
    absorbed = random_rows(num_rows, layout.num_heads * layout.latent_dim, dtype, 2)
    query = random_rows(num_rows, layout.num_heads * (layout.nope_dim + layout.rope_dim), dtype, 3)
    latent, out = random_rows(num_rows, width, dtype, 4), paddle.zeros_like(absorbed)
    norm = NormParams(paddle.ones([layout.latent_dim], dtype), 1e-6)
    cos_sin = random_rows(positions, layout.rope_dim, "float32", 5)

    arguments = absorbed, query, latent, cache, batch, out, layout, width**-0.5, norm, cos_sin, True
    return Replay(OpGraph(lambda: append_latent_attention(*arguments)), num_rows, num_seqs), arguments


def measure(replay: Replay, roofline: Roofline, num_rounds: int) -> dict[str, float]:
    """Return the medians of some calls, each beside a reading of the machine's limits."""
    (work,) = replay.count_work()
    rounds = []
    for _ in range(num_rounds):
        reading = roofline.measure()
        begin = roofline.clock()
        replay.graph.replay(replay.num_rows, replay.num_seqs)
        seconds = roofline.clock() - begin
        rounds.append((seconds, work.floor_s(reading), work.num_bytes / reading.bytes_per_s))
    return {
        "us": 1e6 * statistics.median(seconds for seconds, _, _ in rounds),
        "floor_us": 1e6 * statistics.median(floor for _, floor, _ in rounds),
        "bytes_%": 100 * statistics.median(of_bytes / floor for _, floor, of_bytes in rounds),
        "of_floor": statistics.median(floor / seconds for seconds, floor, _ in rounds),
    }


def parse() -> tuple[argparse.Namespace, Roofline]:
    """Return the flags, and what measures the machine."""
    parser = make_parser(__doc__)
    for name, size in (("latent-dim", 512), ("rope-dim", 64), ("nope-dim", 128)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--positions", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--apart", action="store_true", help="each row of a sequence of its own")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add_clock_flag(parser)
    args = parser.parse_args()
    return args, make_roofline(parser, args)


def main() -> None:
    """Print a table for all numbers of heads, positions and rows."""
    args, roofline = parse()
    rows: list[Row] = []
    for heads in args.heads:
        layout = LatentLayout(heads, args.latent_dim, args.nope_dim, args.rope_dim)
        for positions in args.positions:
            for num_rows in args.rows:
                replay, _tensors = capture(layout, num_rows, positions, args.apart, args.dtype)
                shape = {"heads": heads, "positions": positions, "rows": num_rows}
                rows.append({**shape, **measure(replay, roofline, args.rounds)})
    print_report("latent_attention", "Latent attention over the machine's limits", rows, roofline=roofline.describe())


if __name__ == "__main__":
    main()
