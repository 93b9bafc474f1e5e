# SPDX-License-Identifier: Apache-2.0
"""How much longer does a step take whose hidden states an EAGLE-3 head reads?

    python -m benchmarks.bench_taps [--shape benchmarks/shapes/qwen3-0.6b] [--quantization none wint8] [--rows 1 4 16]

Two engines share their weights and their cache; only one of them projects and stores the states of three layers. The
layers of both are run in turn, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.bench_speculation import SharedMemory
from benchmarks.report import Row, make_parser, print_json, print_table
from benchmarks.shape_engine import add_shape_flags, shape_of_layers
from benchmarks.shape_heads import write_shape_head
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.worker.model_runner import ModelRunner

CONTEXT, BLOCK = 512, 64


def make_runners(shape: str, quantization: str, max_seqs: int) -> tuple[ModelRunner, ModelRunner]:
    """Return the runners of an engine without and of one with taps."""
    memory, runners = SharedMemory(2), list[ModelRunner]()
    with TemporaryDirectory() as parent:
        write_shape_head("eagle3", ModelConfig.from_pretrained(shape), Path(parent, "head"))
        for speculation in ({"method": "naive"}, {"method": "eagle3", "model": f"{parent}/head", "adaptive": False}):
            config = EngineConfig(
                model=shape,
                load_choices="dummy",
                quantization=QuantizationConfig.from_value(quantization),
                max_model_len=2 * CONTEXT,
                cache=CacheConfig(block_size=BLOCK, num_blocks=2 * max_seqs * 2 * CONTEXT // BLOCK),
                scheduler=SchedulerConfig(max_num_seqs=max_seqs),
                speculative=parse_speculative_config(speculation),
            )
            runner = memory.build(config).runner
            assert isinstance(runner, ModelRunner)
            runners.append(runner)
    return runners[0], runners[1]


def seconds(runner: ModelRunner, num_seqs: int) -> float:
    """Run the layers for one row of each request at position CONTEXT and return how long it took."""
    per_seq = CONTEXT // BLOCK + 1
    tables = [list(range(i * per_seq, (i + 1) * per_seq)) for i in range(num_seqs)]
    runner.batch.write_inputs([1] * num_seqs, [CONTEXT] * num_seqs, [1] * num_seqs, tables)
    begin = time.perf_counter()
    runner._forward.run(num_seqs, num_seqs)
    return time.perf_counter() - begin


def measure(shape: str, quantization: str, rows: list[int], num_rounds: int) -> list[Row]:
    """Return a result for each number of rows."""
    runners, found = make_runners(shape, quantization, max(rows)), list[Row]()
    for count in rows:
        times = [[seconds(runner, count) for runner in runners] for _ in range(num_rounds)]
        plain_s, taps_s = (median(column) for column in zip(*times))
        ratio = taps_s / plain_s
        found.append({"quantization": quantization, "rows": count, "plain_ms": 1000 * plain_s, "with_taps": ratio})
    return found


def main() -> None:
    """Print one row per format and number of rows, and one JSON line."""
    parser = make_parser(__doc__)
    add_shape_flags(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=60)
    args: argparse.Namespace = parser.parse_args()
    results: list[Row] = []
    with shape_of_layers(args.shape, args.layers) as folder:
        for quantization in args.quantization:
            results += measure(folder, quantization, args.rows, args.rounds)
    print_table(f"layers of {args.shape} with the taps of an EAGLE-3 head", results)
    print_json({"benchmark": "taps", "options": vars(args), "results": results})


if __name__ == "__main__":
    main()
