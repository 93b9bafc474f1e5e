# SPDX-License-Identifier: Apache-2.0
"""Loading of a model's shape against reading its files and writing their bytes to fresh memory once.

    python -m benchmarks.bench_load [--shape benchmarks/shapes/qwen3-0.6b] [--rounds 5] [--cold] [--quantization wint8]

Writes a checkpoint of random bfloat16 weights in torch layout, and the same in Paddle layout, to a temporary folder.
Every measurement is a process of its own: it reads the files as fast as it can (all threads, blocks of 8 MiB, into
huge pages), and loads the model, first the one or first the other in turn. Both write memory that nobody has touched,
so the system's clearing of it, half of either, counts in both; where a host takes free memory back from its virtual
machine single figures scatter, though so much memory is touched before each. `ratio` is the median over rounds of the
load's time over the reading's of the same process; `cpu` the same of processor time, which a busy machine disturbs
less; threads that wait for each other count in it, so set FD_NUM_THREADS=1. With --cold the files leave the page cache
before each of the two. `peak` is the most memory that the process held during the load, beyond what it held before,
over the bytes of the weights.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from math import prod
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import paddle

from benchmarks.report import print_json, print_table
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import QuantizationConfig
from fastdeploy.models.loader import load_model
from fastdeploy.models.registry import find_architecture
from fastdeploy.models.weights import expected_shapes
from fastdeploy.ops.backends.cpu.library import num_threads
from fastdeploy.ops.registry import select_backend

BLOCK = 1 << 23  # bytes of one read


@dataclass(frozen=True)
class Sample:
    """One process's measurement: seconds, processor seconds and bytes."""

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
    is_cold: bool
    reads_first: bool


def write_checkpoint(shape: Path, folder: Path, layout: str) -> int:
    """Write a checkpoint of random weights; return the bytes of its tensors."""
    config = json.loads((shape / "config.json").read_text(encoding="utf-8"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = ModelConfig.from_pretrained(folder)
    architecture = find_architecture(model)
    generator = np.random.default_rng(0)
    shapes = {
        name: sizes[::-1] if layout == "paddle" and len(sizes) == 2 and name != architecture.names.embedding else sizes
        for name, sizes in expected_shapes(model, architecture).items()
    }
    ends = np.cumsum([2 * prod(sizes) for sizes in shapes.values()]).tolist()
    header: dict[str, object] = {"__metadata__": {"format": "np" if layout == "paddle" else "pt"}}
    for (name, sizes), end in zip(shapes.items(), ends, strict=True):
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [end - 2 * prod(sizes), end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for sizes in shapes.values():
            magnitudes = generator.integers(0x3C00, 0x3D00, sizes, np.uint16)  # 0.0078 to 0.031
            file.write((magnitudes | generator.integers(0, 2, sizes, np.uint16) << 15).data)
    return int(ends[-1])


def fresh_memory(size: int) -> mmap.mmap:
    """Return memory that nobody has touched, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def read_files(folder: Path) -> None:
    """Read every weight file into fresh memory."""
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        target = memoryview(fresh_memory(size))
        begins = range(0, size, BLOCK)
        with path.open("rb") as file, ThreadPoolExecutor(num_threads()) as pool:
            descriptors, targets = repeat(file.fileno()), (target[begin : begin + BLOCK] for begin in begins)
            list(pool.map(lambda fd, block, begin: os.preadv(fd, [block], begin), descriptors, targets, begins))


def evict(folder: Path) -> None:
    """Ask the system to forget the files' pages."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def provide_memory(size: int) -> None:
    """Touch and give back so much memory: a virtual machine pays its host for a page only the first time."""
    np.frombuffer(fresh_memory(size), np.uint8)[:: mmap.PAGESIZE] = 1


def resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def run_job(job: Job) -> Sample:
    """Measure reading and loading in this process."""
    paddle.set_device("cpu")
    select_backend("cpu")
    folder = Path(job.folder)
    config = ModelConfig.from_pretrained(folder)
    quantization = QuantizationConfig.from_value(job.quantization)

    def load() -> int:
        model = load_model(config, max_rows=64, max_model_len=1024, quantization=quantization)
        return model.num_weight_bytes

    def timed(action: Callable[[], object]) -> tuple[float, float, object]:
        if job.is_cold:
            evict(folder)
        provide_memory(2 * sum(path.stat().st_size for path in folder.glob("*.safetensors")))
        begin, cpu = time.perf_counter(), time.process_time()
        result = action()
        return time.perf_counter() - begin, time.process_time() - cpu, result

    def timed_load() -> tuple[float, float, int, int]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = resident_bytes("VmRSS")
        seconds, cpu, weight_bytes = timed(load)
        assert isinstance(weight_bytes, int)
        return seconds, cpu, resident_bytes("VmHWM") - before, weight_bytes

    if job.reads_first:
        read_s, read_cpu_s, _ = timed(lambda: read_files(folder))
        load_s, load_cpu_s, peak, weight_bytes = timed_load()
    else:
        load_s, load_cpu_s, peak, weight_bytes = timed_load()
        read_s, read_cpu_s, _ = timed(lambda: read_files(folder))
    return Sample(read_s, read_cpu_s, load_s, load_cpu_s, peak, weight_bytes)


def sample(job: Job) -> Sample:
    """Run a job in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run_job, job).result()


def main() -> None:
    """Print one row per layout and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="benchmarks/shapes/qwen3-0.6b", help="folder with a config.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the page cache")
    parser.add_argument("--quantization", nargs="+", default=["none"], help="as the flag of fastdeploy serve")
    parser.add_argument("--layout", nargs="+", choices=["torch", "paddle"], default=["torch", "paddle"])
    args = parser.parse_args()
    cases: dict[tuple[str, str], list[Sample]] = {(lay, kind): [] for lay in args.layout for kind in args.quantization}
    with tempfile.TemporaryDirectory() as scratch:
        file_bytes = [write_checkpoint(Path(args.shape), Path(scratch) / layout, layout) for layout in args.layout]
        for index in range(args.rounds):
            for (layout, kind), samples in cases.items():
                samples.append(sample(Job(str(Path(scratch) / layout), kind, args.cold, index % 2 == 0)))
    rows = [[*case, *summary(samples)] for case, samples in cases.items()]
    names = ("layout", "quantization", "load_s", "read_s", "ratio", "cpu_ratio", "peak_ratio")
    state = "cold" if args.cold else "warm"
    print_table(f"{file_bytes[0] / 1e9:.2f} GB, page cache {state}, {num_threads()} threads", names, rows)
    print_json(
        {
            "benchmark": "load",
            "cache": state,
            "threads": num_threads(),
            "file_bytes": file_bytes[0],
            "cases": [dict(zip(names, row, strict=True)) for row in rows],
            "samples": [asdict(one) for samples in cases.values() for one in samples],
        }
    )


def summary(samples: list[Sample]) -> list[float]:
    """Return medians: seconds of the load and the reading, the two ratios, the peak over the weights."""
    return [
        statistics.median(values)
        for values in (
            [one.load_s for one in samples],
            [one.read_s for one in samples],
            [one.load_s / one.read_s for one in samples],
            [one.load_cpu_s / one.read_cpu_s for one in samples],
            [one.peak_bytes / one.weight_bytes for one in samples],
        )
    ]


if __name__ == "__main__":
    main()
