# SPDX-License-Identifier: Apache-2.0
"""How fast is this engine beside llama.cpp and OpenVINO GenAI, on the same weights and in the same run?

    python -m benchmarks.peers.compare CHECKPOINT --peers-python VENV/bin/python [--bits 16 8 5 4] [--rounds 2]
        [--threads 2] [--clock wall] [--limit-s 15] [--total-s 420] [--only decode-128 prefill-512]
        [--against openvino]
    python -m benchmarks.peers.compare FOLDER --same-files --peers-python VENV/bin/python [...]

CHECKPOINT is the output of make_checkpoint.py --gguf, with OpenVINO's exports beside its files (README.md). The engines
of one number of bits are loaded together, each in a process of its own, and run one at a time. Figures are medians of
tokens per second. If `over` names a peer, the baseline, they are medians over rounds of ours over the peer's.

After the prefill a job decodes for at most --limit-s seconds. A job that is cut counts as if its other tokens had come
at the same pace, which favours it, because contexts would have grown longer; `cut` names these jobs. No job starts
later than --total-s seconds after the first engine of that number of bits. `rounds` is the number of rounds behind each
median.

With --same-files FOLDER has only GGUF files, and both engines load the same one: this one keeps its codes, with inputs
of 16 bits (`gguf`) and of eight (`w8a8`, `w4a8`), which llama.cpp has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.worker_process import WorkerProcess
from benchmarks.report import ROOT, Row, make_parser, print_report

HERE = Path(__file__).resolve().parent
OURS = {16: ["none"], 8: ["w8a8", "wint8"], 5: ["w4a8_min", "wint4_min"], 4: ["w4a8", "wint4"]}
OURS_ON_FILES = {16: ["none"], 8: ["w8a8", "gguf"], 5: ["w4a8", "gguf"], 4: ["w4a8", "gguf"]}
PEERS = ["llama_cpp", "openvino"]
GGUF = {16: "bf16", 8: "q8_0", 5: "q4_1", 4: "q4_0"}
OPENVINO = {16: "fp16", 8: "int8", 4: "int4"}  # none with minimums


@dataclass(frozen=True)
class Job:
    """Requests of equal lengths; `figure` is the reported rate: decode, prefill, or all output tokens per second.

    Each decoding step computes `rows` rows per request, as if it verified rows - 1 drafts, and emits one token.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int
    figure: str
    rows: int = 1

    def rate(self, first_s: float, total_s: float, num_steps: int) -> float:
        """Return tokens per second of a run whose requests emitted `num_steps` tokens each after the first."""
        if self.figure == "prefill":
            return self.prompt_tokens / first_s
        if self.figure == "decode":
            return num_steps / (total_s - first_s)
        all_steps = self.new_tokens - 1
        return self.requests * self.new_tokens / (first_s + (total_s - first_s) * all_steps / num_steps)

    def is_cut(self, num_steps: int) -> bool:
        """Return whether `num_steps` tokens after the first are fewer than requested."""
        return num_steps < self.new_tokens - 1


JOBS = {
    "decode-128": Job(1, 128, 33, "decode"),
    "decode-2048": Job(1, 2048, 33, "decode"),
    "verify-2": Job(1, 128, 33, "decode", rows=2),
    "verify-4": Job(1, 128, 33, "decode", rows=4),
    "prefill-512": Job(1, 512, 1, "prefill"),
    "prefill-2048": Job(1, 2048, 1, "prefill"),
    "streams-16": Job(16, 256, 128, "all"),
}


