# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/peers needs of this repository works; the peers themselves are no dependency."""

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


@pytest.fixture
def checkpoint(tiny: str, tmp_path: Path) -> Path:
    script = ROOT / "benchmarks/peers/make_checkpoint.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "made"), "--shape", tiny], check=True, timeout=120)
    return tmp_path / "made"


def test_the_checkpoint_is_one_that_loads_and_runs(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_model_len=64)
    [output] = llm.generate([[17, 18, 19]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert llm.engine.describe()["architecture"] == "Qwen3ForCausalLM"


def test_without_peers_the_engine_runs_alone_and_says_who_is_left_out(checkpoint: Path) -> None:
    flags = ["--peers-python", "none", "--bits", "16", "--only", "decode-128", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.compare", str(checkpoint), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "left out: llama_cpp_worker.py has no" in done.stdout and "openvino_worker.py has no" in done.stdout
    [row] = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["engine"].startswith("FastDeploy none") and row["decode-128"] > 0


def test_rates_are_tokens_over_their_own_time() -> None:
    assert Job(1, 512, 1, "prefill").rate(first_s=2.0, total_s=2.0) == 256.0
    assert Job(1, 128, 33, "decode").rate(first_s=2.0, total_s=4.0) == 16.0
    assert Job(16, 256, 128, "all").rate(first_s=2.0, total_s=4.0) == 512.0
