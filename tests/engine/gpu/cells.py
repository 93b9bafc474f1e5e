# SPDX-License-Identifier: Apache-2.0
"""A process with engines on a GPU: it reads one cell of the tests per line and answers with the texts.

    FD_GPU_EMULATED=1 python -m tests.engine.gpu.cells FOLDER

Without FD_GPU_EMULATED the engines run on a card.

FOLDER holds the small model, `target`, and those that draft for it, by their methods.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdeploy.ops.startup import prepare

if __name__ == "__main__":
    prepare("gpu")  # before Paddle is imported

from fastdeploy.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.config.speculative_config import EXTENSIONS
from fastdeploy.config.speculative_keys import parse_speculative_config
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine import engine_factory
from fastdeploy.engine.engine import Engine
from fastdeploy.engine.engine_factory import make_engine
from fastdeploy.ops.backends.gpu.backend import GpuBackend
from fastdeploy.ops.backends.gpu.graph import BucketedGraphs
from fastdeploy.ops.backends.gpu.library import DeviceLibrary, active
from fastdeploy.ops.registry import is_exact, selected_backend
from fastdeploy.worker.model_runner import ModelRunner
from tests.drafting_models import DRAFTING_MODELS
from tests.engine.hand_over import Pair
from tests.exactness.engines import Texts
from tests.exactness.requests import run_all, run_alone
from tests.ops.gpu.emulated import read_counters

NUM_TOKENS = 24
PREFIX = [20, 21, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 11, 12, 13, 14, 15]  # more than a block, and a cycle


@dataclass(frozen=True)
class Cell:
    """One run of requests.

    Attributes:
        is_split: whether one engine computes the prompts and hands them over to another one.
        failing: an operator that has failed the check of the device.
        omits: what the runner leaves out: "upload", "wait" or "download".
    """

    method: str = "naive"
    batch: int = 8
    temperature: float = 0.0
    chunk: int = 64
    prefix_caching: bool = False
    graphs: bool = True
    kv_cache_dtype: str = "auto"
    quantization: str = "none"
    is_split: bool = False
    failing: str = ""
    omits: str = ""


@dataclass
class Answer:
    """What a cell computed.

    Attributes:
        num_replays: launches of graphs.
        num_launches: of the last step, kernels that the emulator executed.
        num_paddle_calls: what Paddle asked of the device during steps that captured nothing.
    """

    texts: list[list[int]]
    error: str = ""
    is_exact: bool = True
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prefix_hits: int = 0
    num_replays: int = 0
    num_launches: int = 0
    num_paddle_calls: int = 0


def requests_of(cell: Cell) -> list[GenerationRequest]:
    """Return the requests of a cell: prompts with a common prefix, and every option of sampling on the last ones."""
    options: list[dict[str, Any]] = [{} for _ in range(5)]
    options += [{"repetition_penalty": 1.2, "top_k": 30}, {"top_p": 0.9, "presence_penalty": 0.4}, {"min_p": 0.02}]
    return [
        GenerationRequest(
            str(i),
            [*PREFIX, *range(40 + 31 * i, 45 + 31 * i)],
            SamplingParams(
                temperature=cell.temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, **options[i % 8]
            ),
        )
        for i in range(8)
    ]


def engine_of(cell: Cell, folder: Path) -> Engine:
    """Build the engine of a cell."""
    engine_factory.failing_operators = lambda device: frozenset(filter(None, [cell.failing]))
    return make_engine(config_of(cell, folder))


def config_of(cell: Cell, folder: Path, device: str = "gpu") -> EngineConfig:
    """Return the configuration of a cell."""
    is_hybrid = cell.method in EXTENSIONS
    speculative = {
        "method": "mtp" if is_hybrid else cell.method,
        "mtp_strategy": cell.method if is_hybrid else None,
        "num_speculative_tokens": None if cell.method == "naive" else 3,
        "model": str(folder / cell.method) if cell.method in DRAFTING_MODELS else None,
        "adaptive": None if cell.method == "naive" else False,
    }
    return EngineConfig(
        model=str(folder / "target"),
        device=device,
        dtype="bfloat16",
        max_model_len=64,
        quantization=QuantizationConfig.from_value(cell.quantization),
        cache=CacheConfig(
            block_size=16,
            num_blocks=40,
            enable_prefix_caching=cell.prefix_caching,
            dtype=cell.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, long_prefill_token_threshold=cell.chunk),
        speculative=parse_speculative_config({k: v for k, v in speculative.items() if v is not None}),
    )


def run(cell: Cell, folder: Path) -> Answer:
    """Compute a cell."""
    engine, answer, requests = engine_of(cell, folder), Answer([]), requests_of(cell)
    if cell.prefix_caching:
        run_alone(engine, requests[:1])  # leaves blocks in the cache, which the others find
    with counted(answer), changed(cell):
        if cell.is_split:
            texts = run_split(engine_of(cell, folder), engine, requests)
        else:
            texts = (run_alone if cell.batch == 1 else run_all)(engine, requests)
    answer.is_exact = is_exact()
    answer.texts = [list(text.token_ids) for text in texts.values()]
    answer.error = next((text.error.message for text in texts.values() if text.error is not None), "")
    engine.check_integrity()
    stats = engine.stats()
    answer.num_draft_tokens, answer.num_accepted_tokens = stats.num_draft_tokens, stats.num_accepted_tokens
    answer.num_prefix_hits = stats.num_prefix_hit_tokens
    return answer


def run_split(first: Engine, second: Engine, requests: Sequence[GenerationRequest]) -> Texts:
    """Compute the prompts with the first engine and everything else with the second one."""
    pair = Pair(first, second, num_slots=40)
    for request in requests:
        pair.add(request)
    texts = pair.texts()
    assert len(pair.handovers) == len(requests)
    return {(request.request_id, 0): texts[request.request_id, 0] for request in requests}


@contextmanager
def counted(answer: Answer) -> Iterator[None]:
    """Count the launches of graphs, and what Paddle asks of the device during steps."""
    call, run_step, num_captures = DeviceLibrary.call, ModelRunner.run, 0

    def counting_call(self: DeviceLibrary, name: str, *arguments: Any) -> None:
        nonlocal num_captures
        answer.num_replays += name == "fd_device_graph_launch"
        num_captures += name == "fd_device_graph_begin"
        call(self, name, *arguments)

    def counting_step(self: ModelRunner, *arguments: Any) -> Any:
        before, num_captured = active().paddle_counters(), num_captures
        is_emulated = selected_backend().is_emulated
        if is_emulated:
            active().call_void("fd_emulation_reset_counters")
        results = run_step(self, *arguments)
        if is_emulated:
            answer.num_launches = read_counters(active())["launches"]
        if num_captures == num_captured:
            answer.num_paddle_calls += sum(active().paddle_counters().since(before))
        return results

    with _replaced(DeviceLibrary, "call", counting_call), _replaced(ModelRunner, "run", counting_step):
        yield


@contextmanager
def changed(cell: Cell) -> Iterator[None]:
    """Leave out what the cell says."""

    def nothing(*arguments: Any) -> None:
        """Do nothing."""

    places: dict[str, tuple[type, str, Callable[..., Any]]] = {
        "upload": (ModelRunner, "_upload", nothing),
        "download": (ModelRunner, "_download", nothing),
        "wait": (GpuBackend, "synchronize", nothing),
    }
    if not cell.graphs:
        with _replaced(BucketedGraphs, "replay", lambda self, rows, seqs: self._function(rows, seqs)):
            yield
    elif cell.omits:
        with _replaced(*places[cell.omits]):
            yield
    else:
        yield


@contextmanager
def _replaced(owner: type, name: str, value: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main(arguments: Sequence[str]) -> None:
    """Answer until the input ends."""
    folder = Path(arguments[0])
    for line in sys.stdin:
        try:
            answer = run(Cell(**json.loads(line)), folder)
        except Exception as error:
            answer = Answer([], error=f"{type(error).__name__}: {error}")
        print("ANSWER", json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