@dataclass
class Worker:
    """An engine in a process of its own, and its rates by job, one per round."""

    process: WorkerProcess
    name: str
    is_ours: bool
    verifies: bool  # whether it can compute several rows of one request
    rates: dict[str, list[float]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # jobs that reached the limit

    @classmethod
    def start(cls, command: list[str], environment: dict[str, str]) -> Worker:
        """Start a worker and wait until its engine is loaded."""
        process, script = WorkerProcess(command, environment), Path(command[1]).name
        return cls(process, process.ready["ready"], script == "fastdeploy_worker.py", script != "openvino_worker.py")

    def run(self, name: str, job: Job, limit_s: float) -> float:
        """Run a job that decodes for at most `limit_s` seconds; return its rate."""
        parts = {"requests": job.requests, "prompt_tokens": job.prompt_tokens, "new_tokens": job.new_tokens}
        answer = self.process.ask({**parts, "rows": job.rows, "limit_s": limit_s})
        if job.is_cut(answer["num_steps"]):
            self.cut.add(name)
        return job.rate(**answer)


def commands(args: argparse.Namespace, bits: int) -> list[list[str]]:
    """Return the commands of the workers: ours, and those of the peers whose files exist."""
    peer, file = str(args.peers_python), args.checkpoint / f"model-{GGUF[bits]}.gguf"
    model, formats = (file, OURS_ON_FILES) if args.same_files else (args.checkpoint, OURS)
    found = [[sys.executable, str(HERE / "fastdeploy_worker.py"), str(model), kind] for kind in formats[bits]]
    files = {"llama_cpp": file}
    if bits in OPENVINO and not args.same_files:
        files["openvino"] = args.checkpoint / f"openvino-{OPENVINO[bits]}"
    for name, path in files.items():
        script = f"{name}_worker.py"
        if name in args.against and path.exists():
            found.append([peer, str(HERE / script), str(path)])
        elif name in args.against:
            print(f"left out: {script}: {path} does not exist")
    return found


def compare(args: argparse.Namespace, bits: int) -> list[Worker]:
    """Run all jobs on all engines of one number of bits, in alternation, until --total-s have passed."""
    end = time.monotonic() + args.total_s
    environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "FD_NUM_THREADS": str(args.threads),
        "PEERS_THREADS": str(args.threads),
        "PEERS_CLOCK": args.clock,
    }
    workers = [Worker.start(command, environment) for command in commands(args, bits)]
    for worker in workers:
        worker.run("first", Job(1, 32, 4, "decode"), args.limit_s)  # the first call is slower and not counted
    for name in args.only * args.rounds:
        for worker in workers:
            if time.monotonic() < end and (worker.verifies or JOBS[name].rows == 1):
                measure(worker, name, args.limit_s)
    for worker in workers:
        worker.process.stop()
    return workers


def measure(worker: Worker, name: str, limit_s: float) -> None:
    """Run a job on a worker and print its rate to stderr."""
    rate = worker.run(name, JOBS[name], limit_s)
    worker.rates.setdefault(name, []).append(rate)
    print(f"{worker.name}, {name}: {rate:.1f} tokens/s", file=sys.stderr, flush=True)


def make_rows(workers: list[Worker], bits: int, jobs: list[str]) -> list[Row]:
    """Return a row per engine with its rates, and a row per pair of ours and a peer with the ratios."""
    rows = []
    for worker in workers:
        rates = {job: worker.rates.get(job, []) for job in jobs}
        rows.append(_row(bits, worker.name, "tokens/s", rates, worker.cut))
    for ours in (w for w in workers if w.is_ours):
        for peer in (w for w in workers if not w.is_ours):
            ratios = {job: [a / b for a, b in zip(ours.rates.get(job, []), peer.rates.get(job, []))] for job in jobs}
            rows.append(_row(bits, ours.name, peer.name, ratios, ours.cut | peer.cut))
    return rows


def _row(bits: int, name: str, over: str, figures: dict[str, list[float]], cut: set[str]) -> Row:
    """Return medians over the rounds, None for jobs without a round, and the number of rounds of each job."""
    medians = {job: statistics.median(values) if values else None for job, values in figures.items()}
    rounds = " ".join(str(len(values)) for values in figures.values())
    was_cut = " ".join(job for job in JOBS if job in cut) or "-"
    return {"bits": bits, "engine": name, "over": over, **medians, "cut": was_cut, "rounds": rounds}


def main() -> None:
    """Print rates and ratios and one JSON line."""
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--same-files", action="store_true", help="this engine loads the peers' GGUF files, too")
    parser.add_argument("--peers-python", type=Path, required=True, help="the Python of the peers' environment")
    parser.add_argument("--bits", type=int, nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--only", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--against", nargs="*", choices=PEERS, default=PEERS, help="the peers (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=15.0, help="seconds of decoding per job (default: 15)")
    parser.add_argument("--total-s", type=float, default=420.0, help="seconds per number of bits (default: 420)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for one thread")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock: cpu: expected --threads 1")
    missing = [path for bits in args.bits if not (path := args.checkpoint / f"model-{GGUF[bits]}.gguf").is_file()]
    if args.same_files and missing:
        parser.error(f"--same-files: {missing[0]} does not exist")
    rows = [row for bits in args.bits for row in make_rows(compare(args, bits), bits, args.only)]
    name = "files" if args.same_files else "peers"
    print_report(name, f"{args.threads} threads, {args.clock} time", rows, threads=args.threads, clock=args.clock)


if __name__ == "__main__":
    main()
