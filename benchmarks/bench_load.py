# SPDX-License-Identifier: Apache-2.0
"""How long does loading take beside reading the checkpoint's files, and how much memory beyond the weights?

    python -m benchmarks.bench_load [--shape benchmarks/shapes/qwen3-0.6b] [--layers N] [--rounds 5]
        [--quantization wint8] [--layout torch packed]

Writes a checkpoint of random bf16 weights, in torch and in Paddle layout, to a temporary folder, and with the layout
`packed` the weights that `fastdeploy quantize` makes of it, which are mapped and compared with their checksums. Each
measurement is a process of its own, which loads the model and, as the baseline, reads the files into new memory as fast
as it can (all threads, blocks of 8 MiB, huge pages), in alternating order. Both write memory that no process has
touched yet, so the operating system's clearing of it counts in both. `ratio` is the median over rounds of the two
times; `cpu_ratio` the same of processor time, which a busy machine disturbs less. Threads that wait for one another
count in it, so set FD_NUM_THREADS=1. The files are in the page cache. `peak_ratio` is the largest memory that loading
added to the process, over the bytes of the weights.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import paddle

from benchmarks.bench_memory import resident_bytes
from benchmarks.peers.make_checkpoint import write_safetensors
from benchmarks.report import Row, make_parser, print_report
from benchmarks.shape_engine import SHAPE, shape_of_layers
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.packed_checkpoint import DATA_FILE
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.models.loader import load_model
from fastdeploy.models.packing import pack_checkpoint
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from fastdeploy.ops.backends.cpu.library import num_threads
from fastdeploy.ops.registry import select_backend

BLOCK_BYTES = 1 << 23  # of one read
Result = TypeVar("Result")


@dataclass(frozen=True)
class Sample:
    """The measurement of one process: seconds, processor seconds and bytes."""

    read_s: float
    read_cpu_s: float
    load_s: float
    load_cpu_s: float
    peak_bytes: int
    weight_bytes: int


@dataclass(frozen=True)
class Job:
    """What one process measures."""

    folder: str
    quantization: str
    reads_first: bool


def write_checkpoint(shape: Path, folder: Path, layout: str) -> None:
    """Write a checkpoint of random weights; Paddle layout transposes all matrices but the embedding."""
    folder.mkdir()
    (folder / "config.json").write_text((shape / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    model = ModelConfig.from_pretrained(folder)
    architecture = find_architecture(model)
    generator = np.random.default_rng(0)
    weights = {}
    for name, size in expected_shapes(model, architecture).items():
        if layout == "paddle" and len(size) == 2 and name != architecture.names.embedding:
            size = size[::-1]
        magnitudes = generator.integers(0x3C00, 0x3D00, size, np.uint16)  # 0.0078 to 0.031
        weights[name] = magnitudes | generator.integers(0, 2, size, np.uint16) << 15
    write_safetensors(folder / "model.safetensors", weights, "np" if layout == "paddle" else "pt")


def new_memory(size: int) -> mmap.mmap:
    """Return memory that has not been touched, in huge pages if the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_files(files: list[Path]) -> None:
    """Read each file into new memory."""
    for path in files:
        size = path.stat().st_size
        target = memoryview(new_memory(size))
        begins = range(0, size, BLOCK_BYTES)
        with path.open("rb") as file, ThreadPoolExecutor(num_threads()) as pool:
            descriptors, targets = repeat(file.fileno()), (target[begin : begin + BLOCK_BYTES] for begin in begins)
            list(pool.map(lambda fd, block, begin: os.preadv(fd, [block], begin), descriptors, targets, begins))


def run_job(job: Job) -> Sample:
    """Measure reading and loading in this process."""
    paddle.set_device("cpu")
    select_backend("cpu")
    config = ModelConfig.from_pretrained(job.folder)
    files = sorted(Path(job.folder).glob("*.safetensors")) or [Path(job.folder) / DATA_FILE]
    quantization = QuantizationConfig.from_value(job.quantization)
    before_bytes = peak_bytes = weight_bytes = 0

    def load() -> None:
        nonlocal before_bytes, peak_bytes, weight_bytes
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before_bytes = resident_bytes("VmRSS")
        model = load_model(config, max_rows=64, max_model_len=1024, quantization=quantization)
        peak_bytes, weight_bytes = resident_bytes("VmHWM"), model.num_weight_bytes

    def timed(action: Callable[[], None]) -> tuple[float, float]:
        # A virtual machine fetches a page from its host only the first time: touch as much memory as is needed.
        size = 2 * sum(path.stat().st_size for path in files)
        np.frombuffer(new_memory(size), np.uint8)[:: mmap.PAGESIZE] = 1
        begin, cpu = time.perf_counter(), time.process_time()
        action()
        return time.perf_counter() - begin, time.process_time() - cpu

    if job.reads_first:
        read, loaded = timed(lambda: read_files(files)), timed(load)
    else:
        loaded, read = timed(load), timed(lambda: read_files(files))
    return Sample(*read, *loaded, peak_bytes - before_bytes, weight_bytes)


def write_packed(source: str, folder: str, quantization: str) -> None:
    """Pack a checkpoint, in a process of its own."""
    paddle.set_device("cpu")
    select_backend("cpu")
    pack_checkpoint(ModelConfig.from_pretrained(source), Path(folder), QuantizationConfig.from_value(quantization))


def summarize(samples: list[Sample]) -> Row:
    """Return medians over the rounds."""
    values = {
        "load_s": [s.load_s for s in samples],
        "read_s": [s.read_s for s in samples],
        "ratio": [s.load_s / s.read_s for s in samples],
        "cpu_ratio": [s.load_cpu_s / s.read_cpu_s for s in samples],
        "peak_ratio": [s.peak_bytes / s.weight_bytes for s in samples],
    }
    return {name: statistics.median(of_rounds) for name, of_rounds in values.items()}


def in_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Return the result of a function that a new process runs."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def main() -> None:
    """Print one row per layout and format, and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", type=Path, default=SHAPE, help=f"folder with a config.json (default: {SHAPE})")
    parser.add_argument("--layers", type=int, help="number of layers, if it is not that of --shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantization", nargs="+", default=["none"], help="as the flag of fastdeploy serve")
    parser.add_argument("--layout", nargs="+", choices=["torch", "paddle", "packed"], default=["torch", "paddle"])
    args = parser.parse_args()
    cases: dict[tuple[str, str], list[Sample]] = {(lay, kind): [] for lay in args.layout for kind in args.quantization}
    with tempfile.TemporaryDirectory() as scratch, shape_of_layers(str(args.shape), args.layers) as shape:
        for layout in {"torch" if layout == "packed" else layout for layout in args.layout}:
            write_checkpoint(Path(shape), Path(scratch) / layout, layout)
        folders = {(lay, kind): f"{scratch}/{lay}" + (f"-{kind}" if lay == "packed" else "") for lay, kind in cases}
        for (layout, kind), folder in folders.items():
            if layout == "packed":
                in_process(write_packed, f"{scratch}/torch", folder, kind)
        for index in range(args.rounds):
            for (layout, kind), samples in cases.items():
                job = Job(folders[layout, kind], kind, reads_first=index % 2 == 0)
                samples.append(in_process(run_job, job))
    rows = [{"layout": lay, "quantization": kind, **summarize(s)} for (lay, kind), s in cases.items()]
    print_report("load", f"loading, {num_threads()} threads", rows)


if __name__ == "__main__":
    main()
