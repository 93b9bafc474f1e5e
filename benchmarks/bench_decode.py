# SPDX-License-Identifier: Apache-2.0
"""Decoding of a model's shape with random weights: tokens per second, and the share of the read bandwidth they take.

    python -m benchmarks.bench_decode [--shape benchmarks/shapes/qwen3-0.6b] [--context 128 1024] [--quantization wint8]

Runs the engine itself, one request, plain decoding. The bandwidth is measured between groups of steps, since a shared
machine's changes from minute to minute; each share is formed with the readings around its own steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks.bench_ops import Roofline
from benchmarks.report import print_json, print_table
from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine

STEPS_PER_READING = 8


def measure(engine: Engine, config: ModelConfig, roofline: Roofline, context: int, groups: int) -> dict[str, Any]:
    """Decode after `context` tokens; return medians over groups of steps."""
    params = SamplingParams(temperature=0.0, max_tokens=groups * STEPS_PER_READING + 3, ignore_eos=True)
    engine.add_request(GenerationRequest(f"context-{context}", [i % 1000 for i in range(context)], params))
    while not engine.step():
        pass  # the prompt, in chunks
    step_ms, shares = [], []
    num_bytes = int(engine.describe()["streamed_weights_bytes"])
    for group in range(groups):
        roofline.measure()
        begin = time.perf_counter()
        for _ in range(STEPS_PER_READING):
            engine.step()
        seconds = (time.perf_counter() - begin) / STEPS_PER_READING
        roofline.measure()
        bandwidth = statistics.mean(roofline.bytes_per_s[-2:])
        cached = config.kv_bytes_per_token * (context + group * STEPS_PER_READING)
        step_ms.append(1000 * seconds)
        shares.append((num_bytes + cached) / seconds / bandwidth)
    while engine.has_unfinished():
        engine.step()
    return {
        "context": context,
        "tokens_per_s": 1000 / statistics.median(step_ms),
        "step_ms": statistics.median(step_ms),
        "bandwidth_gb_per_s": statistics.median(roofline.bytes_per_s) / 1e9,
        "share_of_bandwidth": statistics.median(shares),
        "share_min": min(shares),
        "share_max": max(shares),
    }


def main() -> None:
    """Print one row per context length and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="benchmarks/shapes/qwen3-0.6b", help="folder with a config.json")
    parser.add_argument("--quantization", default="none", help="as the flag of fastdeploy serve (default: none)")
    parser.add_argument("--context", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--groups", type=int, default=12, help=f"groups of {STEPS_PER_READING} steps")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.shape,
        load_choices="dummy",
        quantization=QuantizationConfig.from_value(args.quantization),
        max_model_len=max(args.context) + (args.groups + 1) * STEPS_PER_READING,
    )
    engine = Engine.from_config(config)
    model_config = ModelConfig.from_pretrained(args.shape)
    roofline = Roofline()
    rows = [measure(engine, model_config, roofline, context, args.groups) for context in args.context]
    print_table(
        f"{args.shape}, quantization {args.quantization}: decoding of one request",
        list(rows[0]),
        [list(row.values()) for row in rows],
    )
    print_json({"benchmark": "decode", "shape": args.shape, "quantization": args.quantization, "results": rows})


if __name__ == "__main__":
    main()
