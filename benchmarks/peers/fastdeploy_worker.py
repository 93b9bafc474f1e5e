# SPDX-License-Identifier: Apache-2.0
"""This repository's engine as a worker: fastdeploy_worker.py CHECKPOINT QUANTIZATION."""

from __future__ import annotations

import itertools
import sys

from protocol import clock, serve

from fastdeploy import ops
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine


def main(checkpoint: str, quantization: str) -> None:
    """Load the engine and serve."""
    config = EngineConfig(
        model=checkpoint,
        quantization=QuantizationConfig.from_value(quantization),
        max_model_len=2304,
        cache=CacheConfig(num_blocks=128, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    engine = Engine.from_config(config)
    ids = itertools.count()

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        begin, waiting = clock(), set()
        for prompt in prompts:
            waiting.add(request_id := f"peer-{next(ids)}")
            engine.add_request(GenerationRequest(request_id, prompt, params))
        first_s = 0.0
        while engine.has_unfinished():
            waiting -= {delta.request_id for delta in engine.step()}
            first_s = first_s or (0.0 if waiting else clock() - begin)
        return first_s, clock() - begin

    serve(f"FastDeploy {quantization}, {ops.isa()}", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
