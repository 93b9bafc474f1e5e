# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a GPU do not take is refused when an engine is made, before weights are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gpu.small_model import HIDDEN, VOCAB_SIZE, write_model
from tests.spec_decode.drafting.head_folders import mlp_speculator

MAKE_ENGINES = """
import json, sys
from fastdeploy.ops.startup import prepare
prepare("gpu")
from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.core.errors import ConfigError
from fastdeploy.engine.engine_factory import make_engine
for line in sys.stdin:
    try:
        config, _ = engine_config_from_kwargs({"device": "gpu", "max_model_len": 64, **json.loads(line)})
        make_engine(config)
        print("REFUSED not")
    except ConfigError as error:
        print("REFUSED", error)
"""
DRAFT = "path of a draft model"  # in the flags of a case
HEAD = "path of an MLP speculator"
DRAFTS = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "head_dim": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # (config.json, flags, message)
    ({}, {"dtype": "float32"}, "dtype: float32 is not available on a GPU; take bfloat16"),
    ({"head_dim": 32}, {}, "head_dim: expected 64, 128, 256 on a GPU, got 32"),
    ({"hidden_size": 60}, {}, "hidden_size: expected a multiple of 8 on a GPU, got 60"),
    ({"intermediate_size": 124}, {}, "intermediate_size: expected a multiple of 8 on a GPU, got 124"),
    ({"vocab_size": 262145}, {}, "vocab_size: expected at most 262144 on a GPU, got 262145"),
    (
        EXPERTS,
        {},
        "architectures: Qwen3MoeForCausalLM needs route, experts_up, experts_down, which gpu does not have yet",
    ),
    (
        LATENT,
        {},
        "architectures: DeepseekV2ForCausalLM needs route, experts_up, experts_down, append_latent_attention, "
        "project_heads, which gpu does not have yet",
    ),
    ({}, {"max_num_seqs": 2049}, "max_num_seqs: expected at most 2048 on this device, got 2049"),
    ({}, {"speculative_config": DRAFTS}, "speculative_config.model: head_dim: expected 64, 128, 256 on a GPU, got 96"),
    (
        {},
        {"speculative_config": {"model": HEAD}},
        "speculative_config.model: inner_dim: expected a multiple of 8 on a GPU, got 12",
    ),
]


def write_config(folder: Path, changes: Mapping[str, Any]) -> str:
    """Write the small model with another config.json, and return its path."""
    config = write_model(folder, has_mtp_layer=False) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    return str(folder)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process on the emulated GPU says to all cases."""
    folder, lines = tmp_path_factory.mktemp("models"), []
    draft = write_config(folder / "draft", {"head_dim": 96})
    head = mlp_speculator(folder / "head", hidden=HIDDEN, vocab=VOCAB_SIZE, inner=12)
    for number, (changes, flags, _) in enumerate(CASES):
        line = json.dumps({"model": write_config(folder / str(number), changes), **flags})
        lines.append(line.replace(DRAFT, draft).replace(HEAD, str(head)))
    done = subprocess.run(
        [sys.executable, "-c", MAKE_ENGINES],
        input="\n".join(lines),
        env={**os.environ, "FD_GPU_EMULATED": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("REFUSED ") for line in done.stdout.splitlines() if line.startswith("REFUSED ")]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[message.split(": expected")[0] for *_, message in CASES])
def test_a_gpu_refuses_by_name_what_its_kernels_do_not_take(number: int, refusals: list[str]) -> None:
    assert refusals[number] == CASES[number][2]
