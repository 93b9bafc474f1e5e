# SPDX-License-Identifier: Apache-2.0
"""How fast is OpenVINO GenAI? A worker of compare.py: openvino_worker.py FOLDER, an export of optimum-cli."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import openvino
import openvino_genai
from protocol import NUM_THREADS, Decoding, serve

CACHE_GIB = 1


def main(folder: str) -> None:
    """Load the pipeline and serve."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = 16
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": NUM_THREADS}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    ids = itertools.count()

    def run(prompts: list[list[int]], new_tokens: int, rows: int, decoding: Decoding) -> None:
        assert rows == 1, "the pipeline computes one row per request and step"
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(next(ids), openvino.Tensor(np.array([prompt], np.int64)), config) for prompt in prompts
        ]
        waiting = list(handles)
        while waiting:
            pipeline.step()
            waiting = [handle for handle in waiting if not handle.can_read()]
        decoding.begin()
        while pipeline.has_non_finished_requests() and not decoding.is_over:
            pipeline.step()
            decoding.step()
        for handle in handles:
            handle.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()

    serve(f"OpenVINO GenAI {folder.rpartition('-')[2]}, {openvino_genai.__version__.partition('-')[0]}", run)


if __name__ == "__main__":
    main(*sys.argv[1:])
