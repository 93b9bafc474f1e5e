# SPDX-License-Identifier: Apache-2.0
"""The law of exactness holds for quantized safetensors: one plain text per checkpoint and format."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fastdeploy.config.engine_config import EngineConfig
from fastdeploy.config.model_config import ModelConfig
from fastdeploy.config.quantization import UNQUANTIZED, QuantizationConfig
from fastdeploy.core.request import GenerationRequest
from fastdeploy.models.packing import pack_checkpoint
from tests.engine.hand_over import make_pair, run_moving
from tests.exactness.engines import CHUNKS, NUM_DRAFTS, Texts, build, check_drafts, check_speculation, config, exists
from tests.exactness.golden_models import NUM_BLOCKS, make_requests
from tests.exactness.requests import run_all, run_alone
from tests.models.model_driver import GOLDEN
from tests.pairwise import pairwise

CHECKPOINTS = (
    "awq_gptq/awq_64",
    "awq_gptq/awq_experts",
    "awq_gptq/gptq_int8_32_head",
    "awq_gptq/gptq_reordered",
    "compressed_tensors/llama_mixed",
    "compressed_tensors/llama_w8a8",
    "compressed_tensors/qwen3_moe",
    "fp8/qwen3_per_output",
)
WITH_LAYER = ("fp8/glm4_moe",)
REQUESTED = ("", "w8a8", "w4a8", "none")  # "": what the checkpoint has
CACHES = ("auto", "int8")
TOGETHER = ("together", "prefix-hits-together", "preemption")
NUM_REQUESTS = 6
NUM_TOKENS = 60  # that all vocabularies have
CASES = [
    *pairwise(CHECKPOINTS, REQUESTED, CACHES, TOGETHER, ("suffix", "oracle"), CHUNKS, NUM_DRAFTS),
    *pairwise(WITH_LAYER, REQUESTED, CACHES, TOGETHER, ("mtp",), CHUNKS, NUM_DRAFTS, allowed=exists),
]


def change(name: str, requested: str, kv_cache: str) -> Callable[[EngineConfig], EngineConfig]:
    """Return what makes the configuration of a test that of a checkpoint."""

    def changed(cfg: EngineConfig) -> EngineConfig:
        num_blocks = None if cfg.cache.num_blocks is None else NUM_BLOCKS
        threshold = min(cfg.scheduler.long_prefill_token_threshold, 64)
        return replace(
            cfg,
            model=str(GOLDEN / name),
            dtype="bfloat16",
            quantization=QuantizationConfig.from_value(requested) if requested else UNQUANTIZED,
            max_model_len=64,
            cache=replace(cfg.cache, num_blocks=num_blocks, dtype=kv_cache),
            scheduler=replace(cfg.scheduler, long_prefill_token_threshold=threshold),
        )

    return changed


@cache
def plain_texts(name: str, requested: str, kv_cache: str) -> tuple[list[GenerationRequest], Texts]:
    """Return requests and their plain decoding, one request at a time."""
    requests = [
        replace(one, prompt_token_ids=[i % NUM_TOKENS for i in one.prompt_token_ids]) for one in make_requests()
    ]
    requests = requests[:NUM_REQUESTS]
    return requests, run_alone(build(change(name, requested, kv_cache)(config())), requests)


@pytest.mark.parametrize(("name", "requested", "kv_cache", "way", "method", "chunk", "num_drafts"), CASES)
def test_speculation(
    name: str, requested: str, kv_cache: str, way: str, method: str, chunk: int, num_drafts: int
) -> None:
    form = name, requested, kv_cache
    check_speculation(way, *plain_texts(*form), method, chunk, num_drafts, change(*form))


@pytest.mark.parametrize(
    ("name", "requested"),
    [("awq_gptq/awq_64", ""), ("compressed_tensors/llama_mixed", "w8a8"), ("fp8/glm4_moe", "wint8")],
)
def test_a_packed_folder_has_the_texts_of_the_checkpoint(name: str, requested: str, tmp_path: Path) -> None:
    requests, plain = plain_texts(name, requested, "int8")
    method = "mtp" if name in WITH_LAYER else "suffix"
    cfg = change(name, requested, "int8")(config(method, 3, chunk=7))
    pack_checkpoint(ModelConfig.from_pretrained(cfg.model, dtype=cfg.dtype), tmp_path / "packed", cfg.quantization)
    packed = build(replace(cfg, model=str(tmp_path / "packed"), quantization=UNQUANTIZED))
    assert run_all(packed, requests) == plain
    check_drafts(packed, method, 3)
    assert packed.describe()["fingerprint"] == build(cfg).describe()["fingerprint"]


@pytest.mark.parametrize("name", ["awq_gptq/gptq_int8_32_head", "compressed_tensors/qwen3_moe", "fp8/qwen3_per_output"])
def test_a_text_is_handed_over_to_an_engine_with_a_copy_of_the_files(name: str, tmp_path: Path) -> None:
    requests, plain = plain_texts(name, "", "auto")
    copy = shutil.copytree(GOLDEN / name, tmp_path / "copy")
    folders = iter([str(GOLDEN / name), str(copy)])
    changed = change(name, "", "auto")
    pair = make_pair(plain, "naive", "suffix", change=lambda cfg: replace(changed(cfg), model=next(folders)))
    assert run_moving(pair, requests, random.Random(1)) == plain
    assert pair.importing.num_imported_blocks > 0 and pair.importing.num_failed_blocks == {}
    first, second = (engine.describe()["fingerprint"] for engine in (pair.first, pair.second))
    assert first == second


def test_texts_are_those_of_the_form_and_not_of_another_one() -> None:
    texts = [repr(plain_texts("compressed_tensors/llama_mixed", requested, "auto")[1]) for requested in REQUESTED]
    assert len(set(texts)) == len(REQUESTED)
