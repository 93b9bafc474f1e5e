# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peers works without the peers, which are not dependencies of this repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers.compare import Job
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.entrypoints.llm import LLM
from tests.gguf.files import make_gguf

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE_LLAMA_CPP = """
from pathlib import Path
from types import SimpleNamespace

LLAMA_FTYPE_MOSTLY_BF16, LLAMA_FTYPE_MOSTLY_Q8_0 = "bf16", "q8_0"
LLAMA_FTYPE_MOSTLY_Q4_1, LLAMA_FTYPE_MOSTLY_Q4_0 = "q4_1", "q4_0"

def llama_model_quantize_default_params():
    return SimpleNamespace(allow_requantize=False)

def llama_model_quantize(source, target, params):
    if not params.allow_requantize:
        return 1
    Path(target.decode()).write_text(f"{Path(source.decode()).read_text()}, {params.ftype}")
    return 0
"""


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


def tiny_gguf(kind: str) -> bytes:
    """Return a Qwen3 of one layer whose matrices have this type, without a vocabulary."""
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    norms = {"attn_norm": 64, "ffn_norm": 64, "attn_q_norm": 16, "attn_k_norm": 16}
    tensors = [("token_embd.weight", (4096, 64), kind), ("output_norm.weight", (64,), "F32")]
    tensors += [(f"blk.0.{name}.weight", shape, kind) for name, shape in shapes.items()]
    tensors += [(f"blk.0.{name}.weight", (size,), "F32") for name, size in norms.items()]
    sizes = {"block_count": 1, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    sizes |= {"attention.value_length": 16, "vocab_size": 4096}
    metadata = {"general.architecture": "qwen3", "tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"qwen3.{key}": size for key, size in sizes.items()}
    metadata |= {"qwen3.attention.layer_norm_rms_epsilon": 1e-6, "qwen3.rope.freq_base": 1e6}
    return make_gguf(metadata, tensors)


def test_with_the_same_files_the_engine_loads_the_gguf_file_in_both_kinds_of_inputs(tmp_path: Path) -> None:
    (tmp_path / "model-q4_1.gguf").write_bytes(tiny_gguf("Q4_1"))
    done = compare(tmp_path, "--same-files", "--against", "--only", "prefill-512", bits="5")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == "files"
    assert [row["engine"].partition(",")[0] for row in found["results"]] == ["FastDeploy w4a8", "FastDeploy gguf"]
    assert all(row["prefill-512"] > 0 for row in found["results"])


def test_a_missing_file_is_named_before_an_engine_starts(tmp_path: Path) -> None:
    command = ["--same-files", "--peers-python", "none", "--bits", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers.compare", str(tmp_path), *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert f"--same-files: {tmp_path}/model-q8_0.gguf does not exist" in done.stderr


def test_llama_cpp_widens_a_file_and_quantizes_the_wide_one(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA_CPP)
    source, out = tmp_path / "real.gguf", tmp_path / "out"
    source.write_text("real")
    script = ROOT / "benchmarks/peers/make_checkpoint.py"
    command = [sys.executable, str(script), str(out), "--from-gguf", str(source)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        "model-bf16.gguf": "real, bf16",
        "model-q8_0.gguf": "real, bf16, q8_0",
        "model-q4_1.gguf": "real, bf16, q4_1",
        "model-q4_0.gguf": "real, bf16, q4_0",
    }


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
