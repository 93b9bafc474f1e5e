# SPDX-License-Identifier: Apache-2.0
"""How long does the host take between two steps of a GPU: from the results of one to the first launch of the next?

    python -m benchmarks.bench_gpu_host [--shape demo] [--requests 1 256]

The device is the emulated GPU, whose launches and copies return at once and do nothing, so every sampled token is 0 and
no draft is accepted. Each number of requests is decoded without speculation and with three n-gram drafts per request.
Figures are medians over steps:

    host_us     from the return of the wait for a step's results to the first launch of the next step: reading results,
                scheduling, proposing, writing and uploading inputs (aims: 300 at one request, 5,000 at 256)
    launch_us   from this launch to the wait for its results: the calls that launch, upload and download
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from fastdeploy.ops.startup import prepare

if __name__ == "__main__":
    os.environ["FD_GPU_EMULATED"] = "1"
    prepare("gpu")  # before Paddle is imported

from benchmarks.report import Row, make_parser, print_report
from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine
from fastdeploy.ipc.messages import encode, split_deltas
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu.library import DeviceLibrary, active

SHAPE = "demo"  # the host does as much for a model of any size, because a graph is one launch
NUM_WARM_STEPS = 20
PROMPT_TOKENS = 16
METHODS: dict[str, dict[str, Any]] = {
    "naive": {"method": "naive"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
}


class Timeline:
    """When waits for results returned, and when kernels or graphs were launched."""

    def __init__(self) -> None:
        self.waited, self.launched = [0.0], list[float]()
        synchronize, call, launch = GpuBackend.synchronize, DeviceLibrary.call, DeviceLibrary.launch

        def timed_synchronize(backend: GpuBackend) -> None:
            synchronize(backend)
            self.waited.append(time.perf_counter())

        def timed_call(library: DeviceLibrary, name: str, *arguments: Any) -> None:
            if name == "fd_device_graph_launch":
                self.launched.append(time.perf_counter())
            call(library, name, *arguments)

        def timed_launch(library: DeviceLibrary, name: str, *arguments: Any) -> None:
            self.launched.append(time.perf_counter())
            launch(library, name, *arguments)

        GpuBackend.synchronize = timed_synchronize  # type: ignore[method-assign]
        DeviceLibrary.call, DeviceLibrary.launch = timed_call, timed_launch  # type: ignore[method-assign]

    def time_step(self, engine: Engine) -> tuple[float, float]:
        """Run a step; return the seconds of the host before its first launch, and from there to the wait."""
        before, num_launched, num_waited = self.waited[-1], len(self.launched), len(self.waited)
        encode(split_deltas(engine.step()))
        first = self.launched[num_launched]
        return first - before, self.waited[num_waited] - first


def make_engine(shape: str, method: str, max_seqs: int, num_steps: int) -> Engine:
    """Build an engine of random weights that nobody computes with."""
    engine = Engine.from_config(
        EngineConfig(
            model=shape,
            device="gpu",
            dtype="bfloat16",
            load_choices="dummy",
            max_model_len=PROMPT_TOKENS + num_steps + 8,
            cache=CacheConfig(num_blocks=max_seqs * 4),
            scheduler=SchedulerConfig(max_num_seqs=max_seqs, max_num_batched_tokens=max(2048, 8 * max_seqs)),
            speculative=parse_speculative_config(METHODS[method]),
        )
    )
    active().call_void("fd_emulation_do_nothing", 1)
    return engine


def measure(engine: Engine, timeline: Timeline, num_requests: int, num_steps: int) -> Row:
    """Decode requests together; return medians over `num_steps` steps."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_WARM_STEPS + num_steps, ignore_eos=True)
    for index in range(num_requests):
        prompt = [(31 * index + position) % 500 for position in range(PROMPT_TOKENS)]
        engine.add_request(GenerationRequest(f"{num_requests}-{index}", prompt, params))
    for _ in range(NUM_WARM_STEPS):
        engine.step()
    steps = [timeline.time_step(engine) for _ in range(num_steps - 1)]
    for request in list(engine.scheduler.running):
        engine.abort(request.request_id)
    host_s, launch_s = (statistics.median(column) for column in zip(*steps))
    return {"requests": num_requests, "host_us": 1e6 * host_s, "launch_us": 1e6 * launch_s}


def main() -> None:
    """Print one row per method and number of requests, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=40, help="steps per number of requests (default: 40)")
    args = parser.parse_args()
    timeline, results = Timeline(), list[Row]()
    for method in METHODS:
        engine = make_engine(args.shape, method, max(args.requests), NUM_WARM_STEPS + args.steps)
        results += [{"method": method, **measure(engine, timeline, count, args.steps)} for count in args.requests]
        active().call_void("fd_emulation_do_nothing", 0)
    print_report("gpu_host", f"{args.shape}: the host between two steps of a GPU", results, shape=args.shape)


if __name__ == "__main__":
    main()
