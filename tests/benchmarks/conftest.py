# SPDX-License-Identifier: Apache-2.0
"""A small model shape, and readings of the machine that take little time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import roofline

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(TINY))
    return str(tmp_path / "tiny")


@pytest.fixture
def tiny_experts(tmp_path: Path) -> str:
    """Return a shape with experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    names = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    (tmp_path / "experts").mkdir()
    (tmp_path / "experts/config.json").write_text(json.dumps(TINY | names | experts))
    return str(tmp_path / "experts")


@pytest.fixture
def small_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read 1 MiB instead of several times the cache, and multiply small matrices."""
    monkeypatch.setattr(roofline, "BLOCKED_ROWS", 24)
    monkeypatch.setattr(roofline, "BLOCKED_OUT", 64)
    monkeypatch.setattr(roofline, "REGISTER_STEPS", 100)
    monkeypatch.setattr(roofline, "MIN_WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(roofline, "CACHES", tmp_path / "no caches")
