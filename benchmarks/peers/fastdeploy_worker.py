# SPDX-License-Identifier: Apache-2.0
"""How fast is this repository's engine? A worker of compare.py: fastdeploy_worker.py MODEL QUANTIZATION.

MODEL is a checkpoint's folder or a GGUF file.
"""

from __future__ import annotations

import itertools
import sys

from protocol import Decoding, serve

from benchmarks.shape_engine import FixedDraft
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.hub.model_path import resolve_model_path
from fastdeploy.ops.backends.cpu.library import isa

MAX_DRAFTS = 3  # of jobs that verify drafts


def same_bits(checkpoint: str, quantization: str) -> QuantizationConfig:
    """Return a configuration with this format for all layers; the head has the one of dense models.

    For models with experts, a format of four bits alone would leave all other layers in eight.
    """
    formats = QuantizationConfig.from_value(quantization)
    if ModelConfig.from_pretrained(checkpoint).experts is None:
        return formats
    head = formats.for_model(has_experts=False).head
    return QuantizationConfig(attention=quantization, mlp=quantization, head=head, experts=quantization)


def main(model: str, quantization: str) -> None:
    """Load the engine and serve."""
    checkpoint = resolve_model_path(model)
    config = EngineConfig(
        model=checkpoint,
        quantization=same_bits(checkpoint, quantization),
        max_model_len=2304,
        cache=CacheConfig(num_blocks=128, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16),
        speculative=parse_speculative_config(
            {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS, "accept_policy": "reject_all"}
        ),
    )
    proposer = FixedDraft()
    engine = make_engine(config, proposer=proposer)
    ids = itertools.count()

    def run(prompts: list[list[int]], new_tokens: int, rows: int, decoding: Decoding) -> None:
        proposer.length = rows - 1
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens + rows - 1, ignore_eos=True)
        requests = [GenerationRequest(f"peer-{next(ids)}", prompt, params) for prompt in prompts]
        for request in requests:
            engine.add_request(request)
        waiting = {request.request_id for request in requests}
        while waiting:
            waiting -= {delta.request_id for delta in engine.step()}
        decoding.begin()
        for _ in range(new_tokens - 1):
            if decoding.is_over:
                break
            engine.step()
            decoding.step()
        for request in requests:
            engine.abort(request.request_id)

    serve(f"FastDeploy {quantization}, {isa()}", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
