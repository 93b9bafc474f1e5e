# SPDX-License-Identifier: Apache-2.0
"""How fast is this repository's engine? A worker of compare.py: fastdeploy_worker.py CHECKPOINT QUANTIZATION."""

from __future__ import annotations

import itertools
import sys

from protocol import Decoding, serve

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ops.backends.cpu.library import isa


def same_bits(checkpoint: str, quantization: str) -> QuantizationConfig:
    """Return a configuration with this format for all layers; the head has the one of dense models.

    For models with experts, a format of four bits alone would leave all other layers in eight.
    """
    formats = QuantizationConfig.from_value(quantization)
    if ModelConfig.from_pretrained(checkpoint).experts is None:
        return formats
    head = formats.for_model(has_experts=False).head
    return QuantizationConfig(attention=quantization, mlp=quantization, head=head, experts=quantization)


def main(checkpoint: str, quantization: str) -> None:
    """Load the engine and serve."""
    config = EngineConfig(
        model=checkpoint,
        quantization=same_bits(checkpoint, quantization),
        max_model_len=2304,
        cache=CacheConfig(num_blocks=128, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    engine = Engine.from_config(config)
    ids = itertools.count()

    def run(prompts: list[list[int]], new_tokens: int, decoding: Decoding) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        requests = [GenerationRequest(f"peer-{next(ids)}", prompt, params) for prompt in prompts]
        for request in requests:
            engine.add_request(request)
        waiting = {request.request_id for request in requests}
        while waiting:
            waiting -= {delta.request_id for delta in engine.step()}
        decoding.begin()
        while engine.has_unfinished() and not decoding.is_over:
            engine.step()
            decoding.step()
        for request in requests:
            engine.abort(request.request_id)

    serve(f"FastDeploy {quantization}, {isa()}", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
