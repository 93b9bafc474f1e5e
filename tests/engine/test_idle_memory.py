# SPDX-License-Identifier: Apache-2.0
"""An idle engine with a large cache takes little more memory than one whose cache holds one context."""

from __future__ import annotations

import gc
import json
import mmap
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.config.args import engine_config_from_kwargs
from fastdeploy.core.request import GenerationRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.engine import Engine

MEBIBYTE = 1 << 20
CONTEXT = 1024
MODEL = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 1,
}
SPECULATION: dict[str, dict[str, object]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": True},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1, "adaptive": True},
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def start(folder: Path, **kwargs: Any) -> tuple[Engine, int]:
    """Return a new engine without prefix caching, and how much memory this process has more than before."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    gc.collect()  # engines that are not used any more, of which the collector alone frees the memory
    before = resident_bytes()
    arguments = {"model": str(folder), "load_choices": "dummy", "enable_prefix_caching": False, **kwargs}
    engine = Engine.from_config(engine_config_from_kwargs(arguments)[0])
    return engine, resident_bytes() - before


@pytest.mark.parametrize("speculation", SPECULATION.values(), ids=list(SPECULATION))
def test_an_idle_engine_is_at_most_64_mebibytes_larger_than_one_with_a_cache_of_one_context(
    speculation: dict[str, object], tmp_path: Path
) -> None:
    start(tmp_path)  # loads what all engines of a process share
    _, small_bytes = start(tmp_path, speculative_config=speculation, num_gpu_blocks_override=CONTEXT // 64)
    engine, idle_bytes = start(tmp_path, speculative_config=speculation)
    assert engine.describe()["kv_cache"]["bytes"] > 700 * MEBIBYTE
    assert idle_bytes < small_bytes + 64 * MEBIBYTE
    assert engine.stats().resident_cache_bytes == 0

    before = resident_bytes()
    for number in range(1000):
        engine.add_request(GenerationRequest(f"r{number}", [2 + number % 500, 7], SamplingParams(max_tokens=2)))
        while engine.has_unfinished():
            engine.step()
    assert idle_bytes + resident_bytes() - before < small_bytes + 64 * MEBIBYTE


def test_a_cache_of_a_given_size_is_resident_at_the_start(tmp_path: Path) -> None:
    engine, num_bytes = start(tmp_path, kv_cache_memory=400 * MEBIBYTE)
    assert num_bytes > engine.describe()["kv_cache"]["bytes"] > 390 * MEBIBYTE
    assert engine.stats().resident_cache_bytes is None
