# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peers works without the peers, which are not dependencies of this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import Job
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.entrypoints.llm import LLM

ROOT = Path(__file__).resolve().parent.parent.parent


def make_checkpoint(shape: str, folder: Path, *flags: str) -> Path:
    script = ROOT / "benchmarks/peers/make_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(folder), "--shape", shape, *flags], check=True, timeout=120)
    return folder


@pytest.fixture
def checkpoint(tiny: str, tmp_path: Path) -> Path:
    return make_checkpoint(tiny, tmp_path / "made")


def test_the_checkpoint_loads_and_runs(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=64)
    [output] = llm.generate([[17, 18, 19]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert llm.engine.describe()["architecture"] == "Qwen3ForCausalLM"


def test_a_checkpoint_with_experts_runs_in_equal_bits(tiny_experts: str, tmp_path: Path) -> None:
    made = make_checkpoint(tiny_experts, tmp_path / "made", "--layers", "1")
    done = compare(made, "--limit-s", "1e-9", bits="4")
    names = [row["engine"] for row in json.loads(done.stdout.splitlines()[-1])["results"]]
    assert any(name.startswith("FastDeploy w4a8") for name in names)
    assert any(name.startswith("FastDeploy wint4") for name in names)


def compare(checkpoint: Path, *flags: str, bits: str = "16") -> subprocess.CompletedProcess[str]:
    """Run three jobs, once."""
    only = ["decode-128", "verify-2", "prefill-512"]
    jobs = ["--peers-python", "none", "--bits", bits, "--only", *only, "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.peers.compare", str(checkpoint), *jobs, "--threads", "1", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_without_peers_the_engine_runs_alone_and_names_those_left_out(checkpoint: Path) -> None:
    done = compare(checkpoint, "--limit-s", "1e-9")
    assert "left out: llama_cpp_worker.py:" in done.stdout and "left out: openvino_worker.py:" in done.stdout
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["engine"].startswith("FastDeploy none") and row["decode-128"] > 0 and row["prefill-512"] > 0
    assert row["cut"] == "decode-128 verify-2" and row["rounds"] == "1 1 1"


def test_no_job_starts_after_the_total_time(checkpoint: Path) -> None:
    done = compare(checkpoint, "--total-s", "0", "--against", "openvino")
    assert "left out: openvino_worker.py:" in done.stdout and "llama_cpp" not in done.stdout
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["decode-128"] is None and row["prefill-512"] is None and row["rounds"] == "0 0 0"


def test_rates_are_tokens_over_their_own_time() -> None:
    assert Job(1, 512, 1, "prefill").rate(first_s=2.0, total_s=2.0, num_steps=0) == 256.0
    assert Job(1, 128, 33, "decode").rate(first_s=2.0, total_s=4.0, num_steps=32) == 16.0
    assert Job(16, 256, 128, "all").rate(first_s=2.0, total_s=4.0, num_steps=127) == 512.0


def test_a_job_that_is_cut_counts_as_if_the_rest_had_come_at_the_same_pace() -> None:
    assert Job(1, 128, 33, "decode").rate(first_s=2.0, total_s=3.0, num_steps=16) == 16.0
    streams = Job(16, 256, 129, "all")
    assert streams.rate(first_s=2.0, total_s=4.0, num_steps=32) == 16 * 129 / (2.0 + 4 * 2.0)
    assert streams.is_cut(32) and not streams.is_cut(128)
    assert not Job(1, 512, 1, "prefill").is_cut(0)
